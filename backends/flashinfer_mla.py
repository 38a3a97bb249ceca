"""Latent attention (MLA) by FlashInfer. CUDA only.

Decode, verify and the last few rows of a prompt attend to the cached entries as they are (MQA, absorbed). Other
prompts attend to decompressed keys and values (MHA): their own tokens in one ragged call, and the cached prefix in
chunks that are decompressed one at a time, whose partial results are merged by their log-sum-exp. FlashInfer splits
keys by the batch, so a row's result depends on its company, by rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from backends.base import AttentionBackend, AttentionLayer, LatentAttentionLayer, Workspace
from backends.flashinfer import query_dtype, unusable_here
from backends.flashinfer_staging import Event, Lane, Lanes, PageTable, page_table, spans_of_context
from backends.forward import ForwardBatch, ForwardMode
from backends.handlers import AttnForwardMethod
from backends.kv_pool import FP8, KVLayout

# Rows of one sequence from which on it costs less to decompress its prefix for them than to attend to wide entries.
MHA_ROWS = 192
PREFIX_BYTES = 512 << 20  # of keys and values that are decompressed at once


class _Latent(NamedTuple):
    """What a plan over cached entries depends on beside the requests."""

    num_heads: int
    latent_dim: int
    rope_dim: int
    scale: float
    dtype: torch.dtype


class _Heads(NamedTuple):
    """What a plan over decompressed keys and values depends on beside the requests."""

    num_heads: int
    k_dim: int
    v_dim: int
    scale: float
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Decompressed:
    """The pass's own tokens, and its prefix in chunks: the wrapper planned for each, and the slots of each chunk."""

    own: Any
    prefix: list[tuple[Any, torch.Tensor]]


class _Plan:
    """A pass. It takes a lane when its first layer runs, and has it until it is dropped."""

    def __init__(self, batch: ForwardBatch) -> None:
        self.batch = batch
        self.lane: Lane | None = None
        self.table: PageTable | None = None
        self.absorbed: dict[_Latent, Any] = {}
        self.decompressed: dict[_Heads, _Decompressed] = {}


class FlashInferMLABackend(AttentionBackend):
    """Both methods of a layer with a latent cache of 16 bits; of fp8 e4m3 on Hopper."""

    name = "flashinfer_mla"

    def __init__(
        self,
        device: torch.device,
        workspace: Workspace,
        flashinfer: Any = None,
        new_event: Callable[[], Event] = torch.cuda.Event,
        prefix_bytes: int = PREFIX_BYTES,
    ) -> None:
        """`flashinfer` is that package, imported here unless given. Raises ImportError where it is not installed."""
        self._flashinfer = import_module("flashinfer") if flashinfer is None else flashinfer
        self._workspace = workspace
        self._lanes = Lanes(device, new_event)
        self._prefix_bytes = prefix_bytes

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
        pool, latent_dim = batch.kv_pool, value.shape[-1]
        pool.write(layer.layer_id, batch.out_slots, key, value)
        if len(query) == 0:
            return query.new_empty(0, layer.num_heads, latent_dim)
        dtype = query_dtype(query.dtype, pool.layout.dtype)
        shape = _Latent(layer.num_heads, latent_dim, layer.head_dim - latent_dim, layer.scale, dtype)
        if shape not in plan.absorbed:
            plan.absorbed[shape] = self._plan_absorbed(shape, plan)
        scales: dict[str, float] = {}
        if pool.layout.dtype == FP8:
            scale = pool.key_scale[layer.layer_id]
            scales = {"ckv_scale": scale, "kpe_scale": scale}
        # Entries are a page of one token each as they lie in the pool.
        out: torch.Tensor = plan.absorbed[shape].run(
            query=query.to(dtype).contiguous(), kv_cache=pool.key[layer.layer_id], **scales
        )
        return out.to(query.dtype)

    def forward_mha(
        self,
        query: torch.Tensor,
        entry: torch.Tensor,
        layer: LatentAttentionLayer,
        batch: ForwardBatch,
        plan: object,
    ) -> torch.Tensor:
        assert isinstance(plan, _Plan)
        pool = batch.kv_pool
        pool.write(layer.layer_id, batch.out_slots, entry, entry)
        if pool.layout.dtype != entry.dtype:  # every row sees an entry as the cache holds it
            entry, _ = pool.gather(layer.layer_id, batch.out_slots)
        dtype = query_dtype(query.dtype, pool.layout.dtype)
        key, value = _decompress(layer, entry, dtype)
        if len(query) == 0:
            return value.to(query.dtype)
        shape = _Heads(layer.num_heads, key.shape[2], value.shape[2], layer.scale, dtype)
        if shape not in plan.decompressed:
            plan.decompressed[shape] = self._plan_decompressed(shape, plan)
        wrappers = plan.decompressed[shape]
        queries = query.to(dtype).contiguous()
        if not wrappers.prefix:
            whole: torch.Tensor = wrappers.own.run(queries, key, value)
            return whole.to(query.dtype)
        out, lse = wrappers.own.run(queries, key, value, return_lse=True)
        del key, value
        for wrapper, slots in wrappers.prefix:
            key, value = _decompress(layer, pool.gather(layer.layer_id, slots)[0], dtype)
            chunk, chunk_lse = wrapper.run(queries, key, value, return_lse=True)
            out, lse = self._flashinfer.merge_state(out, lse, chunk, chunk_lse)
        result: torch.Tensor = out.to(query.dtype)
        return result

    def _lane(self, plan: _Plan) -> Lane:
        if plan.lane is None:
            plan.lane = self._lanes.take(plan)
        return plan.lane

    def _plan_absorbed(self, shape: _Latent, plan: _Plan) -> Any:
        lane = self._lane(plan)
        if plan.table is None:
            plan.table = page_table(plan.batch, lane, by_row=False)
        table, batch = plan.table, plan.batch
        kv_dtype = batch.kv_pool.layout.dtype

        def make(memory: torch.Tensor) -> Any:
            return self._flashinfer.BatchMLAPagedAttentionWrapper(memory)

        def plan_it(wrapper: Any) -> None:
            wrapper.plan(
                metadata=self._flashinfer.mla.MLAPlanMetadata.csr(
                    table.qo_indptr, table.kv_indptr, table.kv_indices, table.kv_lens
                ),
                num_heads=shape.num_heads,
                head_dim_ckv=shape.latent_dim,
                head_dim_kpe=shape.rope_dim,
                page_size=1,
                causal=batch.causal,
                sm_scale=shape.scale,
                q_data_type=shape.dtype,
                kv_data_type=kv_dtype,
                scale_mode="kv-per-tensor" if kv_dtype == FP8 else "default",
            )

        return lane.planned(shape, self._workspace, 1, make, plan_it)

    def _plan_decompressed(self, shape: _Heads, plan: _Plan) -> _Decompressed:
        batch, lane = plan.batch, self._lane(plan)
        queries = np.asarray(batch.query_lens)
        prefixes = np.asarray(batch.context_lens) - queries
        own = self._plan_ragged(("own", shape), shape, lane, queries, queries, batch.causal)
        prefix = []
        token_bytes = shape.num_heads * (shape.k_dim + shape.v_dim) * shape.dtype.itemsize
        # Positions of each sequence that a chunk has.
        length = max(self._prefix_bytes // token_bytes // max(int((prefixes > 0).sum()), 1), 1)
        for start in range(0, int(prefixes.max()), length):
            counts = np.clip(prefixes - start, 0, length)
            wrapper = self._plan_ragged((start // length, shape), shape, lane, queries, counts, False)
            prefix.append((wrapper, spans_of_context(batch, lane, start, counts).long()))
        return _Decompressed(own, prefix)

    def _plan_ragged(
        self,
        key: tuple[object, _Heads],
        shape: _Heads,
        lane: Lane,
        queries: npt.NDArray[np.int32],
        keys: npt.NDArray[np.int32],
        causal: bool,
    ) -> Any:
        qo_indptr, kv_indptr = (
            lane.stage(np.concatenate([[0], np.cumsum(lens)])) for lens in (queries, keys)
        )

        def make(memory: torch.Tensor) -> Any:
            return self._flashinfer.BatchPrefillWithRaggedKVCacheWrapper(memory, "NHD")

        def plan_it(wrapper: Any) -> None:
            wrapper.plan(
                qo_indptr,
                kv_indptr,
                shape.num_heads,
                shape.num_heads,
                shape.k_dim,
                shape.v_dim,
                causal=causal,
                sm_scale=shape.scale,
                q_data_type=shape.dtype,
                kv_data_type=shape.dtype,
                o_data_type=shape.dtype,
            )

        return lane.planned(key, self._workspace, 1, make, plan_it)


def handler(batch: ForwardBatch) -> AttnForwardMethod:
    """MHA for prompts without a cached prefix, or with so many rows that decompressing it pays; MQA for all else."""
    if batch.mode is not ForwardMode.EXTEND:
        return AttnForwardMethod.MQA
    lens = zip(batch.query_lens, batch.context_lens, strict=True)
    if all(context == queries or queries >= MHA_ROWS for queries, context in lens):
        return AttnForwardMethod.MHA
    return AttnForwardMethod.MQA


def unusable(device: torch.device, layout: KVLayout) -> str | None:
    """Why FlashInfer cannot serve the latent `layout` on `device`, or None if it can."""
    if device.type != "cuda":
        return "it needs CUDA"
    if not layout.is_latent:
        return "it reads latent KV caches only; flashinfer reads the others"
    if layout.head_dim < 192 or layout.head_dim % 128 != 64:
        return "it has kernels for a latent of a multiple of 128 numbers and a rotary key of 64 only"
    if (reason := unusable_here(device, layout)) is not None:
        return reason
    is_hopper = torch.cuda.get_device_capability(device)[0] == 9
    if layout.dtype == FP8 and not (is_hopper and layout.head_dim == 576):
        return "over an fp8 cache it needs a Hopper GPU and entries of 512 and 64 numbers"
    return None


def _decompress(
    layer: LatentAttentionLayer, entries: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    key, value = layer.decompress(entries.squeeze(1))
    return key.to(dtype).contiguous(), value.to(dtype).contiguous()
