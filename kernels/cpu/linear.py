"""Matrix products over packed weights: the file's own blocks, repacked for the vector units without loss.

Activations are quantised to int8 per row and group of 32 columns for the quantised formats; sums within a group are
exact, sums over groups are float32 in one fixed order. Float formats multiply float32 activations, unrounded.
A row's result does not depend on the other rows, on how many there are, or on the number of threads.
"""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu.library import FORMATS, NativeWeight, check, library
from kernels.packed import PackedWeight

SUFFIX = "/native"
_COLUMNS = {"F32": 1, "BF16": 1, "F16": 1, "Q4_K": 256, "Q5_K": 256, "Q6_K": 256}


def can_pack(weight: PackedWeight) -> bool:
    """Whether `pack` takes this weight: its format is known here and its columns are whole blocks."""
    return weight.format in FORMATS and weight.columns % _COLUMNS.get(weight.format, 32) == 0


def pack(weight: PackedWeight) -> PackedWeight:
    """`weight` in the kernels' layout: format + "/native", data uint8 flat. It replaces the one given.

    Raises ValueError for a weight that `can_pack` refuses.
    """
    if not can_pack(weight):
        raise ValueError(f"no native kernel for {weight.format} with {weight.columns} columns")
    number = FORMATS[weight.format]
    source = weight.data.contiguous()
    size = library().tandem_packed_bytes(number, weight.rows, weight.columns)
    data = torch.empty(size, dtype=torch.uint8)
    library().tandem_pack(number, weight.rows, weight.columns, source.data_ptr(), data.data_ptr())
    return PackedWeight(weight.format + SUFFIX, data, weight.rows, weight.columns)


def is_packed(weight: PackedWeight) -> bool:
    """Whether `weight` is in the kernels' layout."""
    return weight.format.endswith(SUFFIX)


def native(weight: PackedWeight, bias: torch.Tensor | None = None) -> NativeWeight:
    """What the library sees of a packed weight. It holds pointers only: the tensors must outlive it.

    bias: float32 [rows]; the kernels add whole vectors of 16, so it must be the start of at least that many floats.
    """
    return NativeWeight(
        format=FORMATS[weight.format.removesuffix(SUFFIX)],
        rows=weight.rows,
        columns=weight.columns,
        data=weight.data.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
    )


def linear(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """x [R, columns] float32 times the packed weight transposed: [R, rows] float32."""
    x = x.contiguous()
    out = torch.empty(x.shape[0], weight.rows, dtype=torch.float32)
    described = native(weight)
    check(library().tandem_linear(ctypes.addressof(described), x.data_ptr(), x.shape[0], out.data_ptr()))
    return out


def dequantize(weight: PackedWeight, rows: torch.Tensor | None = None) -> torch.Tensor:
    """All rows of a packed weight, or those of `rows` (int64 [L], in range), as float32 [L, columns]."""
    rows = torch.arange(weight.rows) if rows is None else rows.contiguous()
    out = torch.empty(rows.shape[0], weight.columns, dtype=torch.float32)
    described = native(weight)
    library().tandem_dequantise_rows(
        ctypes.addressof(described), rows.data_ptr(), rows.shape[0], out.data_ptr()
    )
    return out
