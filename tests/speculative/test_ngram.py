"""Prompt lookup proposes what followed the longest, latest earlier occurrence of the end of the text."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from speculative.ngram import NgramDraft, NgramIndex


def index_of(token_ids: Sequence[int], **options: int) -> NgramIndex:
    index = NgramIndex(**{"min_match": 2, **options})
    index.extend(token_ids)
    return index


def test_new_text_has_no_proposal() -> None:
    assert index_of([]).propose(4) == NgramDraft()
    assert index_of([1]).propose(4) == NgramDraft()
    assert index_of([1, 2, 3, 4]).propose(4) == NgramDraft()


def test_what_followed_an_earlier_occurrence_is_proposed() -> None:
    draft = index_of([1, 2, 3, 4, 5, 9, 1, 2]).propose(3)
    assert draft == NgramDraft((3, 4, 5), match_length=2)


def test_a_match_shorter_than_min_match_is_not_enough() -> None:
    text = [1, 2, 3, 4, 9, 1, 2]
    assert index_of(text, min_match=3).propose(2) == NgramDraft()
    assert index_of([7, *text, 7, 1, 2], min_match=3).propose(1) == NgramDraft((3,), match_length=3)


def test_by_default_one_token_is_a_match() -> None:
    index = NgramIndex()
    index.extend([1, 2, 3, 9, 2])
    assert index.propose(2) == NgramDraft((3, 9), match_length=1)


def test_the_longest_match_wins_over_a_later_one() -> None:
    draft = index_of([7, 1, 2, 3, 0, 8, 1, 2, 4, 0, 7, 1, 2]).propose(1)
    assert draft == NgramDraft((3,), match_length=3)


def test_among_equal_matches_the_latest_wins() -> None:
    draft = index_of([7, 1, 2, 3, 0, 8, 1, 2, 4, 0, 9, 1, 2]).propose(1)
    assert draft == NgramDraft((4,), match_length=2)


def test_matches_are_not_measured_beyond_max_match() -> None:
    draft = index_of([5, 6, 1, 2, 3, 0, 9, 6, 1, 2, 4, 0, 5, 6, 1, 2], max_match=3).propose(1)
    assert draft == NgramDraft((4,), match_length=3)


def test_only_the_latest_candidates_are_looked_at() -> None:
    text = [7, 1, 2, 3] + [8, 1, 2, 4] * 3 + [7, 1, 2]
    assert index_of(text, max_candidates=3).propose(1) == NgramDraft((4,), match_length=2)
    assert index_of(text, max_candidates=4).propose(1) == NgramDraft((3,), match_length=3)


def test_a_repeated_phrase_goes_on_past_the_end_of_the_text() -> None:
    assert index_of([9, 1, 2, 3, 1, 2, 3]).propose(7).token_ids == (1, 2, 3, 1, 2, 3, 1)
    assert index_of([9, 4, 4, 4]).propose(5).token_ids == (4, 4, 4, 4, 4)


def test_nothing_is_proposed_when_nothing_is_asked_for() -> None:
    assert index_of([1, 2, 1, 2]).propose(0) == NgramDraft()


def naive(text: list[int], max_tokens: int, min_match: int, max_match: int) -> NgramDraft:
    """The definition, by trying every earlier place."""
    best = NgramDraft()
    for place in range(1, len(text)):
        length = 0
        while length < min(place, max_match) and text[place - 1 - length] == text[len(text) - 1 - length]:
            length += 1
        if length >= max(min_match, best.match_length):
            continued = list(text)
            for i in range(max_tokens):
                continued.append(continued[place + i])
            best = NgramDraft(tuple(continued[len(text) :]), length)
    return best


@given(
    chunks=st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=8),
    max_tokens=st.integers(1, 6),
    min_match=st.integers(1, 3),
    max_match=st.integers(3, 6),
)
def test_proposals_are_those_of_the_definition_however_the_text_arrives(
    chunks: list[list[int]], max_tokens: int, min_match: int, max_match: int
) -> None:
    index = NgramIndex(min_match, max_match, max_candidates=100)
    text: list[int] = []
    for chunk in chunks:
        index.extend(chunk)
        text += chunk
        assert len(index) == len(text)
        assert index.propose(max_tokens) == naive(text, max_tokens, min_match, max_match)
