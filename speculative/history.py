"""Drafts from what was answered before, whoever asked: a branch predictor for text.

Needs no model. It is the predictor TAGE (Seznec and Michaud, "A case for (partially) tagged geometric history length
branch predictors", 2006) with tokens for branches. Answers of one model have much in common, those to the same or
a like question most of all. vLLM's suffix decoding and SGLang's n-gram speculation look text up across requests too.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from speculative.proposal import HOPELESS, Proposal

# What follows is looked up by so many tokens before it; the longest context that is known says it.
CONTEXT_LENGTHS = (1, 2, 4, 16)
LONGEST_CONTEXT = CONTEXT_LENGTHS[-1]
MOST_AGREEMENT = 3
# How often a token was right in answers of a small chat model to questions that were new to it, by its level of
# confidence: by the length of the context, and within that by how often the token came true before, 0 to 3 times.
HISTORY_GUESSES = (
    *(0.1, 0.15, 0.2, 0.2),
    *(0.15, 0.3, 0.35, 0.5),
    *(0.4, 0.5, 0.5, 0.7),
    *(0.95, 0.95, 0.98, 0.98),
)
_TAG_SHIFT, _TAG_MASK = 32, 0x7FFF_FFFF
_TOKEN_SHIFT, _TOKEN_MASK = 2, 0x3FFF_FFFF
# Longest first: the level of confidence that a context of that length begins at, and the length.
_LEVELS_AND_LENGTHS = tuple(
    ((MOST_AGREEMENT + 1) * i, length) for i, length in reversed([*enumerate(CONTEXT_LENGTHS)])
)


class NgramHistory:
    """Which token followed which in the texts that it was told, in `num_entries` entries of 8 bytes for good.

    An entry has a tag of its context, the token that followed, and how often that came true. It is one less for each
    time that another token followed, or that another context has the same place; at 0 that one takes over. O(1) a
    token.
    """

    def __init__(self, num_entries: int) -> None:
        """`num_entries` 0 remembers nothing."""
        self._num_entries = num_entries
        self._entries = array("q", [0]) * num_entries  # tag << 32 | token << 2 | agreement

    def learn(self, token_ids: Sequence[int], start: int) -> None:
        """The tokens from `start` on were written, after those before them."""
        entries, num_entries = self._entries, self._num_entries
        if not num_entries:
            return
        tokens = tuple(token_ids)
        for length in CONTEXT_LENGTHS:
            for end in range(max(start, length), len(tokens)):
                key = hash(tokens[end - length : end])
                place = key % num_entries
                entry = entries[place]
                new = (key >> _TAG_SHIFT & _TAG_MASK) << _TAG_SHIFT | tokens[end] << _TOKEN_SHIFT
                agreement = entry - new
                if 0 <= agreement <= MOST_AGREEMENT:
                    entries[place] = new | min(agreement + 1, MOST_AGREEMENT)
                elif entry & MOST_AGREEMENT:
                    entries[place] = entry - 1
                else:
                    entries[place] = new

    def propose(
        self, context: Sequence[int], max_tokens: int, rates: Sequence[float] = HISTORY_GUESSES
    ) -> Proposal:
        """At most `max_tokens` tokens to follow `context`, the last tokens of a text, as long as there is hope by the
        accept rates of the levels."""
        entries, num_entries = self._entries, self._num_entries
        if not num_entries:
            return Proposal()
        text = tuple(context[-LONGEST_CONTEXT:])
        tokens: list[int] = []
        levels: list[int] = []
        chance = 1.0
        while len(tokens) < max_tokens and chance > HOPELESS:
            for lowest_level, length in _LEVELS_AND_LENGTHS:
                if length > len(text):
                    continue
                key = hash(text[-length:])
                entry = entries[key % num_entries]
                if entry >> _TAG_SHIFT == key >> _TAG_SHIFT & _TAG_MASK:
                    token = entry >> _TOKEN_SHIFT & _TOKEN_MASK
                    level = lowest_level + (entry & MOST_AGREEMENT)
                    break
            else:
                break
            tokens.append(token)
            levels.append(level)
            chance *= rates[level]
            text = (*text[1 - LONGEST_CONTEXT :], token)
        return Proposal(tuple(tokens), tuple(levels))
