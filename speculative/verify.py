"""Chain verification: which drafted tokens stand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Sampled = TypeVar("Sampled")


def verify(
    drafts: Sequence[int], sample: Callable[[int], Sampled], token_of: Callable[[Sampled], int]
) -> list[Sampled]:
    """What a verified block emits: its longest agreeing prefix plus one.

    The block is [last token, d1 .. dk]. `sample(j)` is what the target samples at row j, after last, d1 .. dj. A
    token depends on the target's logits and on noise keyed by seed, choice and position, not on the block it is
    computed in. So row 0 is what plain decoding would emit. Where it equals d1, row 1 has seen what plain decoding
    would have seen, and is its next token; and so on up to the first row that disagrees with its draft. That row is
    right as well: it saw only accepted tokens. Every later one saw a token that is not in the output, so it is not
    even sampled. Hence the output is that of plain decoding whatever is drafted; drafts only decide how many tokens
    one pass yields, from 1 to k + 1.
    """
    emitted: list[Sampled] = []
    for row in range(len(drafts) + 1):
        try:
            sampled = sample(row)
        except ValueError:
            # Logits that are no numbers: what comes before stands, and the next step ends with the error.
            if not emitted:
                raise
            break
        emitted.append(sampled)
        if row == len(drafts) or token_of(sampled) != drafts[row]:
            break
    return emitted
