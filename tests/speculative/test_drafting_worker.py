"""What the drafting worker does in a step beside drafting."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.request import Request, SamplingParams, SpeculationParams
from speculative.adaptive import Choice, PayoffController, Prospect
from speculative.drafter import Drafter
from speculative.drafting_worker import ANSWERS_KEPT, INDEXED_A_STEP, LEARNED_A_STEP, DraftingWorker
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
    worker.learn_answers()
    assert worker.draft([second], [3], rows=1) == [drafted]


def test_long_answers_are_learned_over_several_steps_and_hold_nobody_up(tmp_path: Path) -> None:
    worker = ngram(load_runner(str(save_tiny_model(tmp_path)), "float32", slots=64), frozenset())
    answer = [1000 + i for i in range(2 * LEARNED_A_STEP + 3)]
    worker.release(answered([1], answer))
    ends = LEARNED_A_STEP, 2 * LEARNED_A_STEP, 2 * LEARNED_A_STEP + 3

    def drafted() -> list[bool]:
        worker.learn_answers()
        drafts = worker.draft([answered([1], answer[: end - 1]) for end in ends], [3] * 3, rows=3)
        return [bool(draft) for draft in drafts]

    assert drafted() == [True, False, False]
    assert drafted() == [True, True, False]
    assert drafted() == [True, True, True]


def test_where_more_answers_end_than_can_be_learned_the_latest_count(tmp_path: Path) -> None:
    worker = ngram(load_runner(str(save_tiny_model(tmp_path)), "float32", slots=64), frozenset())
    for number in range(ANSWERS_KEPT + 1):
        worker.release(answered([2 * number], [2 * number + 1]))
    for _ in range(ANSWERS_KEPT):
        worker.learn_answers()
    known = [worker.draft([answered([2 * number], [])], [3], rows=1) for number in (0, 1, ANSWERS_KEPT)]
    assert known == [[()], [(3,)], [(2 * ANSWERS_KEPT + 1,)]]


class Noting(Drafter):
    """Drafts all that it may, and notes how much that is."""

    name = "standalone"
    short_draft = 3

    def room(self, request: Request) -> int:
        return 7

    def committed(self, request: Request, num_tokens: int) -> None: ...

    def forget(self, request: Request) -> None: ...

    def propose(
        self, requests: Sequence[Request], limits: Sequence[int], sampling_row: MakeSamplingRow
    ) -> list[Proposal]:
        self.limits = {request.request_id: limit for request, limit in zip(requests, limits, strict=True)}
        return [Proposal((1,) * limit, (15,) * limit) for limit in limits]


class Chosen(PayoffController):
    """Has those drafted for that it is told, and all of it verified."""

    indices: Sequence[int] = ()

    def choose(self, prospects: Sequence[Prospect], rows: int, pass_rows: int = 1) -> Choice:
        return Choice(list(self.indices), True)

    def plan(self, drafts: Sequence[Sequence[float]], rows: int, drafting: int = 0) -> list[int]:
        return [len(draft) for draft in drafts]


def test_who_had_long_drafts_still_may_after_a_step_without(tmp_path: Path) -> None:
    runner = load_runner(str(save_tiny_model(tmp_path)), "float32", slots=64)
    drafter, controller = Noting(runner, 8, 257), Chosen()
    options = SpeculativeOptions(algorithm="standalone", num_draft_tokens=8)
    worker = DraftingWorker(runner, frozenset(), options, controller, NgramHistory(0), drafter)
    requests = [repeating("a", 30), repeating("b", 30)]
    for indices, limits in (
        ([0, 1], {"a": 3, "b": 3}),
        ([0], {"a": 7}),
        ([0, 1], {"a": 7, "b": 7}),
    ):
        controller.indices = indices
        worker.draft(requests, [7, 7], rows=2)
        assert drafter.limits == limits
