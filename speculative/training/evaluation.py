"""Accept length on text that was held out: what greedy verification would have emitted at each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from speculative.training.data import Blocks, Example, blocks_at


@torch.no_grad()
def accept_length(
    examples: Sequence[Example],
    members: Sequence[int],
    block_size: int,
    predict: Callable[[Blocks], Tensor],
) -> float:
    """Tokens emitted a verify step, the bonus token included, over the answers of the examples `members`.

    predict: blocks to the tokens drafted for offsets 1 and up, int64 [G, A, B - 1].
    Every position is drafted from at once; then each answer is walked as serving would walk it.
    """
    steps = emitted = 0
    for member in members:
        example = examples[member]
        anchors = example.anchors
        blocks = blocks_at(examples, [member], [anchors], block_size)
        agrees = (predict(blocks) == blocks.tokens[..., 1:])[0]
        accepted = dict(zip(anchors.tolist(), agrees.long().cumprod(-1).sum(-1).tolist(), strict=True))
        for start in np.flatnonzero(np.diff(example.ends, prepend=0) > 0).tolist():
            position, end = start, int(example.ends[start])
            while position + 1 < end:
                advance = min(accepted[position] + 1, end - 1 - position)
                position, steps, emitted = position + advance, steps + 1, emitted + advance
    return emitted / max(steps, 1)
