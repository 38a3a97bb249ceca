"""A chain: tokens drafted one after another, for all requests together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from engine.request import Request
from speculative.proposal import LEVEL_GUESSES, DraftVocabulary, MakeSamplingRow, Proposal, choose

# A chain ends where it is less likely than this that all of it is right, by the model's own word.
GIVE_UP = 0.1

# Of the requests at some indices, which have drafted so much each: the logits of the next token, [n, V'] float32.
NextLogits = Callable[[Sequence[int], Sequence[Proposal]], torch.Tensor]


def chain_room(request: Request, num_draft_tokens: int, limit: int) -> int:
    """The most tokens that a chain could have now, for a context of `limit`: the last one is never read, so it needs no
    place."""
    return max(0, min(num_draft_tokens - 1, limit - request.num_tokens + 1))


def last_tokens(requests: Sequence[Request], drafted: Sequence[Proposal]) -> list[int]:
    """The last token of each request with what was drafted for it."""
    return [
        draft.token_ids[-1]
        if draft.token_ids
        else request.token_ids(request.num_tokens - 1, request.num_tokens)[0]
        for request, draft in zip(requests, drafted, strict=True)
    ]


def draft_chains(
    next_logits: NextLogits,
    requests: Sequence[Request],
    limits: Sequence[int],
    vocabulary: DraftVocabulary,
    sampling_row: MakeSamplingRow,
) -> list[Proposal]:
    """At most `limits[i]` tokens to follow the last one of `requests[i]`."""
    proposals = [Proposal()] * len(requests)
    chances = np.ones(len(requests))
    active = list(range(len(requests)))
    for length in range(1, max(limits) + 1):
        logits = next_logits(active, [proposals[i] for i in active])
        for row, i in enumerate(active):
            proposals[i] = choose(logits[row : row + 1], requests[i], vocabulary, sampling_row, proposals[i])
            grown = len(proposals[i].levels) == length
            chances[i] *= LEVEL_GUESSES[proposals[i].levels[-1]] if grown else 0.0
        active = [i for i in active if length < limits[i] and chances[i] > GIVE_UP]
        if not active:
            break
    return proposals
