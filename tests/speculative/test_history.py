"""What followed the longest known end of a text, in whichever answer, is proposed to follow it again."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from speculative.adaptive import NUM_LEVELS
from speculative.history import HISTORY_GUESSES, LONGEST_CONTEXT, NgramHistory
from speculative.proposal import Proposal

SIZE = 1 << 16  # with so many entries these short texts hardly ever share one


def history_of(*texts: Sequence[int], size: int = SIZE) -> NgramHistory:
    history = NgramHistory(size)
    for text in texts:
        history.learn(text, 0)
    return history


def test_what_is_new_has_no_proposal() -> None:
    assert history_of().propose([1, 2, 3], 4) == Proposal()
    assert history_of([1, 2, 3, 4]).propose([5], 4) == Proposal()
    assert history_of([1, 2, 3, 4]).propose([], 4) == Proposal()


def test_an_answer_is_proposed_again_to_its_end() -> None:
    answer = list(range(100, 120))
    history = history_of(answer)
    assert history.propose(answer[:16], 15).token_ids == (116, 117, 118, 119)
    assert history.propose(answer[:16], 2).token_ids == (116, 117)


def test_the_longest_known_context_decides() -> None:
    history = history_of([1, 2, 3, 4, 10], [7, 8, 3, 4, 20])
    assert history.propose([1, 2, 3, 4], 1).token_ids == (10,)
    assert history.propose([7, 8, 3, 4], 1).token_ids == (20,)
    assert history.propose([9, 9, 3, 4], 1).token_ids == (
        20,
    )  # two tokens are known, and the later text has them


def test_what_came_true_more_often_stays() -> None:
    history = history_of([5, 6], [5, 6], [5, 7])
    assert history.propose([5], 1).token_ids == (6,)
    history.learn([5, 7], 0)
    assert history.propose([5], 1).token_ids == (7,)


def test_confidence_grows_with_agreement_and_with_the_context() -> None:
    text = list(range(40))
    once, twice = history_of(text), history_of(text, text)
    levels = [
        history.propose(text[20 - length : 20], 1).levels
        for length in (1, 2, 4, LONGEST_CONTEXT)
        for history in (once, twice)
    ]
    assert levels == [(0,), (1,), (4,), (5,), (8,), (9,), (12,), (13,)]
    often = history_of(*[text] * 9).propose(text[:20], 1)
    assert often.levels == (15,) == (NUM_LEVELS - 1,) == (len(HISTORY_GUESSES) - 1,)


def test_a_draft_ends_where_hope_does() -> None:
    """Tokens known by one token alone are right one time in ten: two of them, and it is enough."""
    pairs = [[token, token + 1] for token in range(10)]
    assert history_of(*pairs).propose([0], 8).token_ids == (1, 2)


def test_only_what_was_written_is_learned_not_what_it_was_written_after() -> None:
    history = NgramHistory(SIZE)
    history.learn([1, 2, 3, 4, 5], 3)
    assert history.propose([1, 2], 1) == Proposal()
    assert history.propose([1, 2, 3], 2).token_ids == (4, 5)


def test_without_entries_nothing_is_remembered() -> None:
    assert history_of([1, 2, 3], size=0).propose([1, 2], 3) == Proposal()


@given(
    texts=st.lists(st.lists(st.integers(0, 2**20), max_size=40), max_size=8),
    context=st.lists(st.integers(0, 2**20), max_size=20),
    size=st.integers(1, 64),
    length=st.integers(0, 15),
)
def test_however_crowded_it_proposes_what_was_written(
    texts: list[list[int]], context: list[int], size: int, length: int
) -> None:
    history = history_of(*texts, size=size)
    for end in (context, *texts):
        proposal = history.propose(end, length)
        assert len(proposal.token_ids) == len(proposal.levels) <= length
        assert {*proposal.token_ids} <= {token for text in texts for token in text}
        assert all(0 <= level < NUM_LEVELS for level in proposal.levels)
