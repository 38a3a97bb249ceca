"""Attention over a block of keys, and the merging of such partial results: the pieces of the torch-native backend."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

MASKED = -1e30  # finite: a row that sees nothing of a block must give a weight of 0, not a NaN


def partial_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over one block, [W, heads, rows, v_dim], and the log-sum-exp of its scores, [W, heads, rows].

    query: [W, heads, rows, dim], key: [W, heads, keys, dim], value: [W, heads, keys, v_dim], float32. `mask` is added
    to the scores.
    """
    width = value.shape[-1]
    if query.device.type == "cpu" and softcap is None and width <= query.shape[-1]:
        # The kernel wants values as wide as keys.
        value = pad(value, (0, query.shape[-1] - width))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, attn_mask=mask, scale=scale
        )
        return out[..., :width], lse
    scores = query @ key.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + mask
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp() @ value, lse
