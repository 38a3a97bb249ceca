"""The context pass of a DFlash drafter as one native call (models/dflash.py)."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu.kv import KVTensors, NativeKV, native_kv
from kernels.cpu.library import NativeWeight, check, library
from kernels.cpu.linear import native
from kernels.packed import PackedWeight


class _Model(ctypes.Structure):
    """`ContextModel` of src/step.h."""

    _fields_ = (
        ("layers", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("max_positions", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("reserved", ctypes.c_int32),
        ("fc", NativeWeight),
        ("kv", NativeWeight),
        ("hidden_norm", ctypes.c_void_p),
        ("k_norms", ctypes.c_void_p),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
    )


class _Rows(ctypes.Structure):
    """`ContextRows` of src/step.h."""

    _fields_ = (
        ("rows", ctypes.c_int32),
        ("features", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("kv", NativeKV),
    )


class ContextPlan:
    """The pass of one drafter, bound to its weights.

    fc: packed [hidden, features]. kv: packed k and v of all layers, one below the other, [layers * 2 * kv_heads *
        head_dim, hidden]; bias: float32 of its rows. hidden_norm: [hidden]. k_norms: [layers, head_dim]. cos, sin:
        [max_positions, head_dim / 2]. All vectors float32. ValueError where a head is no whole vectors of 16.
    """

    def __init__(
        self,
        fc: PackedWeight,
        kv: PackedWeight,
        bias: torch.Tensor | None,
        hidden_norm: torch.Tensor,
        k_norms: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        eps: float,
    ) -> None:
        layers, head_dim = k_norms.shape
        if head_dim % 16:
            raise ValueError(f"head_dim {head_dim} is not a multiple of 16")
        padded = None if bias is None else torch.nn.functional.pad(bias, (0, -bias.shape[0] % 16))
        vectors = [hidden_norm, k_norms, cos, sin]
        if not all(vector.is_contiguous() and vector.dtype == torch.float32 for vector in vectors):
            raise ValueError("a context plan takes contiguous float32 vectors")
        self._held = (fc, kv, padded, *vectors)  # what the struct points at
        self._shape = (layers, kv.rows // (2 * layers * head_dim), head_dim)
        self._features = fc.columns
        self._model = _Model(
            layers=layers,
            kv_heads=self._shape[1],
            head_dim=head_dim,
            max_positions=cos.shape[0],
            eps=eps,
            fc=native(fc),
            kv=native(kv, padded),
            hidden_norm=hidden_norm.data_ptr(),
            k_norms=k_norms.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
        )

    def run(
        self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, kv: KVTensors
    ) -> None:
        """Write the keys and values of T tokens.

        features: [T, features] float32. positions, slots: [T] int64. Raises NativeError for positions or slots out
        of range.
        """
        rows = features.shape[0]
        if features.shape[1] != self._features or features.dtype != torch.float32:
            raise ValueError(
                f"features are {features.dtype} {tuple(features.shape)}, expected float32 [T, {self._features}]"
            )
        if positions.shape != (rows,) or slots.shape != (rows,):
            raise ValueError(f"{positions.shape[0]} positions and {slots.shape[0]} slots for {rows} rows")
        features, positions, slots = features.contiguous(), positions.contiguous(), slots.contiguous()
        described = _Rows(
            rows=rows,
            features=features.data_ptr(),
            positions=positions.data_ptr(),
            slots=slots.data_ptr(),
            kv=native_kv(kv, *self._shape),
        )
        check(library().tandem_context(ctypes.addressof(self._model), ctypes.addressof(described)))
