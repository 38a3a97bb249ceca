"""Chain verification emits the longest agreeing prefix plus one, and so never changes the output."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculative.verify import verify


@pytest.mark.parametrize(
    ("drafts", "sampled", "emitted"),
    [
        ([], [7], [7]),
        ([5], [7, 9], [7]),
        ([5], [5, 9], [5, 9]),
        ([5, 6], [5, 9, 6], [5, 9]),
        ([5, 6, 8], [5, 9, 8, 1], [5, 9]),
        ([5, 6, 8], [5, 6, 8, 1], [5, 6, 8, 1]),
    ],
)
def test_longest_agreeing_prefix_plus_one(
    drafts: Sequence[int], sampled: Sequence[int], emitted: list[int]
) -> None:
    assert verify(drafts, sampled.__getitem__, int) == emitted


def test_rows_past_the_first_disagreement_are_not_sampled() -> None:
    """Sampling has effects: penalties count the token, a grammar moves on. A dropped row must have none."""
    rows: list[int] = []

    def sample(row: int) -> int:
        rows.append(row)
        return 9

    assert verify([9, 8, 9], sample, int) == [9, 9]
    assert rows == [0, 1]


def test_a_row_that_cannot_be_sampled_ends_the_block_before_it() -> None:
    def sample(row: int) -> int:
        if row >= 2:
            raise ValueError("logits are no numbers")
        return 9

    assert verify([9, 9, 9], sample, int) == [9, 9]
    with pytest.raises(ValueError, match="no numbers"):
        verify([9], lambda row: sample(row + 2), int)


def test_what_is_sampled_may_carry_more_than_the_token() -> None:
    sampled = [(5, "a"), (9, "b"), (6, "c")]
    assert verify([5, 6], sampled.__getitem__, lambda item: item[0]) == [(5, "a"), (9, "b")]


def target(context: Sequence[int]) -> int:
    """A model: any pure function of the whole context will do."""
    return (7 * sum((i + 1) * token for i, token in enumerate(context)) + len(context)) % 3


@given(st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=12))
def test_any_drafts_give_the_output_of_plain_decoding(blocks: list[list[int]]) -> None:
    context = [1]
    for drafts in blocks:
        rows = [target(context + drafts[:row]) for row in range(len(drafts) + 1)]
        context += verify(drafts, rows.__getitem__, int)
    plain = [1]
    while len(plain) < len(context):
        plain.append(target(plain))
    assert context == plain
