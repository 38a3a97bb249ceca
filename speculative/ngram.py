"""Prompt-lookup drafts: text that occurred before is guessed to go on as it did then.

Needs no model. The idea is prompt lookup decoding (Apoorv Saxena, 2023), which transformers has as
`prompt_lookup_num_tokens` and vLLM as its n-gram speculator. It pays where the output repeats its context: summaries,
answers from documents, edits, code.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NgramDraft:
    """Proposed tokens, and how many tokens before them agreed with an earlier place (0: nothing proposed)."""

    token_ids: tuple[int, ...] = ()
    match_length: int = 0


class NgramIndex:
    """The prompt and output of one request, and where each n-gram of `min_match` tokens occurred in them.

    Occurrences of the same n-gram form a chain from the latest to the first, as in LZ77 compressors. A proposal walks
    at most `max_candidates` of them, and takes the one with the most tokens before it, up to `max_match`, in common
    with the end of the text; among equals the latest. O(1) a token, O(max_candidates + max_match) a proposal.

    How far to trust a proposal is left to who uses it. In answers of a small chat model the first token proposed is
    right one time in four after one matching token, one in two after two, three in four after eight, and nearly
    always after sixteen.
    """

    def __init__(self, min_match: int = 1, max_match: int = 16, max_candidates: int = 16) -> None:
        self._min_match = min_match
        self._max_match = max_match
        self._max_candidates = max_candidates
        self._tokens: list[int] = []
        self._latest: dict[tuple[int, ...], int] = {}  # n-gram -> the position after its latest occurrence
        self._earlier: list[int] = []  # position -> the one after the occurrence before, -1 if none

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append committed tokens: the prompt first, then what is emitted."""
        tokens, latest, earlier, n = self._tokens, self._latest, self._earlier, self._min_match
        for token in token_ids:
            position = len(tokens)
            # An n-gram is entered with its continuation, so the one that ends the text never finds itself.
            if position >= n:
                ngram = tuple(tokens[position - n :])
                earlier.append(latest.get(ngram, -1))
                latest[ngram] = position
            else:
                earlier.append(-1)
            tokens.append(token)

    def propose(self, max_tokens: int) -> NgramDraft:
        """`max_tokens` tokens to follow the text, or none if its last `min_match` tokens are new.

        What followed then goes on into the proposal itself where it reaches the end of the text, so a repeated phrase
        is continued for as long as is asked.
        """
        tokens = self._tokens
        if max_tokens <= 0:
            return NgramDraft()
        position = self._latest.get(tuple(tokens[-self._min_match :]), -1)
        best_position, best_length = -1, 0
        for _ in range(self._max_candidates):
            if position < 0 or best_length == self._max_match:
                break
            length = self._common_length(position, best_length)
            if length > best_length:
                best_position, best_length = position, length
            position = self._earlier[position]
        if best_length == 0:
            return NgramDraft()
        drafted = tokens[best_position : best_position + max_tokens]
        while len(drafted) < max_tokens:  # the text so far is what it then goes on with
            drafted += drafted[: max_tokens - len(drafted)]
        return NgramDraft(tuple(drafted), best_length)

    def _common_length(self, position: int, to_beat: int) -> int:
        """How many tokens before `position` and before the end agree, up to max_match; 0 if not more than `to_beat`."""
        tokens, end = self._tokens, len(self._tokens)
        # Most candidates fail at the token that would make them longer than the best: look there first.
        if to_beat and (position <= to_beat or tokens[position - to_beat - 1] != tokens[end - to_beat - 1]):
            return 0
        length, limit = self._min_match, min(self._max_match, position)
        while length < limit and tokens[position - length - 1] == tokens[end - length - 1]:
            length += 1
        return length
