"""What the drafting worker does in a step beside drafting."""

from __future__ import annotations

from pathlib import Path

from engine.request import Request, SamplingParams
from speculative.drafting_worker import INDEXED_A_STEP
from tests.lossless import load_runner, ngram
from tests.tiny_model import save_tiny_model


def repeating(name: str, length: int) -> Request:
    return Request(name, [5, 6, 7] * (length // 3), SamplingParams(), sink=lambda event: None)


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
