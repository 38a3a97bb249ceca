"""What the kernels compute, in plain torch and float64, one sequence and one head group at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor | None,
    slot_table: torch.Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    table_rows: Sequence[int],
    *,
    v_head_dim: int,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    k_slot_scales: torch.Tensor | None = None,
    v_slot_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same arguments and result as `kernels.triton.attention.paged_attention`; the result is float64."""
    out = []
    keys = key_cache.double() * k_scale
    if k_slot_scales is not None:
        keys = keys * k_slot_scales.unsqueeze(-1)
    if value_cache is None:
        values = keys[..., :v_head_dim]
    else:
        values = value_cache.double() * v_scale
        if v_slot_scales is not None:
            values = values * v_slot_scales.unsqueeze(-1)
    group = query.shape[1] // key_cache.shape[1]
    for rows, context, table_row in zip(query.split(list(query_lens)), context_lens, table_rows, strict=True):
        slots = slot_table[table_row, :context].long()
        k = keys[slots].repeat_interleave(group, 1)  # [context, heads, head_dim]
        v = values[slots].repeat_interleave(group, 1)
        seen = mask(len(rows), context, causal, window).to(query.device)
        out.append(attend(rows.double(), k, v, seen, scale, softcap)[0])
    return torch.cat(out)


def mask(query_len: int, context_len: int, causal: bool, window: int | None) -> torch.Tensor:
    """Which of the context each of the last `query_len` positions sees: bool [query_len, context_len]."""
    position = torch.arange(context_len - query_len, context_len).unsqueeze(1)
    key = torch.arange(context_len)
    seen = key <= position if causal else torch.ones(query_len, context_len, dtype=torch.bool)
    return seen if window is None else seen & (position - key < window)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention [T, heads, v_dim] and log-sum-exp [T, heads] over the keys that are seen; 0 and -inf where none is."""
    scores = torch.einsum("qhd,khd->qhk", query, key) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen.unsqueeze(1), float("-inf"))
    lse = scores.logsumexp(-1)
    weights = torch.nan_to_num((scores - lse.unsqueeze(-1)).exp(), nan=0.0)
    return torch.einsum("qhk,khd->qhd", weights, value), lse


def merge(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Results and log-sum-exps over disjoint keys to the result over all of them."""
    lse = torch.stack([part for _, part in parts])
    weights = torch.softmax(lse, 0).unsqueeze(-1)
    return (torch.stack([part for part, _ in parts]) * weights).sum(0)
