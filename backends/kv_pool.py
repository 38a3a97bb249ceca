"""The tensors that hold keys and values, indexed by slot. Which slot belongs to whom is the allocator's business.

A quantised pool is written and read through its scales. Those of a slot are set when it is written and never change
what another slot holds: of int8, each token and head has a scale of its own; of fp8, which has a wide range by itself,
each layer has one for keys and one for values, which are chosen before the first request and stay.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from backends.pool_memory import zeros
from kernels.cpu.kv import KVTensors

FP8 = torch.float8_e4m3fn
INT8 = torch.int8

# By the names that settings have for them.
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "fp8_e4m3": FP8,
    "fp8": FP8,
    "int8": INT8,
}

_FP8_MAX = 448.0
_INT8_MAX = 127.0
# A floating-point format loses nothing to a scale that is too large by a few bits, but all to one that is too small.
_FP8_HEADROOM = 4.0


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of one token's cache entry in each attention layer. `v_head_dim` is 0 where values are part of keys."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype

    @property
    def is_latent(self) -> bool:
        """Whether an entry is MLA's compressed one, of which keys and values are both made."""
        return self.v_head_dim == 0

    @property
    def dtype_name(self) -> str:
        """As settings name it."""
        return next(
            (name for name, dtype in DTYPES.items() if dtype == self.dtype),
            str(self.dtype).removeprefix("torch."),
        )

    @property
    def bytes_per_slot(self) -> int:
        """Scales included."""
        head = (self.head_dim + self.v_head_dim) * self.dtype.itemsize
        if self.dtype == INT8:
            head += (1 if self.is_latent else 2) * torch.float32.itemsize
        return self.num_layers * self.num_kv_heads * head


def unreadable(layout: KVLayout) -> str:
    """Why a backend cannot run that has no kernels for the layout's dtype."""
    return f"it has no kernels for a KV cache of {layout.dtype_name} (--kv-cache-dtype, or the drafter's own)"


class KVPool:
    """Key and value tensors of one worker.

    key: [num_layers, num_slots, num_kv_heads, head_dim]. value: likewise with v_head_dim. Both are contiguous, so that
        native kernels can address them by pointer and stride.
    key_scale, value_scale: num_layers factors by which what is stored is multiplied; powers of 2, and 1 but for fp8.
    key_slot_scales, value_slot_scales: the same for each entry, [num_layers, num_slots, num_kv_heads] float32; None
        but for int8, and that of values also where they are part of keys.
    """

    def __init__(self, layout: KVLayout, num_slots: int, device: torch.device) -> None:
        self.layout = layout
        self.num_slots = num_slots
        shape = (layout.num_layers, num_slots, layout.num_kv_heads)
        # Zeros, not empty: a masked slot still enters a product, and NaN times zero is NaN.
        self.key = zeros((*shape, layout.head_dim), layout.dtype, device)
        self.value = zeros((*shape, layout.v_head_dim), layout.dtype, device)
        self.key_scale = [1.0] * layout.num_layers
        self.value_scale = [1.0] * layout.num_layers
        self.key_slot_scales: torch.Tensor | None = None
        self.value_slot_scales: torch.Tensor | None = None
        if layout.dtype == INT8:
            self.key_slot_scales = zeros(shape, torch.float32, device)
            if not layout.is_latent:
                self.value_slot_scales = zeros(shape, torch.float32, device)
        self._peaks: torch.Tensor | None = None  # [2, num_layers] while calibrating

    def write(self, layer_id: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store key and value, [T, num_kv_heads, dim] each, at `slots` ([T] int64) of one layer.

        What a format cannot hold becomes the nearest that it can. Over a latent layout `value` is not read.
        """
        if self._peaks is not None:
            self._note(layer_id, key, value)
        _store(self.key, self.key_scale, self.key_slot_scales, layer_id, slots, key)
        if not self.layout.is_latent:
            _store(self.value, self.value_scale, self.value_slot_scales, layer_id, slots, value)

    def gather(self, layer_id: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value of `slots`, any integer shape; returns slots.shape + [num_kv_heads, dim] each.

        In the layout's dtype, or float32 where that is quantised.
        """
        flat = slots.flatten()
        key = _load(self.key, self.key_scale, self.key_slot_scales, layer_id, flat)
        value = _load(self.value, self.value_scale, self.value_slot_scales, layer_id, flat)
        return key.unflatten(0, slots.shape), value.unflatten(0, slots.shape)

    def copy(self, slots: torch.Tensor, to: torch.Tensor) -> None:
        """The entries of `slots` [T] int64 are those of `to` [T], too, in all layers."""
        for data in (self.key, self.value, self.key_slot_scales, self.value_slot_scales):
            if data is not None:
                raw = data.view(torch.uint8) if data.dtype == FP8 else data
                raw.index_copy_(1, to, raw.index_select(1, slots))

    def tensors(self) -> KVTensors:
        """What native kernels read and write; of fp8 the scales that it has now. Keys of a latent layout are values."""
        key_scales, value_scales = self.key_slot_scales, self.value_slot_scales
        if self.layout.dtype == FP8:
            key_scales, value_scales = torch.tensor(self.key_scale), torch.tensor(self.value_scale)
        if self.layout.is_latent:
            return KVTensors(key=self.key, value=self.key, key_scales=key_scales, value_scales=key_scales)
        return KVTensors(key=self.key, value=self.value, key_scales=key_scales, value_scales=value_scales)

    @property
    def is_calibrating(self) -> bool:
        """Whether what is written has to come through `write`, which takes note of it."""
        return self._peaks is not None

    @contextmanager
    def calibrating(self) -> Iterator[None]:
        """Fit the scales of an fp8 pool to what is written meanwhile. What it held before, and then, is void."""
        if self.layout.dtype != FP8:
            yield
            return
        self._peaks = torch.zeros(2, self.layout.num_layers, device=self.key.device)
        yield
        self.key_scale, self.value_scale = (
            [_fp8_scale(peak) for peak in row] for row in self._peaks.tolist()
        )
        self._peaks = None

    def _note(self, layer_id: int, key: torch.Tensor, value: torch.Tensor) -> None:
        assert self._peaks is not None
        written = (key,) if self.layout.is_latent else (key, value)
        for peak, entries in zip(self._peaks[:, layer_id], written, strict=False):
            peak.copy_(torch.maximum(peak, entries.abs().amax()))


def _store(
    data: torch.Tensor,
    scale: list[float],
    slot_scales: torch.Tensor | None,
    layer_id: int,
    slots: torch.Tensor,
    entries: torch.Tensor,
) -> None:
    if slot_scales is not None:
        entries = entries.float()
        peak = torch.linalg.vector_norm(entries, math.inf, dim=-1)
        # At least the smallest normal number, so that it divides; finite, so that infinity saturates.
        of_slot = peak.clamp_(_INT8_MAX * 2.0**-126, 2.0**127) / _INT8_MAX
        slot_scales[layer_id].index_copy_(0, slots, of_slot)
        entries = (entries / of_slot.unsqueeze(-1)).round_().clamp_(-_INT8_MAX, _INT8_MAX)
    elif data.dtype == FP8:
        entries = (entries.float() / scale[layer_id]).clamp_(-_FP8_MAX, _FP8_MAX)
        # On a CPU, torch copies rows of bytes but not of fp8.
        data, entries = data.view(torch.uint8), entries.to(FP8).view(torch.uint8)
    data[layer_id].index_copy_(0, slots, entries.to(data.dtype))


def _load(
    data: torch.Tensor,
    scale: list[float],
    slot_scales: torch.Tensor | None,
    layer_id: int,
    slots: torch.Tensor,
) -> torch.Tensor:
    # index_select copies whole rows; indexing with a tensor goes element by element.
    entries = data[layer_id].index_select(0, slots)
    if slot_scales is not None:
        return entries.float().mul_(slot_scales[layer_id].index_select(0, slots).unsqueeze(-1))
    if data.dtype == FP8:
        return _widen(entries).mul_(scale[layer_id])
    return entries


def _widen(entries: torch.Tensor) -> torch.Tensor:
    """fp8 to float32. On a CPU torch does it number by number, ten times as long as this takes."""
    if entries.device.type != "cpu":
        return entries.float()
    # Sign, exponent and fraction stand in the same order in float16, whose exponent is a bit longer and 8 higher.
    bits = entries.view(torch.int8).short().bitwise_left_shift_(7).bitwise_and_(~(1 << 14))
    return bits.view(torch.float16).float().mul_(256.0)


def _fp8_scale(peak: float) -> float:
    """The power of 2 that leaves a number as large as `peak` the headroom."""
    return 2.0 ** math.ceil(math.log2(peak * _FP8_HEADROOM / _FP8_MAX)) if peak > 0 else 1.0
