"""Paged attention of one layer as one native call, for models whose passes are not a step plan's."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from kernels.cpu.kv import KVTensors, NativeKV, native_kv
from kernels.cpu.library import check, library


class _Call(ctypes.Structure):
    """`LayerAttentionCall` of src/step.h."""

    _fields_ = (
        ("tokens", ctypes.c_int32),
        ("sequences", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("layer", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("causal", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("table_stride", ctypes.c_int64),
        ("out_slots", ctypes.c_void_p),
        ("query_lens", ctypes.c_void_p),
        ("context_lens", ctypes.c_void_p),
        ("table_rows", ctypes.c_void_p),
        ("slot_table", ctypes.c_void_p),
        ("query", ctypes.c_void_p),
        ("key", ctypes.c_void_p),
        ("value", ctypes.c_void_p),
        ("kv", NativeKV),
        ("out", ctypes.c_void_p),
    )


class PagedAttention:
    """What all layers of a pass over T tokens share; see ForwardBatch for the meaning of each.

    slot_table: [rows, width] int32; out_slots: [T] int64. Both contiguous. kv: its head_dim is a multiple of 16.
    Raises ValueError for a pool that the native kernels cannot read.
    """

    def __init__(
        self,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        table_rows: Sequence[int],
        slot_table: torch.Tensor,
        out_slots: torch.Tensor,
        kv: KVTensors,
        causal: bool,
    ) -> None:
        layers, _, kv_heads, head_dim = kv.key.shape
        if head_dim % 16:
            raise ValueError(f"head_dim {head_dim} is not a multiple of 16")
        self._kv = native_kv(kv, layers, kv_heads, head_dim)
        self._lengths = [(ctypes.c_int32 * len(x))(*x) for x in (query_lens, context_lens, table_rows)]
        self._held = (slot_table, out_slots, kv)  # what is pointed at
        self._causal = causal

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Write the tokens' keys and values to their slots of a layer, then attend: [T, heads, head_dim] float32.

        query: [T, heads, head_dim]; key, value: [T, kv_heads, head_dim]. Over a cache of less than 32 bits, an
        instruction set with tiles rounds queries and weights to bfloat16. Raises NativeError for slots or lengths out
        of range, ValueError for shapes that do not fit the pool.
        """
        slot_table, out_slots, kv = self._held
        tokens, heads, _ = query.shape
        expected = (tokens, *kv.key.shape[2:])
        if key.shape != expected or value.shape != expected:
            raise ValueError(f"keys are {tuple(key.shape)} and values {tuple(value.shape)}, not {expected}")
        if heads % expected[1] or query.shape[2] != expected[2] or not 0 <= layer < len(kv.key):
            raise ValueError(f"queries are {tuple(query.shape)} over a pool of {tuple(kv.key.shape)}")
        query, key, value = (x.float().contiguous() for x in (query, key, value))
        out = torch.empty_like(query)
        query_lens, context_lens, table_rows = map(ctypes.addressof, self._lengths)
        call = _Call(
            tokens=tokens,
            sequences=len(self._lengths[0]),
            heads=heads,
            layer=layer,
            window=window or 0,
            causal=self._causal,
            scale=scale,
            table_stride=slot_table.shape[1],
            out_slots=out_slots.data_ptr(),
            query_lens=query_lens,
            context_lens=context_lens,
            table_rows=table_rows,
            slot_table=slot_table.data_ptr(),
            query=query.data_ptr(),
            key=key.data_ptr(),
            value=value.data_ptr(),
            kv=self._kv,
            out=out.data_ptr(),
        )
        check(library().tandem_attention(ctypes.addressof(call)))
        return out
