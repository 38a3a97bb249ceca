"""Where a request ends and which text it shows, held to a reading of the whole text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import Request, SamplingParams
from engine.stopping import Step, StopChecker

EOS = 0
PIECES = [b"<eos>", b"a", b"b", b"ab", b"aab", b"c a", b"", b"\xc3", b"\xa9", b"\xf0\x9f", b"bca"]


class PieceTokenizer:
    """Token n stands for the bytes PIECES[n]; token 0 is special and ends a text."""

    eos_token_ids = special_token_ids = frozenset({EOS})

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return b"".join(
            PIECES[token] for token in ids if token != EOS or not skip_special_tokens
        ).decode(errors="replace")  # fmt: skip

    def token_bytes(self, token_id: int) -> bytes:
        return PIECES[token_id]


def run(ids: Sequence[int], max_context_len: int = 1000, prompt_len: int = 3, **params: Any) -> list[Step]:
    """The steps of `ids`, up to the one that ends the request."""
    sampling = SamplingParams(**{"max_tokens": 1000} | params)
    request = Request("r", [1] * prompt_len, sampling, lambda event: None)
    checker = StopChecker(PieceTokenizer(), request, max_context_len)
    steps = []
    for token in ids:
        steps.append(checker.push(token))
        if steps[-1].finish_reason is not None:
            break
    return steps


def text_of(steps: list[Step]) -> str:
    return "".join(step.text for step in steps)


def ids_of(text: str) -> list[int]:
    return [PIECES.index(letter.encode()) for letter in text]


# -- stop strings


def whole_text(ids: Sequence[int], final: bool) -> str:
    """Text of `ids`, without a last character that is still under way unless nothing follows."""
    data = b"".join(PIECES[token] for token in ids if token != EOS)
    if not final:
        under_way = next(
            (part for part in (b"\xf0\x9f\xa9", b"\xf0\x9f", b"\xc3") if data.endswith(part)), b""
        )
        data = data.removesuffix(under_way)
    return data.decode(errors="replace")


def by_the_whole_text(ids: Sequence[int], params: SamplingParams, limit: int) -> tuple[str, int, Step | None]:
    """Text, number of tokens and the end, found by reading the text from its beginning after every token."""
    for count in range(1, len(ids) + 1):
        token = ids[count - 1]
        may_stop = count > params.min_tokens
        is_eos = may_stop and token == EOS and not params.ignore_eos
        is_stop = is_eos or (may_stop and token in params.stop_token_ids)
        final = is_stop or count >= limit
        hidden = is_stop and not params.include_stop_str_in_output
        text = whole_text(ids[: count - hidden], final)
        start = len(whole_text(ids[: min(count, params.min_tokens)], final and not may_stop))
        for end in range(start + 1, len(text) + 1):
            for stop in sorted(params.stop, key=len, reverse=True):
                if may_stop and text[start:end].endswith(stop):
                    cut = end if params.include_stop_str_in_output else end - len(stop)
                    return text[:cut], count, Step("", "stop", stop)
        if is_stop:
            return text, count, Step("", "stop", None if is_eos else token)
        if final:
            return text, count, Step("", "length")
    return whole_text(ids, final=False), len(ids), None


@settings(max_examples=500, deadline=None)
@given(
    ids=st.lists(st.integers(0, len(PIECES) - 1), max_size=14),
    stop=st.lists(st.text(alphabet="abcé ", min_size=1, max_size=4), max_size=3).map(tuple),
    stop_token_ids=st.lists(st.integers(0, len(PIECES) - 1), max_size=1).map(tuple),
    min_tokens=st.integers(0, 4),
    limit=st.integers(1, 14),
    include=st.booleans(),
    ignore_eos=st.booleans(),
)
def test_steps_agree_with_the_whole_text(
    ids: list[int],
    stop: tuple[str, ...],
    stop_token_ids: tuple[int, ...],
    min_tokens: int,
    limit: int,
    include: bool,
    ignore_eos: bool,
) -> None:
    params: dict[str, Any] = {
        "stop": stop,
        "stop_token_ids": stop_token_ids,
        "min_tokens": min(min_tokens, limit),
        "max_tokens": limit,
        "include_stop_str_in_output": include,
        "ignore_eos": ignore_eos,
    }
    steps = run(ids, **params)
    text, count, end = by_the_whole_text(ids, SamplingParams(**params), limit)
    assert len(steps) == count
    if end is not None:
        assert text_of(steps) == text
        assert (steps[-1].finish_reason, steps[-1].stop_reason) == (end.finish_reason, end.stop_reason)
        return
    shown = text_of(steps)
    held = text[len(shown) :]
    assert text == shown + held
    assert all(step.finish_reason is None for step in steps)
    # What is held may become a stop string, and nothing before it may.
    assert not held or any(s.startswith(held) and s != held for s in stop)


@pytest.mark.parametrize("pieces", [["ab", "c a"], ["a", "b", "c a"], ["aab", "c a"]], ids=str)
def test_a_stop_string_never_leaks_however_it_is_split(pieces: list[str]) -> None:
    steps = run([PIECES.index(piece.encode()) for piece in pieces], stop=("bc",))
    assert text_of(steps) == "".join(pieces).split("bc")[0]
    assert steps[-1] == Step(steps[-1].text, "stop", "bc")


def test_a_held_tail_is_shown_once_it_cannot_become_a_stop_string() -> None:
    assert [step.text for step in run(ids_of("abab"), stop=("aba!",))] == ["", "", "", "ab"]
    assert [step.text for step in run(ids_of("aabb"), stop=("ac",))] == ["", "a", "ab", "b"]


def test_a_held_tail_is_shown_when_the_request_ends() -> None:
    assert text_of(run(ids_of("ab"), stop=("abc",), max_tokens=2)) == "ab"
    assert text_of(run([*ids_of("ab"), EOS], stop=("abc",))) == "ab"


def test_the_stop_string_that_is_complete_first_counts() -> None:
    steps = run([PIECES.index(b"bca")], stop=("bca", "c"))
    assert steps == [Step("b", "stop", "c")]


def test_of_stop_strings_completed_together_the_longest_counts() -> None:
    assert run([PIECES.index(b"aab")], stop=("b", "ab")) == [Step("a", "stop", "ab")]


def test_a_stop_string_is_shown_on_request_and_nothing_after_it() -> None:
    steps = run([PIECES.index(b"bca")], stop=("bc",), include_stop_str_in_output=True)
    assert steps == [Step("bc", "stop", "bc")]


def test_a_stop_string_must_lie_behind_the_first_min_tokens() -> None:
    assert [step.text for step in run(ids_of("abab"), stop=("ab",), min_tokens=1)] == ["a", "b", "", ""]
    assert run(ids_of("abab"), stop=("ab",), min_tokens=1)[-1].stop_reason == "ab"


# -- tokens and limits


def test_eos_ends_a_text_without_showing_itself() -> None:
    steps = run([1, EOS, 1], skip_special_tokens=False)
    assert steps == [Step("a"), Step("", "stop", None, is_hidden=True)]


def test_eos_is_a_token_like_any_other_when_ignored() -> None:
    steps = run([1, EOS, 1], ignore_eos=True, skip_special_tokens=False)
    assert text_of(steps) == "a<eos>a" and steps[-1].finish_reason is None


def test_a_stop_token_says_which_it_was() -> None:
    assert run([1, 2, 1], stop_token_ids=(2,)) == [Step("a"), Step("", "stop", 2, is_hidden=True)]
    assert run([1, 2, 1], stop_token_ids=(2,), include_stop_str_in_output=True)[-1] == Step("b", "stop", 2)


def test_stop_tokens_do_not_apply_before_min_tokens() -> None:
    steps = run([2, EOS, 2, 1], stop_token_ids=(2,), min_tokens=2)
    assert [step.finish_reason for step in steps] == [None, None, "stop"]


def test_max_tokens_ends_with_length() -> None:
    assert run([1, 1, 1], max_tokens=2) == [Step("a"), Step("a", "length")]


def test_a_full_context_ends_with_length() -> None:
    assert [s.finish_reason for s in run([1] * 9, max_context_len=6, prompt_len=3)] == [None, None, "length"]


def test_stopping_at_the_last_token_is_a_stop() -> None:
    assert run([1, EOS], max_tokens=2)[-1].finish_reason == "stop"
    assert run(ids_of("ab"), max_tokens=2, stop=("b",))[-1] == Step("", "stop", "b")


def test_half_a_character_at_the_end_is_a_replacement() -> None:
    assert text_of(run([1, PIECES.index(b"\xc3")], max_tokens=2)) == "a\ufffd"
