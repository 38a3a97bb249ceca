"""Products in which rows have matrices of their own: one for each head, or that of the expert a row goes to.

As in `kernels.linear`, a row's result does not depend, to the bit, on the other rows or on how many there are: rows go
through each matrix in tiles of one fixed shape. The number of calls does not grow with that of the matrices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import grouped_mm

import kernels.cpu.linear as native
from kernels.linear import TILE, linear
from kernels.packed import PackedWeight

# From so many rows an expert on, on average, a call for each of them costs little beside the products.
_OWN_CALL = 32


def linear_by_head(x: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """x [T, heads, columns] times each head's matrix transposed, of [heads, rows, columns]: [T, heads, rows].

    A matrix has at least 16 rows; products by fewer need not be the same at every place in a tile.
    """
    tile, count = TILE[x.dtype], x.shape[0]
    padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -count % tile))
    transposed = matrices.transpose(1, 2)
    tiles = [torch.bmm(rows.transpose(0, 1), transposed) for rows in padded.split(tile)]
    return torch.cat(tiles, dim=1).transpose(0, 1)[:count]


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """A [rows, columns] matrix for each expert, in the format of a PackedWeight; `data[e]` is that of expert e."""

    format: str
    data: torch.Tensor
    rows: int
    columns: int

    def of(self, expert: int) -> PackedWeight:
        return PackedWeight(self.format, self.data[expert], self.rows, self.columns)


@dataclass(frozen=True, slots=True)
class Choices:
    """Which expert each of R rows goes to. What is computed for them lies in the order of their experts.

    order: [R] int64, the rows in that order. experts: [R] int64, ascending. counts: [E] int64, rows of each expert.
    """

    order: torch.Tensor
    experts: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def of(cls, chosen: torch.Tensor, num_experts: int) -> Choices:
        """From the expert of each row, [R] int64."""
        experts, order = chosen.sort(stable=True)
        return cls(order, experts, chosen.bincount(minlength=num_experts))


def linear_by_expert(x: torch.Tensor, weights: ExpertWeights, choices: Choices) -> torch.Tensor:
    """x [R, columns], in the order of `choices`, each row times its expert's matrix transposed: [R, rows]."""
    if native.is_packed(weights.of(0)):
        return native.linear_by_expert(x, weights.of(0), weights.data, choices.counts)
    if len(x) > _OWN_CALL * len(choices.counts):
        counts = choices.counts.tolist()
        used = [(expert, part) for expert, part in enumerate(x.split(counts)) if len(part)]
        return torch.cat([linear(part, weights.of(expert)) for expert, part in used])
    return _by_tiles(x, weights.data, choices)


def _by_tiles(x: torch.Tensor, matrices: torch.Tensor, choices: Choices) -> torch.Tensor:
    """Each call takes one tile of every expert that has as many: first the first ones, then the second ones, …"""
    tile, num_experts = TILE[x.dtype], len(choices.counts)
    ends = choices.counts.cumsum(0)
    place = torch.arange(len(x), device=x.device) - (ends - choices.counts)[choices.experts]
    number, place = place // tile, place % tile
    rounds = torch.arange(-(-int(choices.counts.max()) // tile), device=x.device)
    filled = rounds.unsqueeze(1) * tile < choices.counts  # [rounds, E]
    last = filled.flatten().cumsum(0)
    padded_row = (last[number * num_experts + choices.experts] - 1) * tile + place
    padded = x.new_zeros(int(last[-1]) * tile, x.shape[1]).index_copy_(0, padded_row, x)
    offsets = (filled.cumsum(1) * tile).to(torch.int32)
    transposed = matrices.transpose(1, 2)
    parts = padded.split((filled.sum(1) * tile).tolist())
    products = [grouped_mm(part, transposed, offs=offs) for part, offs in zip(parts, offsets, strict=True)]
    return torch.cat(products).index_select(0, padded_row)
