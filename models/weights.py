"""Weights on their way from a checkpoint into a model: checked, stacked, and brought into the form that is held."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from copy import copy

import msgspec
import torch

from kernels.cpu.linear import can_pack, pack
from kernels.dequantize import dequantize
from kernels.packed import FLOAT_FORMATS, PackedWeight, pack_float
from kernels.quantize import COLUMNS, quantize
from models.base import ModelError
from models.options import Quantization
from models.source import WeightSource

logger = logging.getLogger(__name__)

# Rows dequantised at a time, so that no float32 copy of a whole matrix exists beside the held one.
_ROWS_AT_A_TIME = 4096


# What 4 bits are too few for: the ends of the model get 8. And what decides among experts is left as it is.
_ENDS = ("embed_tokens.weight", "lm_head.weight")
_ROUTERS = (
    "mlp.gate.weight",
    "shared_expert_gate.weight",
    "block_sparse_moe.router.layer.weight",
    "mixer.gate.weight",
)


class Weights:
    """Hands a model its weights as they will be held: matrices by `hold`, all else in the model's dtype.

    Errors start with `where`, the path of the checkpoint.
    """

    def __init__(self, source: WeightSource, where: str, device: torch.device, precision: Precision) -> None:
        self.device = device
        self.dtype = precision.dtype
        self._precision = precision
        self._source = source
        self.where = where
        self._unread = source.names()
        self._own_names: dict[str, str] = {}

    def matrices(self, names: Sequence[str], rows: Sequence[int], columns: int) -> tuple[PackedWeight, ...]:
        """The matrices `names`, [rows[i], columns] each, stacked row-wise into one where formats allow it."""
        parts = []
        for name, expected in zip(names, rows, strict=True):
            part = self._source.packed(self._read(name))
            self._check(name, (part.rows, part.columns), (expected, columns))
            parts.append(part)
        if self._precision.native:  # a step plan names each matrix, and gains nothing from stacking
            return tuple(
                hold(part, self._precision_of(name), self.device)
                for name, part in zip(names, parts, strict=True)
            )
        if len({part.format for part in parts}) == 1:
            return (hold(concat_rows(parts), self._precision, self.device),)
        held = [hold(part, self._precision, self.device) for part in parts]
        return (concat_rows(held),) if len({part.format for part in held}) == 1 else tuple(held)

    def vector(self, name: str, size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The vector `name` [size] in `dtype`, or the model's."""
        vector = self._source.tensor(self._read(name))
        self._check(name, tuple(vector.shape), (size,))
        return vector.to(self.device, dtype or self.dtype, copy=True)

    def token_ids(self, name: str, size: int, vocab_size: int) -> torch.Tensor:
        """The vector `name` [size] int64 of tokens of a vocabulary."""
        token_ids = self.vector(name, size, torch.int64)
        self.check_token_ids(name, token_ids, vocab_size)
        return token_ids

    def check_token_ids(self, name: str, token_ids: torch.Tensor, vocab_size: int) -> None:
        """Raises ModelError where the tensor `name`, which `token_ids` come from, has others."""
        if len(token_ids) and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocab_size:
            raise ModelError(f"{self.where}: {name} has tokens beyond the vocabulary of {vocab_size}")

    def dense(self, name: str, rows: int, columns: int) -> torch.Tensor:
        """The matrix `name` [rows, columns] in the model's dtype, whatever its format."""
        part = self._source.packed(self._read(name))
        self._check(name, (part.rows, part.columns), (rows, columns))
        return dequantize(part).to(self.device, self.dtype, copy=True)

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor `name` of that shape, float32, for what is no matrix and is computed in full precision."""
        tensor = self._source.tensor(self._read(name))
        self._check(name, tuple(tensor.shape), shape)
        return tensor.to(self.device, torch.float32, copy=True)

    def has(self, name: str) -> bool:
        """Whether the checkpoint has the tensor `name`."""
        return self._own_names.get(name, name) in self._source.names()

    def same(self, name: str, other: str) -> bool:
        """Whether `name` is no other tensor than `other`: it has the same values, or the checkpoint lacks it."""
        if not self.has(name):
            return True
        return torch.equal(self._source.tensor(self._read(name)), self._source.tensor(self._read(other)))

    def slices(self, name: str, count: int, rows: int, columns: int) -> Iterator[tuple[PackedWeight]]:
        """The matrices [rows, columns] that the tensor `name` [count, rows, columns] is made of, one by one."""
        tensor = self._source.tensor(self._read(name))
        self._check(name, tuple(tensor.shape), (count, rows, columns))
        for matrix in tensor:
            yield (hold(pack_float(matrix), self._precision, self.device),)

    def renamed(self, canonical: Callable[[str], str]) -> Weights:
        """The same weights, each under the name that `canonical` makes of its own."""
        view = copy(self)
        view._own_names = {canonical(name): name for name in self._source.names()}
        return view

    def warn_unread(self, besides: str | None = None) -> None:
        """Say which tensors of the checkpoint the model did not ask for, but for names that begin with `besides`."""
        extra = sorted(
            name
            for name in self._unread
            if not name.endswith("rotary_emb.inv_freq") and (besides is None or not name.startswith(besides))
        )
        if extra:
            logger.warning("%s: %d tensors are not used: %s", self.where, len(extra), ", ".join(extra[:8]))

    def _precision_of(self, name: str) -> Precision:
        if name.endswith(_ROUTERS):
            return msgspec.structs.replace(self._precision, quantization=None)
        if name.endswith(_ENDS) and self._precision.quantization == "int4":
            return msgspec.structs.replace(self._precision, quantization="int8")
        return self._precision

    def _read(self, name: str) -> str:
        own = self._own_names.get(name, name)
        self._unread.discard(own)
        return own

    def _check(self, name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if shape != expected:
            raise ModelError(
                f"{self.where}: {name} is {list(shape)}, but the configuration says {list(expected)}"
            )


class Precision(msgspec.Struct, frozen=True):
    """What a model computes in. `native`: weights keep the checkpoint's own format, packed for the CPU kernels.

    quantization: float matrices are held in 8 or 4 bits instead, in blocks of 32 columns; native only.
    """

    dtype: torch.dtype  # of activations; of weights too, unless native
    native: bool = False
    quantization: Quantization | None = None


def hold(weight: PackedWeight, precision: Precision, device: torch.device) -> PackedWeight:
    """The form in which a model keeps `weight`, in memory of its own: packed as it is, or a float matrix."""
    dtype = precision.dtype
    if precision.native:
        if precision.quantization is not None and _can_quantize(weight):
            weight = quantize(weight.data, "Q8_0" if precision.quantization == "int8" else "Q4_1")
        if can_pack(weight):
            return pack(weight)
        return pack(hold(weight, Precision(dtype), device))
    if weight.format in FLOAT_FORMATS.values():
        return pack_float(weight.data.to(device, dtype, copy=True))
    held = torch.empty(weight.rows, weight.columns, dtype=dtype, device=device)
    for start in range(0, weight.rows, _ROWS_AT_A_TIME):
        data = weight.data[start : start + _ROWS_AT_A_TIME]
        held[start : start + len(data)] = dequantize(
            PackedWeight(weight.format, data, len(data), weight.columns)
        )
    return pack_float(held)


def _can_quantize(weight: PackedWeight) -> bool:
    return weight.format in FLOAT_FORMATS.values() and weight.columns % COLUMNS == 0


def concat_rows(parts: Sequence[PackedWeight]) -> PackedWeight:
    """Matrices of one format and width, one above the other. A single one is returned as it is."""
    if len(parts) == 1:
        return parts[0]
    data = torch.cat([part.data for part in parts])
    return PackedWeight(parts[0].format, data, sum(part.rows for part in parts), parts[0].columns)
