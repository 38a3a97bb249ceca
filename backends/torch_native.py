"""Paged attention on any device: on a CPU by the native kernels for what these do, else in plain torch.

A row's result does not depend on the rows beside it. In torch, query rows are worked on in tiles of one size, keys in
blocks of one size at fixed absolute positions, and each pair of a tile and a block that it can see is one item of a
batched SDPA call. The partial results of a tile are then merged in order of position (as in flash decoding: Dao et
al., 2023). So every product has one shape, and prefill, chunks, decode and verify agree bit for bit; and a request
costs what its own context costs, not the pool's or a longer one's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from backends.base import AttentionBackend, AttentionLayer, LatentAttentionLayer
from backends.forward import ForwardBatch
from backends.kv_pool import KVPool
from backends.mla import Prompt, attend_mha, plan_mha
from backends.softmax import MASKED, RunningSoftmax, partial_attention
from kernels.cpu import library
from kernels.cpu.attention import PagedAttention
from kernels.cpu.kv import KV_DTYPES

TILE = 8  # query rows; over a latent cache 1, whose many heads are rows enough
BLOCK = 128  # key slots
_ITEMS_AT_ONCE = 256  # bounds the memory of gathered keys and values
_SHARED = 4  # tiles of one sequence from which on they read a block together, instead of a copy each


@dataclass(frozen=True, slots=True)
class _Part:
    """Some tiles and the items of theirs.

    rows: [N, tile] the query tokens of each tile; what stands behind the last one is filled up with it.
    item_tile: [W] the tile of each item. mask: [W, tile, BLOCK], to be added to the item's scores.
    slots: [B, BLOCK] the blocks of keys that are read.
    calls: which items are worked on together, and which blocks they read: one each, or one for all.
    rounds: for k = 0, 1, …, which tiles have a k-th item, and which one it is.
    """

    rows: torch.Tensor
    item_tile: torch.Tensor
    mask: torch.Tensor
    slots: torch.Tensor
    calls: tuple[tuple[slice, slice], ...]
    rounds: tuple[tuple[torch.Tensor, torch.Tensor], ...]


@dataclass(slots=True)
class _Plan:
    """What the layers of a pass share, each piece worked out when the first layer wants it."""

    batch: ForwardBatch
    parts: dict[int | None, list[_Part]] = field(default_factory=dict)
    prompts: list[Prompt] | None = None
    _paged: PagedAttention | None = None
    _valid: torch.Tensor | None = None

    @property
    def tile(self) -> int:
        """Rows of a tile."""
        return 1 if self.batch.kv_pool.layout.is_latent else TILE

    @property
    def valid(self) -> torch.Tensor:
        """[T] the rows of all tiles that are tokens, in order."""
        if self._valid is None:
            self._valid = _valid_rows(self.batch, self.tile)
        return self._valid

    def parts_for(self, window: int | None) -> list[_Part]:
        """The pass cut into parts of whole tiles, for layers with such a sliding window."""
        if window not in self.parts:
            tiles = _tiles(self.batch, window, self.tile)
            self.parts[window] = [_part(self.batch, window, some, self.tile) for some in _cut(tiles)]
        return self.parts[window]

    def paged(self) -> PagedAttention:
        if self._paged is None:
            batch = self.batch
            self._paged = PagedAttention(
                batch.query_lens,
                batch.context_lens,
                batch.table_rows,
                batch.slot_table,
                batch.out_slots,
                batch.kv_pool.tensors(),
                batch.causal,
            )
        return self._paged

    def mha(self) -> list[Prompt]:
        if self.prompts is None:
            self.prompts = plan_mha(self.batch)
        return self.prompts


class TorchNativeBackend(AttentionBackend):
    """Reference backend: every device, every mask, sliding windows, soft-caps, grouped heads, every cache dtype.

    Over a latent cache, a layer's key is its entry, and its value the first columns of it, which are not stored.
    """

    name = "torch_native"

    def __init__(self, native: bool = True) -> None:
        """native: take the native kernels where there are some for a layer and its cache."""
        self._native = native and library.available()

    def plan(self, batch: ForwardBatch) -> _Plan:
        return _Plan(batch)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        plan: object,
    ) -> torch.Tensor:
        assert isinstance(plan, _Plan)
        pool = batch.kv_pool
        if self._native and _has_kernels(layer, pool):
            values = key if pool.layout.is_latent else value
            out = plan.paged().attend(layer.layer_id, query, key, values, layer.scale, layer.sliding_window)
            return out[..., : value.shape[-1]].to(query.dtype)
        pool.write(layer.layer_id, batch.out_slots, key, value)
        if query.shape[0] == 0:
            return query.new_empty(0, layer.num_heads, value.shape[-1])
        tiles = [_attend(query, layer, batch, part) for part in plan.parts_for(layer.sliding_window)]
        rows = torch.cat(tiles).flatten(0, 1).index_select(0, plan.valid)
        return rows[..., : value.shape[-1]].to(query.dtype)

    def forward_mha(
        self,
        query: torch.Tensor,
        entry: torch.Tensor,
        layer: LatentAttentionLayer,
        batch: ForwardBatch,
        plan: object,
    ) -> torch.Tensor:
        assert isinstance(plan, _Plan)
        batch.kv_pool.write(layer.layer_id, batch.out_slots, entry, entry)
        return attend_mha(query, layer, batch, plan.mha())


def _has_kernels(layer: AttentionLayer, pool: KVPool) -> bool:
    layout = pool.layout
    return (
        pool.key.device.type == "cpu"
        and layout.dtype in KV_DTYPES
        and not pool.is_calibrating
        and layout.head_dim % 16 == 0
        and layout.v_head_dim in (0, layout.head_dim)
        and layer.logit_softcap is None
    )


def _attend(query: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch, part: _Part) -> torch.Tensor:
    """[N, tile, num_heads, v_head_dim] float32 for the N tiles of `part`; as wide as keys over a latent cache."""
    group = layer.num_heads // layer.num_kv_heads
    num_tiles, tile = part.rows.shape
    tiles = query.index_select(0, part.rows.flatten()).float()
    # The heads of a group share their keys, so they are further rows of the same product.
    tiles = tiles.view(num_tiles, tile, layer.num_kv_heads, group, -1).permute(0, 2, 3, 1, 4).flatten(2, 3)
    keys, values = batch.kv_pool.gather(layer.layer_id, part.slots)
    keys = keys.float().transpose(1, 2)
    # Columns of an entry that are no value are dropped at the end: cutting them off here would copy every entry.
    values = keys if batch.kv_pool.layout.is_latent else values.float().transpose(1, 2)
    mask = part.mask.repeat(1, group, 1).unsqueeze(1)
    partial = []
    for items, blocks in part.calls:
        partial.append(
            partial_attention(
                tiles.index_select(0, part.item_tile[items]),
                keys[blocks],
                values[blocks],
                mask[items],
                layer.scale,
                layer.logit_softcap,
            )
        )
    outs, lses = zip(*partial, strict=True)
    out = _merge(torch.cat(outs), torch.cat(lses), part)
    return out.unflatten(2, (group, tile)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _merge(out: torch.Tensor, lse: torch.Tensor, part: _Part) -> torch.Tensor:
    """Partial results [W, heads, rows, dim] and their log-sum-exp [W, heads, rows, 1] to one result a tile.

    Always in order of position.
    """
    (_, first), *others = part.rounds
    running = RunningSoftmax.of(out.index_select(0, first), lse.index_select(0, first))
    for tiles, items in others:
        running.add(tiles, out.index_select(0, items), lse.index_select(0, items))
    return running.result() if others else running.total


@dataclass(frozen=True, slots=True)
class _Tile:
    sequence: int
    first_row: int  # among the T tokens of the batch
    num_rows: int
    position: int  # of the first row
    blocks: range


def _tiles(batch: ForwardBatch, window: int | None, size: int) -> Iterator[_Tile]:
    row = 0
    for sequence, (queries, context) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
        for start in range(0, queries, size):
            count = min(size, queries - start)
            position = context - queries + start
            last = position + count - 1 if batch.causal else context - 1
            first = 0 if window is None else max(0, position - window + 1)
            yield _Tile(sequence, row + start, count, position, range(first // BLOCK, last // BLOCK + 1))
        row += queries


def _cut(tiles: Iterable[_Tile]) -> Iterator[list[_Tile]]:
    part: list[_Tile] = []
    items = 0
    for tile in tiles:
        if part and items + len(tile.blocks) > _ITEMS_AT_ONCE:
            yield part
            part, items = [], 0
        part.append(tile)
        items += len(tile.blocks)
    if part:
        yield part


def _part(batch: ForwardBatch, window: int | None, tiles: list[_Tile], size: int) -> _Part:
    device = batch.slot_table.device
    items, calls, readers = _items(tiles)
    rows = torch.tensor([[min(r, tile.num_rows - 1) for r in range(size)] for tile in tiles], device=device)
    first_rows = torch.tensor([tile.first_row for tile in tiles], device=device)
    item_tile = torch.tensor([index for index, _ in items], device=device)

    def of_items(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, device=device).view(-1, 1, 1)

    keys = of_items([block * BLOCK for _, block in items]) + torch.arange(BLOCK, device=device)
    queries = of_items([tiles[index].position for index, _ in items]) + rows[item_tile].unsqueeze(2)
    seen = keys < of_items([batch.context_lens[tiles[index].sequence] for index, _ in items])
    if batch.causal:
        seen = seen & (keys <= queries)
    if window is not None:
        seen = seen & (queries - keys < window)
    read = torch.tensor(
        [batch.table_rows[tiles[items[reader][0]].sequence] for reader in readers], device=device
    )
    context = torch.tensor(
        [batch.context_lens[tiles[items[reader][0]].sequence] for reader in readers], device=device
    )
    positions = keys.squeeze(1)[readers].minimum(context.unsqueeze(1) - 1)
    return _Part(
        rows=first_rows.unsqueeze(1) + rows,
        item_tile=item_tile,
        mask=torch.where(seen, 0.0, MASKED).expand(-1, size, -1),
        slots=batch.slot_table[read.unsqueeze(1), positions].long(),
        calls=calls,
        rounds=tuple(_rounds(tiles, items, device)),
    )


def _items(
    tiles: list[_Tile],
) -> tuple[list[tuple[int, int]], tuple[tuple[slice, slice], ...], list[int]]:
    """The pairs (tile, block), the calls over them, and of each block that is read an item that reads it."""
    by_block: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for index, tile in enumerate(tiles):
        for block in tile.blocks:
            by_block.setdefault((tile.sequence, block), []).append((index, block))
    items = [item for group in by_block.values() if len(group) < _SHARED for item in group]
    readers = list(range(len(items)))
    calls = [(slice(0, len(items)), slice(0, len(items)))] if items else []
    for group in by_block.values():
        if len(group) >= _SHARED:
            calls.append((slice(len(items), len(items) + len(group)), slice(len(readers), len(readers) + 1)))
            readers.append(len(items))
            items += group
    return items, tuple(calls), readers


def _rounds(
    tiles: list[_Tile], items: list[tuple[int, int]], device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """For k = 0, 1, …: the tiles with a k-th item, in order of position, and that item."""
    where = {item: number for number, item in enumerate(items)}
    for k in range(max(len(tile.blocks) for tile in tiles)):
        having = [index for index, tile in enumerate(tiles) if len(tile.blocks) > k]
        yield (
            torch.tensor(having, device=device),
            torch.tensor([where[index, tiles[index].blocks[k]] for index in having], device=device),
        )


def _valid_rows(batch: ForwardBatch, size: int) -> torch.Tensor:
    valid: list[int] = []
    offset = 0
    for queries in batch.query_lens:
        valid += range(offset, offset + queries)
        offset += -(-queries // size) * size
    return torch.tensor(valid, dtype=torch.int64, device=batch.slot_table.device)
