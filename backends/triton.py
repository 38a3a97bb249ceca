"""Paged attention by Triton kernels: on CUDA, and in Triton's interpreter on a CPU.

This module loads without Triton, so that the backend can be listed, with the reason, where it cannot run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec

import torch

from backends.base import AttentionBackend, AttentionLayer
from backends.forward import ForwardBatch
from backends.kv_pool import FP8, INT8, KVLayout, unreadable
from kernels.triton.tiling import Blocks, Tiling, block_sizes, tile

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, FP8, INT8)


@dataclass(slots=True)
class _Plan:
    """The tables of a pass for each shape of attention that its layers have: heads, key heads, width of a value."""

    batch: ForwardBatch
    tilings: dict[tuple[int, int, int, Blocks], Tiling] = field(default_factory=dict)


class TritonBackend(AttentionBackend):
    """Every mask that the passes need, grouped heads and the latent cache of absorbed MLA, with one arithmetic a row.

    Over a latent cache, a layer's key is its entry, and its value the first columns of it, which are not stored.
    Raises ImportError where Triton is not installed.
    """

    name = "triton"

    def __init__(self, block_sizes: Callable[[int, int, torch.dtype], Blocks] = block_sizes) -> None:
        from kernels.triton.attention import paged_attention  # Triton is optional

        self._attend = paged_attention
        self._block_sizes = block_sizes

    def plan(self, batch: ForwardBatch) -> _Plan:
        return _Plan(batch)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        plan: object,
    ) -> torch.Tensor:
        assert isinstance(plan, _Plan)
        pool, layer_id = batch.kv_pool, layer.layer_id
        num_heads, num_kv_heads, v_head_dim = query.shape[1], key.shape[1], value.shape[2]
        pool.write(layer_id, batch.out_slots, key, value)
        blocks = self._block_sizes(query.shape[2], v_head_dim, query.dtype)
        shape = (num_heads, num_kv_heads, v_head_dim, blocks)
        if shape not in plan.tilings:
            plan.tilings[shape] = tile(
                batch.query_lens, batch.context_lens, batch.table_rows, *shape, query.device
            )
        return self._attend(
            query,
            pool.key[layer_id],
            None if pool.layout.is_latent else pool.value[layer_id],
            batch.slot_table,
            plan.tilings[shape],
            blocks,
            v_head_dim=v_head_dim,
            scale=layer.scale,
            causal=batch.causal,
            window=layer.sliding_window,
            softcap=layer.logit_softcap,
            k_scale=pool.key_scale[layer_id],
            v_scale=pool.value_scale[layer_id],
            k_slot_scales=None if pool.key_slot_scales is None else pool.key_slot_scales[layer_id],
            v_slot_scales=None if pool.value_slot_scales is None else pool.value_slot_scales[layer_id],
        )


def unusable(device: torch.device, layout: KVLayout) -> str | None:
    """Why Triton cannot serve `layout` on `device`, or None if it can."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    if layout.dtype not in _DTYPES:
        return unreadable(layout)
    if device.type == "cpu":
        return (
            None if _interpreting() else "it needs CUDA (on a CPU: Triton's interpreter, TRITON_INTERPRET=1)"
        )
    if device.type != "cuda":
        return "it needs CUDA"
    needed = (8, 9) if layout.dtype == FP8 else (8, 0)
    if torch.cuda.get_device_capability(device) < needed:
        of_fp8 = f" over a KV cache of {layout.dtype_name}" if layout.dtype == FP8 else ""
        return f"it needs a GPU of compute capability {needed[0]}.{needed[1]} or later{of_fp8}"
    return None


def _interpreting() -> bool:
    """Whether the kernels are made for the interpreter. Without the variable, they need not be loaded to know."""
    if not os.environ.get("TRITON_INTERPRET"):
        return False
    from kernels.triton.attention import INTERPRETED

    return INTERPRETED
