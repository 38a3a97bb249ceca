"""Matrix products over packed weights: the file's own blocks, repacked for the vector units without loss.

For quantised formats activations are quantised to int8, per row and group of 32 columns; sums within a group are
exact, sums over groups are float32 in one fixed order. Float formats multiply float32 activations, unrounded.
A row's result does not depend on the other rows, on how many there are, or on the number of threads.
"""

from __future__ import annotations

import ctypes
import threading

import torch

from kernels.cpu.library import FORMATS, NativeWeight, check, library, use_large_pages
from kernels.packed import PackedWeight

SUFFIX = "/native"
_COLUMNS = {"F32": 1, "BF16": 1, "F16": 1, "Q4_K": 256, "Q5_K": 256, "Q6_K": 256}


class _Memory:
    """Memory for packed weights, in pages of 2 MB where the system has them: reading weights once a step, a processor
    that must look up every 4 KB page reads at half its speed.

    Matrices are cut one after another from chunks, each of which lives as long as one of its matrices.
    """

    _PAGE = 2 << 20
    _CHUNK = 8 << 20

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)
        self._lock = threading.Lock()

    def take(self, size: int) -> torch.Tensor:
        """`size` bytes that begin a cache line, uint8 [size]."""
        padded = -(-size // 64) * 64
        with self._lock:
            if padded > self._free.shape[0]:
                self._free = self._chunk(max(padded, self._CHUNK))
            taken, self._free = self._free[:size], self._free[padded:]
        return taken

    def _chunk(self, size: int) -> torch.Tensor:
        size = -(-size // self._PAGE) * self._PAGE
        memory = torch.empty(size + self._PAGE, dtype=torch.uint8)
        aligned = memory[-memory.data_ptr() % self._PAGE :][:size]
        use_large_pages(aligned.data_ptr(), size)
        return aligned


_weights = _Memory()


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
    data = _weights.take(library().tandem_packed_bytes(number, weight.rows, weight.columns))
    library().tandem_pack(number, weight.rows, weight.columns, source.data_ptr(), data.data_ptr())
    return PackedWeight(weight.format + SUFFIX, data, weight.rows, weight.columns)


def is_packed(weight: PackedWeight) -> bool:
    """Whether `weight` is in the kernels' layout."""
    return weight.format.endswith(SUFFIX)


def slice_rows(weight: PackedWeight, start: int, rows: int) -> PackedWeight:
    """Rows [start, start + rows) of a packed weight, sharing its memory. start is a multiple of 16.

    Raises ValueError where the rows do not begin a tile.
    """
    if start % 16:
        raise ValueError(f"row {start} does not begin a tile of 16")
    tile = weight.data.shape[0] // -(-weight.rows // 16)
    data = weight.data[start // 16 * tile : -(-(start + rows) // 16) * tile]
    return PackedWeight(weight.format, data, rows, weight.columns)


def select_rows(weight: PackedWeight, rows: torch.Tensor) -> PackedWeight:
    """Rows `rows` (int64 [L]) of a packed weight, in that order, in memory of their own.

    Raises NativeError for a row that the weight does not have.
    """
    rows = rows.to(torch.int64).contiguous()
    count = rows.shape[0]
    number = FORMATS[weight.format.removesuffix(SUFFIX)]
    data = torch.empty(library().tandem_packed_bytes(number, count, weight.columns), dtype=torch.uint8)
    described = native(weight)
    check(library().tandem_select_rows(ctypes.addressof(described), rows.data_ptr(), count, data.data_ptr()))
    return PackedWeight(weight.format, data, count, weight.columns)


def native(weight: PackedWeight, bias: torch.Tensor | None = None) -> NativeWeight:
    """What the library sees of a packed weight. It holds pointers only: the tensors must outlive it.

    bias: float32 [rows], with zeros behind it to a multiple of 16.
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
    if x.dtype != torch.float32 or x.shape[1] != weight.columns:
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)}, expected float32 [R, {weight.columns}]")
    x = x.contiguous()
    out = torch.empty(x.shape[0], weight.rows, dtype=torch.float32)
    described = native(weight)
    check(library().tandem_linear(ctypes.addressof(described), x.data_ptr(), x.shape[0], out.data_ptr()))
    return out


def linear_by_expert(
    x: torch.Tensor, weight: PackedWeight, data: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """x [R, columns] float32, each row times its expert's packed matrix transposed: [R, rows] float32.

    Expert e's matrix is `data[e]`, of the shape and format of `weight`. Rows lie by expert: counts [experts] int64 says
    how many each has.
    """
    if x.dtype != torch.float32 or x.shape[1] != weight.columns:
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)}, expected float32 [R, {weight.columns}]")
    x, counts = x.contiguous(), counts.to(torch.int32)
    out = torch.empty(x.shape[0], weight.rows, dtype=torch.float32)
    if len(x) == 0:
        return out
    first = native(PackedWeight(weight.format, data[0], weight.rows, weight.columns))
    check(
        library().tandem_linear_by_expert(
            ctypes.addressof(first),
            data.stride(0),
            counts.data_ptr(),
            len(counts),
            x.data_ptr(),
            out.data_ptr(),
        )
    )
    return out


def dequantize(weight: PackedWeight, rows: torch.Tensor | None = None) -> torch.Tensor:
    """All rows of a packed weight, or those of `rows` (int64 [L]), as float32 [L, columns].

    Raises NativeError for a row that the weight does not have.
    """
    rows = torch.arange(weight.rows) if rows is None else rows.to(torch.int64).contiguous()
    out = torch.empty(rows.shape[0], weight.columns, dtype=torch.float32)
    described = native(weight)
    check(
        library().tandem_dequantise_rows(
            ctypes.addressof(described), rows.data_ptr(), rows.shape[0], out.data_ptr()
        )
    )
    return out
