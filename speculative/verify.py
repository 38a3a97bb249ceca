"""Chain verification: which drafted tokens stand."""

from __future__ import annotations

from collections.abc import Sequence


def accept(drafts: Sequence[int], sampled: Sequence[int]) -> tuple[int, ...]:
    """The tokens that a verified block emits: its longest agreeing prefix plus one.

    The block is [last token, d1 .. dk]. `sampled[j]`, k + 1 of them, is the token that the target samples at row j,
    after last, d1 .. dj. A token depends on the target's logits and on noise keyed by seed, choice and position, not
    on the block it is computed in. So row 0 is what plain decoding would emit. Where it equals d1, row 1 has seen
    what plain decoding would have seen, and is its next token; and so on up to the first row that disagrees with its
    draft. That row is right as well: it saw only accepted tokens. Every later one saw a token that is not in the
    output, and is dropped. Hence the output is that of plain decoding whatever is drafted; drafts only decide how
    many tokens one pass yields, from 1 to k + 1.
    """
    if len(sampled) != len(drafts) + 1:
        raise ValueError(
            f"{len(drafts)} drafted tokens need {len(drafts) + 1} sampled ones, not {len(sampled)}"
        )
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == sampled[accepted]:
        accepted += 1
    return tuple(sampled[: accepted + 1])
