"""Matrix products whose rows do not depend on their company, and embedding lookups, for every weight format.

torch's `linear` is not row-exact: with another number of rows it may choose another kernel, which adds in another
order. So rows go through in tiles of one fixed shape. A larger shape is used for many rows where a probe, once for
each matrix shape, shows that it gives the same bits as the tile; and each row has a tile of its own where another
shows that its place in one matters. Weights that the native CPU kernels have packed are theirs to multiply; they are
row-exact by themselves.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.nn.functional import linear as torch_linear

import kernels.cpu.linear as native
from kernels.dequantize import dequantize
from kernels.packed import FLOAT_FORMATS, PackedWeight

# Rows of a tile. On the CPUs measured, 1 to 16 bfloat16 rows cost about the same; float32 rows do not.
TILE = {torch.bfloat16: 16, torch.float16: 16, torch.float32: 8}
_WIDE = (256, 64)  # larger shapes that are tried, in this order
_DEQUANTISED_AT_ONCE = 4096  # rows of a quantised matrix
_ALIGNMENT = 64  # bytes, of what torch allocates
_FEW = 16  # rows of a matrix that places in a tile are tried for


def linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., columns] times W^T, plus bias: [..., rows] in x's dtype. Each row of x by itself, bit for bit."""
    flat = x.reshape(-1, weight.columns)
    if native.is_packed(weight):
        product = native.linear(flat, weight)
    elif weight.format in FLOAT_FORMATS.values():
        product = _product(flat, weight.data.to(x.dtype))
    else:
        rows = torch.arange(weight.rows, device=weight.data.device).split(_DEQUANTISED_AT_ONCE)
        product = torch.cat([_product(flat, dequantize(weight, part).to(x.dtype)) for part in rows], dim=1)
    if bias is not None:
        product += bias
    return product.view(*x.shape[:-1], weight.rows)


def embedding(ids: torch.Tensor, weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Rows `ids` ([T] int64) of a matrix: [T, columns] in `dtype`."""
    read = native.dequantize if native.is_packed(weight) else dequantize
    return read(weight, ids).to(dtype)


def select_rows(weight: PackedWeight, rows: torch.Tensor) -> PackedWeight:
    """The matrix of rows `rows` ([L] int64), in that order, in memory of its own and in the same form."""
    if native.is_packed(weight):
        return native.select_rows(weight, rows)
    data = weight.data.index_select(0, rows)
    return PackedWeight(weight.format, data, len(rows), weight.columns)


def _product(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """x [T, K] @ matrix [N, K]^T by tiles."""
    tile, count = TILE[x.dtype], x.shape[0]
    if count == 0:
        return x.new_empty(0, matrix.shape[0])
    shape = (matrix.shape[0], matrix.shape[1], matrix.dtype, matrix.device, torch.get_num_threads())
    if not _is_even(*shape):
        return torch.cat([torch_linear(_first_of_tile(row), matrix)[:1] for row in x])
    padded = -count % tile
    if padded:
        x = torch.cat([x, x.new_zeros(padded, x.shape[1])])
    if x.shape[0] == tile:
        return torch_linear(x, matrix)[:count]
    # The largest shape for so many rows that is known to equal the tile.
    wide = next((rows for rows in _WIDE if rows <= x.shape[0] and _equals_tile(rows, *shape)), tile)
    parts = []
    start = 0
    while start < x.shape[0]:
        step = wide if x.shape[0] - start >= wide else tile
        parts.append(torch_linear(x[start : start + step], matrix))
        start += step
    return torch.cat(parts)[:count]


def _first_of_tile(row: torch.Tensor) -> torch.Tensor:
    """A tile of its own for a row [K], in memory of its own."""
    tile = row.new_zeros(TILE[row.dtype], len(row))
    tile[0] = row
    return tile


@cache
def _is_even(rows: int, columns: int, dtype: torch.dtype, device: torch.device, num_threads: int) -> bool:
    """Whether a row has the same bits at all places of a tile, and wherever that lies in memory. By MKL it has not for
    a few matrices of few rows, on processors of AMD."""
    if rows > _FEW:
        return True
    tile = TILE[dtype]
    x, matrix = _random(tile, rows, columns, dtype, device)
    alone = torch.cat([torch_linear(_first_of_tile(row), matrix)[:1] for row in x])
    for offset in range(_ALIGNMENT // x.element_size()):
        moved = x.new_zeros(offset + x.numel())[offset:].view_as(x)
        for shift in range(tile):
            if not torch.equal(torch_linear(moved.copy_(x.roll(shift, 0)), matrix), alone.roll(shift, 0)):
                return False
    return True


@cache
def _equals_tile(
    wide: int, rows: int, columns: int, dtype: torch.dtype, device: torch.device, num_threads: int
) -> bool:
    """Whether `wide` rows at once have the bits of tiles."""
    x, matrix = _random(wide, rows, columns, dtype, device)
    tiles = torch.cat([torch_linear(part, matrix) for part in x.split(TILE[dtype])])
    return torch.equal(torch_linear(x, matrix), tiles)


def _random(
    count: int, rows: int, columns: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [count, columns] and a matrix [rows, columns] to probe with: the order of additions depends on shapes, not on
    values, so random values show it."""
    generator = torch.Generator(device).manual_seed(0)

    def drawn(height: int) -> torch.Tensor:
        return torch.randn(height, columns, dtype=torch.float32, device=device, generator=generator).to(dtype)

    return drawn(count), drawn(rows)
