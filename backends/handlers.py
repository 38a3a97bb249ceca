"""How a layer with a latent KV cache (MLA) computes a pass, and the choices that backends make by default."""

from __future__ import annotations

import enum
from collections.abc import Callable

from backends.forward import ForwardBatch, ForwardMode

# A prefix shorter than this is cheaper to attend to as it is cached than to decompress for each chunk.
MHA_PREFIX_THRESHOLD = 512


class AttnForwardMethod(enum.Enum):
    """The two forms of the same attention."""

    MHA = "mha"  # keys and values decompressed, a pair for each head
    MQA = "mqa"  # queries absorbed into the latent space, one cached entry for all heads


Handler = Callable[[ForwardBatch], AttnForwardMethod]


def by_prefix_length(batch: ForwardBatch) -> AttnForwardMethod:
    """MHA for prompts with no cached prefix, or where all have a long one; MQA for all else."""
    if batch.mode is not ForwardMode.EXTEND:
        return AttnForwardMethod.MQA
    prefixes = batch.prefix_lens or [
        context - queries for queries, context in zip(batch.query_lens, batch.context_lens, strict=True)
    ]
    if all(prefix == 0 or prefix >= MHA_PREFIX_THRESHOLD for prefix in prefixes):
        return AttnForwardMethod.MHA
    return AttnForwardMethod.MQA


def always_absorbed(batch: ForwardBatch) -> AttnForwardMethod:
    """MQA, for backends with no kernel for decompressed keys and values of unequal width."""
    return AttnForwardMethod.MQA
