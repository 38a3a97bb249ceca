"""Attention over a block of keys, and the merging of such partial results: the pieces of the torch-native backend.

A row's result has the same bits in any company. So functions that torch computes otherwise at the ends of a tensor go
through `rowwise`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from kernels.rowwise import rowwise

MASKED = -1e30  # finite: a row that sees nothing of a block must give a weight of 0, not a NaN


def partial_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over one block, [W, heads, rows, v_dim], and the log-sum-exp of its scores, [W, heads, rows, 1].

    query: [W, heads, rows, dim]; key: [W, heads, keys, dim]; value: [W, heads, keys, v_dim], float32; or one key and
    value, [1, …], for all. `mask` is added to the scores.
    """
    width = value.shape[-1]
    if query.device.type == "cpu" and softcap is None and width <= query.shape[-1]:
        if width < query.shape[-1]:  # the kernel wants values as wide as keys
            value = pad(value, (0, query.shape[-1] - width))
        all_items = (len(query), -1, -1, -1)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key.expand(all_items), value.expand(all_items), attn_mask=mask, scale=scale
        )
        return out[..., :width], lse.unsqueeze(-1)
    scores = query @ key.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * _each(torch.tanh, scores / softcap)
    scores = scores + mask
    peak = scores.amax(-1, keepdim=True)
    weights = _each(torch.exp, scores - peak)
    total = weights.sum(-1, keepdim=True)
    return weights @ value / total, peak + _each(torch.log, total)


@dataclass(frozen=True, slots=True)
class RunningSoftmax:
    """What partial results have come to so far: `total` [N, heads, rows, v_dim] weighs `weight` times exp(`peak`),
    both [N, heads, rows, 1]."""

    total: torch.Tensor
    weight: torch.Tensor
    peak: torch.Tensor

    @classmethod
    def of(cls, out: torch.Tensor, lse: torch.Tensor) -> RunningSoftmax:
        """Begins with the results over the first block, whose memory it takes."""
        return cls(out.contiguous(), torch.ones_like(lse), lse)

    def add(self, index: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Add the results over a later block for the n of N that `index` [n] names.

        Where a row sees nothing of the block, that has weight 0 and changes no bit.
        """
        old = self.peak.index_select(0, index)
        high = torch.maximum(old, lse)
        keep, gain = _each(torch.exp, old - high), _each(torch.exp, lse - high)
        self.total.index_copy_(0, index, self.total.index_select(0, index) * keep + out * gain)
        self.weight.index_copy_(0, index, self.weight.index_select(0, index) * keep + gain)
        self.peak.index_copy_(0, index, high)

    def result(self) -> torch.Tensor:
        """Attention over all blocks, [N, heads, rows, v_dim]."""
        return self.total / self.weight


def _each(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return rowwise(function, x.flatten(1)).view(x.shape)
