"""How a pass is cut into programs: block sizes, tiles of query rows, and which sequences are split over their keys.

A sequence's query rows are its (token, head of a group) pairs, token by token, so that the query heads which share a
key head share a tile, and a tile is full whether it holds a prompt chunk, a block to verify or many heads of one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

SPLIT_QUERY_LEN = 16  # sequences with no more query tokens than this may be split over their keys
PARTIAL_BYTES = 64 << 20  # bounds the partial results of one layer


@dataclass(frozen=True, slots=True)
class Blocks:
    """Block sizes of one kernel configuration. They fix the arithmetic of a row, so nothing else may choose them.

    rows: query rows a tile. keys: positions a product. split: positions a partial result, a multiple of `keys`.
    """

    rows: int
    keys: int
    split: int
    num_warps: int
    num_stages: int


def block_sizes(head_dim: int, v_head_dim: int, dtype: torch.dtype) -> Blocks:
    """The block sizes for these head dimensions and this query dtype."""
    widest = max(head_dim, v_head_dim)
    if widest > 256:  # a latent entry: splits are long, since their results are wide
        rows = 16 if dtype == torch.float32 else 32
        return Blocks(
            rows=rows, keys=16 if dtype == torch.float32 else 32, split=1024, num_warps=8, num_stages=2
        )
    if dtype == torch.float32:  # no tensor cores: the products of a large tile would not fit the registers
        return Blocks(rows=16, keys=32, split=256, num_warps=4, num_stages=2)
    if widest > 128:
        return Blocks(rows=64, keys=32, split=256, num_warps=8, num_stages=2)
    return Blocks(rows=64, keys=64, split=256, num_warps=8 if widest > 64 else 4, num_stages=2)


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tables of int32 that the kernels read, all on the device of the pass.

    sequences: [S, 5] first query token, query length, context length, row of the slot table, first partial result.
    whole_tiles, split_tiles: [N, 2] sequence and first query row; a whole tile goes through its keys by itself.
    split_tokens: [M, 2] query token and its sequence, for all tokens of the split sequences.
    num_splits: most splits that a split sequence has. num_partials: results of one row over one split, in all.
    """

    sequences: torch.Tensor
    whole_tiles: torch.Tensor
    split_tiles: torch.Tensor
    split_tokens: torch.Tensor
    num_splits: int
    num_partials: int


def tile(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    table_rows: Sequence[int],
    num_heads: int,
    num_kv_heads: int,
    v_head_dim: int,
    blocks: Blocks,
    device: torch.device,
    partial_bytes: int = PARTIAL_BYTES,
) -> Tiling:
    """Cut a pass into tiles. Splitting changes no bit of a result, so it may follow the load of the device."""
    splits = [-(-context // blocks.split) for context in context_lens]
    partials = [queries * num_heads * count for queries, count in zip(query_lens, splits, strict=True)]
    split = _choose_split(query_lens, splits, partials, partial_bytes // (4 * (v_head_dim + 2)))

    sequences: list[tuple[int, ...]] = []
    tiles: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
    tokens: list[tuple[int, int]] = []
    first_token = first_partial = 0
    for index, queries in enumerate(query_lens):
        sequences.append((first_token, queries, context_lens[index], table_rows[index], first_partial))
        rows = queries * (num_heads // num_kv_heads)
        tiles[index in split].extend((index, row) for row in range(0, rows, blocks.rows))
        if index in split:
            tokens.extend((token, index) for token in range(first_token, first_token + queries))
            first_partial += partials[index]
        first_token += queries

    def table(rows: Sequence[tuple[int, ...]], columns: int) -> torch.Tensor:
        return torch.tensor(rows, dtype=torch.int32).view(-1, columns).to(device, non_blocking=True)

    return Tiling(
        sequences=table(sequences, 5),
        whole_tiles=table(tiles[False], 2),
        split_tiles=table(tiles[True], 2),
        split_tokens=table(tokens, 2),
        num_splits=max((splits[index] for index in split), default=0),
        num_partials=first_partial,
    )


def _choose_split(
    query_lens: Sequence[int], splits: Sequence[int], partials: Sequence[int], room: int
) -> frozenset[int]:
    """Sequences of few queries and several splits, the longest first, as far as there is room for their partials."""
    able = [i for i, queries in enumerate(query_lens) if 0 < queries <= SPLIT_QUERY_LEN and splits[i] > 1]
    chosen = []
    for index in sorted(able, key=lambda i: -splits[i]):
        if partials[index] <= room:
            room -= partials[index]
            chosen.append(index)
    return frozenset(chosen)
