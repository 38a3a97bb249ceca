"""Paged attention by FlashInfer, for models with keys and values of one width. CUDA only.

Prompts and blocks run FlashInfer's prefill kernels, which share the reading of keys among the rows of a sequence, and
choose their tiles by the batch: a row's result depends on its company, by rounding. Decode runs one request a row with
keys split at fixed positions, so its rows do not. With speculative attention mode `decode`, a verify does too: what it
gives for a row is then, bit for bit, what decode gives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch

from backends.base import AttentionBackend, AttentionLayer, Workspace
from backends.flashinfer_staging import (
    Event,
    Lane,
    Lanes,
    PageTable,
    page_table,
    window_mask,
)
from backends.forward import ForwardBatch, ForwardMode
from backends.kv_pool import FP8, KVLayout, KVPool, unreadable
from backends.parts import Part, phases

HALF = (torch.float16, torch.bfloat16)

_HEAD_DIMS = (64, 128, 256)
_SPLIT = 1024  # keys a partial result of decode; it fixes the arithmetic of a row
_BY_ROW_IF_DECODE = (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)


class _Shape(NamedTuple):
    """What a plan depends on beside the requests. Layers that agree in it share a plan."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None
    dtype: torch.dtype  # of queries and results
    kv_dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Phase:
    """Rows of a pass that one wrapper attends for, and the wrappers planned for them."""

    number: int
    part: Part
    by_row: bool
    table: PageTable
    wrappers: dict[_Shape, Any] = field(default_factory=dict)


class _Plan:
    """A pass. It takes a lane when its first layer runs, and has it until it is dropped."""

    def __init__(self, batch: ForwardBatch) -> None:
        self.batch = batch
        self.lane: Lane | None = None
        self.phases: list[_Phase] = []


class FlashInferBackend(AttentionBackend):
    """Causal or not, sliding windows, soft-caps, grouped heads, 16-bit or fp8 e4m3 caches."""

    name = "flashinfer"

    def __init__(
        self,
        device: torch.device,
        workspace: Workspace,
        flashinfer: Any = None,
        new_event: Callable[[], Event] = torch.cuda.Event,
    ) -> None:
        """`flashinfer` is that package, imported here unless given. Raises ImportError where it is not installed."""
        self._flashinfer = import_module("flashinfer") if flashinfer is None else flashinfer
        self._workspace = workspace
        self._lanes = Lanes(device, new_event)

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
        pool = batch.kv_pool
        pool.write(layer.layer_id, batch.out_slots, key, value)
        lane = self._lane(plan)
        if len(plan.phases) == 1:
            return self._attend(query, layer, pool, plan.phases[0], lane)
        whole = torch.empty_like(query)
        for phase in plan.phases:
            whole[phase.part.rows] = self._attend(phase.part.take(query), layer, pool, phase, lane)
        return whole

    def _lane(self, plan: _Plan) -> Lane:
        if plan.lane is None:
            plan.lane = self._lanes.take(plan)
            for number, part in enumerate(phases(plan.batch) if any(plan.batch.query_lens) else ()):
                by_row = self._by_row(part.batch)
                plan.phases.append(_Phase(number, part, by_row, page_table(part.batch, plan.lane, by_row)))
        return plan.lane

    def _by_row(self, batch: ForwardBatch) -> bool:
        if not batch.causal:
            return False
        return batch.mode.is_decode_or_idle() or (
            batch.mode in _BY_ROW_IF_DECODE and self.speculative_attention_mode == "decode"
        )

    def _attend(
        self, query: torch.Tensor, layer: AttentionLayer, pool: KVPool, phase: _Phase, lane: Lane
    ) -> torch.Tensor:
        kv_dtype = pool.layout.dtype
        shape = _Shape(
            layer.num_heads,
            layer.num_kv_heads,
            layer.head_dim,
            layer.scale,
            layer.sliding_window,
            layer.logit_softcap,
            query_dtype(query.dtype, kv_dtype),
            kv_dtype,
        )
        if shape not in phase.wrappers:
            phase.wrappers[shape] = self._planned(shape, phase, lane)
        # Keys and values as FlashInfer has them: [pages, page size, key heads, width].
        cache = pool.key[layer.layer_id].unsqueeze(1), pool.value[layer.layer_id].unsqueeze(1)
        scales: dict[str, float] = {}
        if kv_dtype == FP8:
            scales = {"k_scale": pool.key_scale[layer.layer_id], "v_scale": pool.value_scale[layer.layer_id]}
        out: torch.Tensor = phase.wrappers[shape].run(query.to(shape.dtype), cache, **scales)
        return out.to(query.dtype)

    def _planned(self, shape: _Shape, phase: _Phase, lane: Lane) -> Any:
        """The wrapper for `shape`, planned for `phase`."""
        table, batch = phase.table, phase.part.batch
        options: dict[str, Any] = {
            "sm_scale": shape.scale,
            "logits_soft_cap": shape.softcap,
            "window_left": -1 if shape.window is None else shape.window - 1,  # without the row itself
            "q_data_type": shape.dtype,
            "kv_data_type": shape.kv_dtype,
            "o_data_type": shape.dtype,
        }
        heads = shape.num_heads, shape.num_kv_heads, shape.head_dim, 1
        key = phase.number, phase.by_row, shape

        if phase.by_row:

            def make_decode(memory: torch.Tensor) -> Any:
                # Only the kernels with tensor cores split keys at fixed positions; they are also the faster ones
                # for grouped heads.
                return self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                    memory, "NHD", use_tensor_cores=True, backend="fa2"
                )

            def plan_decode(wrapper: Any) -> None:
                wrapper.plan(
                    table.kv_indptr,
                    table.kv_indices,
                    table.last_page_len,
                    *heads,
                    **options,
                    fixed_split_size=_SPLIT,
                )

            return lane.planned(key, self._workspace, _partial_bytes(table, shape), make_decode, plan_decode)

        if not batch.causal and shape.window is not None:
            # A window without causality is not defined by FlashInfer, and refused by some of its kernels.
            options["custom_mask"] = window_mask(batch, lane, shape.window)
            options["window_left"] = -1

        def make_prefill(memory: torch.Tensor) -> Any:
            return self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(memory, "NHD")

        def plan_prefill(wrapper: Any) -> None:
            wrapper.plan(
                table.qo_indptr,
                table.kv_indptr,
                table.kv_indices,
                table.last_page_len,
                *heads,
                **options,
                causal=batch.causal,
            )

        return lane.planned(key, self._workspace, 1, make_prefill, plan_prefill)


def unusable(device: torch.device, layout: KVLayout) -> str | None:
    """Why FlashInfer cannot serve `layout` on `device`, or None if it can."""
    if device.type != "cuda":
        return "it needs CUDA"
    if layout.is_latent:
        return "it reads no latent KV cache; flashinfer_mla does"
    if layout.head_dim != layout.v_head_dim or layout.head_dim not in _HEAD_DIMS:
        return f"it has kernels for heads of {', '.join(map(str, _HEAD_DIMS))} numbers only"
    return unusable_here(device, layout)


def unusable_here(device: torch.device, layout: KVLayout) -> str | None:
    """Why neither FlashInfer backend can run on a CUDA device over a cache of the layout's dtype."""
    if find_spec("flashinfer") is None:
        return "the package flashinfer-python is not installed (pip install 'tandem[cuda]')"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs a GPU of compute capability 8.0 or later"
    if layout.dtype not in (*HALF, FP8):
        return unreadable(layout)
    return None


def query_dtype(dtype: torch.dtype, kv_dtype: torch.dtype) -> torch.dtype:
    """What queries are computed in: as the cache, or 16 bits over an fp8 cache."""
    if kv_dtype in HALF:
        return kv_dtype
    return dtype if dtype in HALF else torch.bfloat16


def _partial_bytes(table: PageTable, shape: _Shape) -> int:
    """Float workspace that decode's partial results can take: float32, for whole tiles of (row, head of a group)."""
    group = shape.num_heads // shape.num_kv_heads
    tile = 16 if group <= 16 else 64 if group <= 64 else 128
    keys = table.kv_lens.numpy()
    if shape.window is not None:
        keys = np.minimum(keys, shape.window + tile)
    num_partials = int((-(-keys // _SPLIT)).sum())
    rows = shape.num_kv_heads * num_partials * tile + shape.num_heads
    return rows * (shape.head_dim + 1) * torch.float32.itemsize
