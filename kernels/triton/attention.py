"""Paged attention of a pass: the kernels, what they are compiled for, and their launches."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.triton.kernels import LOG2_E, extend_kernel, merge_kernel, split_kernel
from kernels.triton.tiling import Blocks, Tiling

# Kernels are made for the interpreter or for a compiler when they are defined: by TRITON_INTERPRET, as it was then.
INTERPRETED = not isinstance(extend_kernel, triton.JITFunction)

_DOT_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor | None,
    slot_table: torch.Tensor,
    tiling: Tiling,
    blocks: Blocks,
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
    """Attention of all query tokens of a pass over the slots of their sequences: [T, num_heads, v_head_dim].

    query: [T, num_heads, head_dim], float32, float16 or bfloat16.
    key_cache: [slots, num_kv_heads, head_dim]; value_cache likewise with v_head_dim. Of any dtype that converts to
        query's (fp8 is e4m3, on a GPU of capability 8.9 or later). What is stored is meant times `k_scale` or
        `v_scale`, and times that of its slot and head in `k_slot_scales` or `v_slot_scales`, if given: both
        [slots, num_kv_heads] float32, contiguous. value_cache None: a value is the first v_head_dim columns of its
        key (the latent cache of absorbed MLA), and the scales are those of the key.
    slot_table: [rows, max_context_len] int32, as `tiling` refers to it.
    window: tokens of context that a query sees, itself included. causal False: queries see all of the context.
    The last dimension of every tensor is contiguous. A result is in query's dtype.
    """
    num_tokens, num_heads, head_dim = query.shape
    latent = value_cache is None
    values = key_cache if value_cache is None else value_cache
    sizes = constants(
        num_heads=num_heads,
        num_kv_heads=key_cache.shape[1],
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        latent=latent,
        slot_scales=k_slot_scales is not None,
        dtype=query.dtype,
        blocks=blocks,
        causal=causal,
        window=window,
        softcap=softcap,
    )
    # Where there is none, no kernel reads it: any tensor will do.
    scales = (
        query if k_slot_scales is None else k_slot_scales,
        query if v_slot_scales is None else v_slot_scales,
    )
    options = launch_options(blocks)
    score_scale = scale * k_scale * LOG2_E.value
    value_scale = k_scale if latent else v_scale
    out = query.new_empty(num_tokens, num_heads, v_head_dim)
    if len(tiling.whole_tiles):
        extend_kernel[(len(tiling.whole_tiles), key_cache.shape[1])](
            query, key_cache, values, *scales, out, slot_table, tiling.sequences, tiling.whole_tiles,
            *query.stride()[:2], *key_cache.stride()[:2], *values.stride()[:2], key_cache.shape[1],
            *out.stride()[:2], slot_table.stride(0), score_scale, value_scale,
            **_taken_by(extend_kernel, sizes), **options,
        )  # fmt: skip
    if len(tiling.split_tiles):
        totals, peaks = attend_splits(
            query, key_cache, values, scales, slot_table, tiling, score_scale, sizes, options
        )
        merge_splits(totals, peaks, out, tiling, value_scale, sizes, options)
    return out


def attend_splits(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_scales: tuple[torch.Tensor, torch.Tensor],
    slot_table: torch.Tensor,
    tiling: Tiling,
    score_scale: float,
    sizes: dict[str, Any],
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial results of the split sequences: sums [P, v_head_dim], and [P, 2] of peak and weight, float32.

    A sum is over exp2(score - peak) times value, a weight over exp2(score - peak). Those that no row sees are unset.
    """
    totals = query.new_empty(tiling.num_partials, sizes["V_DIM"], dtype=torch.float32)
    peaks = query.new_empty(tiling.num_partials, 2, dtype=torch.float32)
    split_kernel[(len(tiling.split_tiles), key_cache.shape[1], tiling.num_splits)](
        query, key_cache, value_cache, *slot_scales, totals, peaks, slot_table, tiling.sequences,
        tiling.split_tiles, *query.stride()[:2], *key_cache.stride()[:2], *value_cache.stride()[:2],
        key_cache.shape[1], slot_table.stride(0), score_scale, **_taken_by(split_kernel, sizes), **options,
    )  # fmt: skip
    return totals, peaks


def merge_splits(
    totals: torch.Tensor,
    peaks: torch.Tensor,
    out: torch.Tensor,
    tiling: Tiling,
    value_scale: float,
    sizes: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """What `attend_splits` gave, to the rows of `out` [T, num_heads, v_head_dim] that are split."""
    merge_kernel[(len(tiling.split_tokens), out.shape[1])](
        totals, peaks, out, tiling.sequences, tiling.split_tokens, *out.stride()[:2], value_scale,
        **_taken_by(merge_kernel, sizes), **options,
    )  # fmt: skip


def constants(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    latent: bool,
    slot_scales: bool = False,
    dtype: torch.dtype,
    blocks: Blocks,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
) -> dict[str, Any]:
    """What the kernels are compiled for, by the name of its argument. `dtype` is the query's."""
    main = v_head_dim if latent else _first_product(head_dim)
    return dict(
        SOFTCAP=softcap or 0.0,
        WINDOW=window or 0,
        CAUSAL=causal,
        LATENT=latent,
        SLOT_SCALES=slot_scales,
        NUM_HEADS=num_heads,
        GROUP=num_heads // num_kv_heads,
        MAIN=main,
        REST=head_dim - main,
        V_DIM=v_head_dim,
        MAIN_BLOCK=_block(main),
        REST_BLOCK=_block(head_dim - main),
        V_BLOCK=_block(v_head_dim),
        ROWS=blocks.rows,
        KEYS=blocks.keys,
        SPLIT=blocks.split,
        # The interpreter knows no products of bfloat16.
        DOT=tl.float32 if INTERPRETED else _DOT_DTYPES[dtype],
    )


def launch_options(blocks: Blocks) -> dict[str, Any]:
    """How the kernels are compiled: without fusing products and sums, which would round one expression in two ways."""
    return dict(num_warps=blocks.num_warps, num_stages=blocks.num_stages, enable_fp_fusion=False)


def _taken_by(kernel: Any, sizes: dict[str, Any]) -> dict[str, Any]:
    return {name: sizes[name] for name in kernel.arg_names if name in sizes}


def _first_product(head_dim: int) -> int:
    """Columns of a head's first product: all, or the largest power of two if another product remains (192, 576)."""
    power = 1 << (head_dim.bit_length() - 1)
    return power if head_dim - power >= 16 else head_dim


def _block(size: int) -> int:
    """The block that holds `size` columns: a power of two, and no less than a product takes."""
    return max(16, triton.next_power_of_2(size))
