"""A KV pool as the native kernels see it: keys, values and their scales by pointer."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

# `KvDtype` of src/kernels.h: of the pools that the native kernels read and write.
KV_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float8_e4m3fn: 2, torch.int8: 3}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KVTensors:
    """Contiguous tensors of a pool.

    key, value: [layers, slots, kv_heads, head_dim].
    key_scales, value_scales: float32 by which what is stored is multiplied; int8: [layers, slots, kv_heads], of each
        entry, written beside it; fp8: [layers]; None: there are none.
    """

    key: torch.Tensor
    value: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None


class NativeKV(ctypes.Structure):
    """`KvPool` of src/kernels.h."""

    _fields_ = (
        ("dtype", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("slots", ctypes.c_int64),
        ("key", ctypes.c_void_p),
        ("value", ctypes.c_void_p),
        ("key_scales", ctypes.c_void_p),
        ("value_scales", ctypes.c_void_p),
    )


def native_kv(kv: KVTensors, layers: int, kv_heads: int, head_dim: int) -> NativeKV:
    """The struct that points at `kv`. Raises ValueError where no model of these sizes can run over it."""
    key, value, scales = kv.key, kv.value, (kv.key_scales, kv.value_scales)
    slots = key.shape[1]
    expected = (layers, slots, kv_heads, head_dim)
    if key.shape != expected or value.shape != expected:
        raise ValueError(f"the KV pool is {tuple(key.shape)}, the model needs {expected}")
    if key.dtype not in KV_DTYPES or value.dtype != key.dtype:
        raise ValueError(f"no native kernels for a {key.dtype} KV pool")
    shape = {torch.int8: expected[:3], torch.float8_e4m3fn: (layers,)}.get(key.dtype)
    if any(shape != (None if some is None else some.shape) for some in scales):
        raise ValueError(f"the scales of a {key.dtype} KV pool are {shape}")
    if any(some is not None and some.dtype != torch.float32 for some in scales):
        raise ValueError("the scales of a KV pool are float32")
    return NativeKV(
        dtype=KV_DTYPES[key.dtype],
        kv_heads=kv_heads,
        head_dim=head_dim,
        slots=slots,
        key=key.data_ptr(),
        value=value.data_ptr(),
        key_scales=None if kv.key_scales is None else kv.key_scales.data_ptr(),
        value_scales=None if kv.value_scales is None else kv.value_scales.data_ptr(),
    )
