"""Chain verification emits the longest agreeing prefix plus one, and so never changes the output."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculative.verify import verify


def accept(drafts: Sequence[int], sampled: Sequence[int]) -> tuple[int, ...]:
    return tuple(verify(drafts, sampled.__getitem__, int))


@pytest.mark.parametrize(
    ("drafts", "sampled", "emitted"),
    [
        ([], [7], (7,)),
        ([5], [7, 9], (7,)),
        ([5], [5, 9], (5, 9)),
        ([5, 6], [5, 9, 6], (5, 9)),
        ([5, 6, 8], [5, 9, 8, 1], (5, 9)),
        ([5, 6, 8], [5, 6, 8, 1], (5, 6, 8, 1)),
    ],
)
def test_longest_agreeing_prefix_plus_one(
    drafts: Sequence[int], sampled: Sequence[int], emitted: tuple[int, ...]
) -> None:
    assert accept(drafts, sampled) == emitted


def test_rows_behind_the_first_disagreement_are_not_sampled() -> None:
    sampled: list[int] = []

    def sample(row: int) -> int:
        sampled.append(row)
        return 5

    assert verify([5, 6, 5, 5], sample, int) == [5, 5]
    assert sampled == [0, 1]


def target(context: Sequence[int]) -> int:
    """A model: any pure function of the whole context will do."""
    return (7 * sum((i + 1) * token for i, token in enumerate(context)) + len(context)) % 3


@given(st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=12))
def test_any_drafts_give_the_output_of_plain_decoding(blocks: list[list[int]]) -> None:
    context = [1]
    for drafts in blocks:
        rows = [target(context + drafts[:j]) for j in range(len(drafts) + 1)]
        context += accept(drafts, rows)
    plain = [1]
    while len(plain) < len(context):
        plain.append(target(plain))
    assert context == plain
