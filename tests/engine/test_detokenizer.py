"""Incremental text: its pieces, joined, are the text of the whole, and no piece has to be taken back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from engine.detokenizer import IncrementalDetokenizer, TokenDecoder
from engine.tokenizer import Tokenizer, tokenizer_from_gguf
from models.default import default_model_path

PIECES = ["▁", "▁▁", "▁the", "▁ a", "b", "é", "漢", "\n", "▁x▁", "�"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def sentencepiece_like(*, strips: bool) -> Tokenizer:
    """A vocabulary in the manner of Llama 2 (which strips the leading space) or Gemma (which does not)."""
    vocabulary = {piece: index for index, piece in enumerate(["<s>", "</s>", *PIECES, *BYTES])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(
        backend, vocab_size=len(vocabulary), bos_token_id=0, eos_token_ids=frozenset({1}), special_tokens={}
    )


SMOLLM2 = tokenizer_from_gguf(default_model_path())
LLAMA, GEMMA = sentencepiece_like(strips=True), sentencepiece_like(strips=False)
FIRST_BYTE = 2 + len(PIECES)


def pieces_of(
    tokenizer: TokenDecoder,
    ids: Sequence[int],
    skip_special_tokens: bool = True,
    prompt_ids: Sequence[int] = (),
) -> list[str]:
    """What each token adds, then the rest."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens, prompt_ids)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


# Any ids at all, and among them many that are single bytes or special.
smollm2_ids = st.lists(
    st.integers(0, SMOLLM2.vocab_size - 1) | st.integers(17, 17 + 255) | st.integers(0, 3), max_size=40
)
byte_runs = st.text(alphabet="aé漢🙂\n ", min_size=1, max_size=3).map(
    lambda text: [FIRST_BYTE + byte for byte in text.encode()]
)
sentencepiece_ids = st.lists(
    st.integers(0, FIRST_BYTE - 1).map(lambda piece: [piece]) | byte_runs, max_size=20
).map(lambda runs: [token for run in runs for token in run])


@settings(max_examples=300, deadline=None)
@given(ids=smollm2_ids, skip=st.booleans())
def test_byte_level_pieces_join_to_the_whole(ids: list[int], skip: bool) -> None:
    assert "".join(pieces_of(SMOLLM2, ids, skip)) == SMOLLM2.decode(ids, skip_special_tokens=skip)


@settings(max_examples=300, deadline=None)
@pytest.mark.parametrize("tokenizer", [LLAMA, GEMMA], ids=["llama", "gemma"])
@given(ids=sentencepiece_ids, skip=st.booleans())
def test_sentencepiece_pieces_join_to_the_whole(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    assert "".join(pieces_of(tokenizer, ids, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=300, deadline=None)
@pytest.mark.parametrize("tokenizer", [LLAMA, GEMMA], ids=["llama", "gemma"])
@given(prompt_ids=sentencepiece_ids, ids=sentencepiece_ids, skip=st.booleans())
def test_pieces_go_on_from_the_text_of_the_prompt(
    tokenizer: Tokenizer, prompt_ids: list[int], ids: list[int], skip: bool
) -> None:
    pieces = pieces_of(tokenizer, ids, skip, prompt_ids)
    whole = tokenizer.decode(prompt_ids + ids, skip_special_tokens=skip)
    assert tokenizer.decode(prompt_ids, skip_special_tokens=skip) + "".join(pieces) == whole


def test_only_the_first_word_of_a_text_has_no_space_before_it() -> None:
    the = 2 + PIECES.index("▁the")
    assert pieces_of(LLAMA, [the, the], prompt_ids=[0]) == ["the", " the", ""]
    assert pieces_of(LLAMA, [the, the], prompt_ids=[0, the]) == [" the", " the", ""]


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet="a é漢字한글🙂👩\u200d🚀ก\n…"))
def test_a_split_character_never_shows_a_replacement(text: str) -> None:
    ids = SMOLLM2.encode(text, add_special_tokens=False)
    pieces = pieces_of(SMOLLM2, ids, skip_special_tokens=False)
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == text


@settings(max_examples=100, deadline=None)
@given(ids=smollm2_ids)
def test_text_is_shown_as_soon_as_it_is_settled(ids: list[int]) -> None:
    detokenizer = IncrementalDetokenizer(SMOLLM2, skip_special_tokens=True)
    shown = ""
    for count, token in enumerate(ids, start=1):
        shown += detokenizer.push(token)
        whole = SMOLLM2.decode(ids[:count])
        assert whole.startswith(shown)
        assert whole[len(shown) :] in ("", "\ufffd")  # one character at most is still under way


def test_an_emoji_comes_with_its_last_byte() -> None:
    ids = [FIRST_BYTE + byte for byte in "🙂".encode()]
    assert pieces_of(LLAMA, ids) == ["", "", "", "🙂", ""]


def test_a_character_cut_off_by_the_end_is_a_replacement() -> None:
    ids = [FIRST_BYTE + byte for byte in "a🙂".encode()[:-1]]
    *pushed, rest = pieces_of(LLAMA, ids)
    assert "".join(pushed) == "a" and set(rest) == {"\ufffd"}


def test_bytes_that_cannot_become_a_character_do_not_wait() -> None:
    assert pieces_of(LLAMA, [FIRST_BYTE + 0xFF, 2 + PIECES.index("b")]) == ["\ufffd", "b", ""]


def test_a_bad_byte_leaves_what_was_shown_before_it() -> None:
    ids = [FIRST_BYTE + byte for byte in "é".encode() + b"\xff"]
    assert pieces_of(LLAMA, ids) == ["", "é", "\ufffd", ""]


def test_a_replacement_character_that_was_meant_does_not_wait() -> None:
    assert pieces_of(LLAMA, [2 + PIECES.index("�"), 2 + PIECES.index("b")]) == ["�", "b", ""]
