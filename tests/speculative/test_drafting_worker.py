"""What the drafting worker does in a step beside drafting."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.request import Request, SamplingParams, SpeculationParams
from speculative.adaptive import PayoffController
from speculative.drafter import Drafter
from speculative.drafting_worker import INDEXED_A_STEP, LEARNED_AT_ONCE, DraftingWorker
from speculative.history import NgramHistory
from speculative.options import SpeculativeOptions
from speculative.proposal import MakeSamplingRow, Proposal
from tests.lossless import load_runner, ngram
from tests.tiny_model import save_tiny_model


def repeating(name: str, length: int) -> Request:
    return Request(name, [5, 6, 7] * (length // 3), SamplingParams(), sink=lambda event: None)


class Busy(Drafter):
    """Has room for nothing, and knows no prefix."""

    name = "standalone"

    def room(self, request: Request) -> int:
        return 0

    def usable_prefix(self, request: Request, slots: Sequence[int]) -> int:
        return 0

    def committed(self, request: Request, num_tokens: int) -> None: ...

    def propose(
        self, requests: Sequence[Request], limits: Sequence[int], sampling_row: MakeSamplingRow
    ) -> list[Proposal]:
        raise AssertionError("there is no room")

    def forget(self, request: Request) -> None: ...


def test_a_prefix_is_not_computed_again_for_a_drafter_that_has_no_room(tmp_path: Path) -> None:
    runner = load_runner(str(save_tiny_model(tmp_path)), "float32", slots=64)
    options = SpeculativeOptions(algorithm="auto", num_draft_tokens=8)
    worker = DraftingWorker(
        runner, frozenset(), options, PayoffController(), NgramHistory(0), Busy(runner, 8, 257)
    )
    assert worker.usable_prefix(repeating("a", 30), range(20)) == 20


@pytest.mark.parametrize(("asked", "most"), [(None, 7), (4, 3), (1024, 7)])
def test_a_request_may_ask_for_shorter_drafts_than_the_server_makes(
    tmp_path: Path, asked: int | None, most: int
) -> None:
    runner = load_runner(str(save_tiny_model(tmp_path)), "float32", slots=64)
    options = SpeculativeOptions(algorithm="ngram", num_draft_tokens=8)
    worker = DraftingWorker(runner, frozenset(), options, PayoffController(), NgramHistory(0))
    request = repeating("a", 30)
    request.speculation = SpeculationParams(num_draft_tokens=asked)
    assert worker.max_draft_tokens(request) == most


def test_long_prompts_are_indexed_over_several_steps_and_hold_nobody_up(tmp_path: Path) -> None:
    worker = ngram(load_runner(str(save_tiny_model(tmp_path)), "float32", slots=64), frozenset())
    long, other, short = (
        repeating("a", 2 * INDEXED_A_STEP),
        repeating("b", INDEXED_A_STEP // 2),
        repeating("c", 30),
    )
    requests = [long, other, short]

    def drafted() -> list[bool]:
        drafts = worker.draft(requests, [3, 3, 3], rows=3)
        assert all(draft in ((), (5, 6, 7)) for draft in drafts)
        return [bool(draft) for draft in drafts]

    assert drafted() == [False, False, True]
    assert drafted() == [True, False, True]
    assert drafted() == [True, True, True]


def answered(prompt: Sequence[int], answer: Sequence[int], algorithm: str | None = None) -> Request:
    return Request(
        "a",
        list(prompt),
        SamplingParams(),
        sink=lambda event: None,
        speculation=SpeculationParams(algorithm=algorithm),
        output_ids=list(answer),
    )


@pytest.mark.parametrize(
    ("algorithm", "drafted"), [(None, (100, 101, 102)), ("ngram", (100, 101, 102)), ("none", ())]
)
def test_an_answer_that_has_ended_is_drafted_for_who_asks_the_same(
    tmp_path: Path, algorithm: str | None, drafted: tuple[int, ...]
) -> None:
    """But for answers whose request would have none of it."""
    worker = ngram(load_runner(str(save_tiny_model(tmp_path)), "float32", slots=64), frozenset())
    prompt = list(range(20, 60))
    first = answered(prompt, [100], algorithm)
    worker.draft([first], [3], rows=1)
    first.output_ids += range(101, 110)
    second = answered(prompt, [])
    assert worker.draft([second], [3], rows=1) == [()]
    worker.release(first)
    assert worker.draft([second], [3], rows=1) == [drafted]


def test_of_a_long_answer_the_beginning_is_learned(tmp_path: Path) -> None:
    worker = ngram(load_runner(str(save_tiny_model(tmp_path)), "float32", slots=64), frozenset())
    long = answered([1], [])
    worker.draft([long], [3], rows=1)
    long.output_ids += [1000 + i for i in range(LEARNED_AT_ONCE + 20)]
    worker.release(long)
    for end, drafted in ((LEARNED_AT_ONCE - 1, 1), (LEARNED_AT_ONCE, 0)):
        (draft,) = worker.draft([answered([1], long.output_ids[:end])], [3], rows=1)
        assert len(draft) == drafted
