"""Paged attention in plain torch, on any device. A row's result does not depend on the rows beside it.

Query rows are worked on in tiles of one size, keys in blocks of one size at fixed absolute positions, and each pair of
a tile and a block that it can see is one item of a batched SDPA call. The partial results of a tile are then merged
in order of position (as in flash decoding: Dao et al., 2023). So every product has one shape, and prefill, chunks,
decode and verify agree bit for bit; and a request costs what its own context costs, not the pool's or a longer one's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from backends.base import AttentionBackend, AttentionLayer
from backends.forward import ForwardBatch

TILE = 8  # query rows
BLOCK = 128  # key slots
_ITEMS_AT_ONCE = 256  # bounds the memory of gathered keys and values
_MASKED = -1e30  # finite: a tile that sees nothing of a block must give a weight of 0, not a NaN


@dataclass(frozen=True, slots=True)
class _Part:
    """Some tiles and the items of theirs. `slots` [W, BLOCK]; `mask` [W, TILE, BLOCK], to be added to the scores.

    `rows` [N, TILE] are the query tokens of each tile; what stands behind the last one is filled up with it.
    `item_tile` [W] is the tile of each item; `rounds` says which tiles have a k-th item, and which one it is.
    """

    slots: torch.Tensor
    mask: torch.Tensor
    rows: torch.Tensor
    item_tile: torch.Tensor
    rounds: tuple[tuple[torch.Tensor, torch.Tensor], ...]


@dataclass(slots=True)
class _Plan:
    """Worked out once a pass for each sliding window that its layers have.

    `valid` [T] is the rows of all tiles that are tokens, in order.
    """

    batch: ForwardBatch
    valid: torch.Tensor
    parts: dict[int | None, list[_Part]] = field(default_factory=dict)

    def parts_for(self, window: int | None) -> list[_Part]:
        """The pass cut into parts of whole tiles."""
        if window not in self.parts:
            tiles = _tiles(self.batch, window)
            self.parts[window] = [_part(self.batch, window, some) for some in _cut(tiles)]
        return self.parts[window]


class TorchNativeBackend(AttentionBackend):
    """Reference backend: every device, every mask, sliding windows, soft-caps, grouped heads."""

    name = "torch_native"

    def plan(self, batch: ForwardBatch) -> _Plan:
        return _Plan(batch, _valid_rows(batch))

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
        batch.kv_pool.write(layer.layer_id, batch.out_slots, key, value)
        if query.shape[0] == 0:
            return query.new_empty(0, layer.num_heads, value.shape[-1])
        tiles = [_attend(query, layer, batch, part) for part in plan.parts_for(layer.sliding_window)]
        return torch.cat(tiles).flatten(0, 1)[plan.valid].to(query.dtype)


def _attend(query: torch.Tensor, layer: AttentionLayer, batch: ForwardBatch, part: _Part) -> torch.Tensor:
    """[N, TILE, num_heads, v_head_dim] float32 for the N tiles of `part`."""
    group = layer.num_heads // layer.num_kv_heads
    tiles = query[part.rows].float()  # [N, TILE, H, D]
    num_tiles = tiles.shape[0]
    # The heads of a group share their keys, so they are further rows of the same product.
    tiles = tiles.view(num_tiles, TILE, layer.num_kv_heads, group, -1).permute(0, 2, 3, 1, 4).flatten(2, 3)
    keys, values = batch.kv_pool.gather(layer.layer_id, part.slots)
    out, lse = _partial(
        tiles[part.item_tile],
        keys.float().transpose(1, 2),
        values.float().transpose(1, 2),
        part.mask.repeat(1, group, 1).unsqueeze(1),
        layer.scale,
        layer.logit_softcap,
    )
    out = _merge(out, lse.unsqueeze(-1), part)
    return out.unflatten(2, (group, TILE)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _merge(out: torch.Tensor, lse: torch.Tensor, part: _Part) -> torch.Tensor:
    """Partial results [W, heads, rows, dim] and their log-sum-exp [W, heads, rows, 1] to one result a tile.

    Always in order of position. A block that a row does not see has weight 0 in it and changes no bit.
    """
    (_, first), *others = part.rounds
    if not others:
        return out[first]
    total, peak = out[first], lse[first]
    weight = torch.ones_like(peak)
    for tiles, items in others:
        old, new = peak[tiles], lse[items]
        high = torch.maximum(old, new)
        keep, gain = (old - high).exp(), (new - high).exp()
        total[tiles] = total[tiles] * keep + out[items] * gain
        weight[tiles] = weight[tiles] * keep + gain
        peak[tiles] = high
    return total / weight


def _partial(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over one block: [W, heads, rows, dim] and the log-sum-exp of its scores, [W, heads, rows]."""
    if query.device.type == "cpu" and softcap is None and query.shape[-1] == value.shape[-1]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, attn_mask=mask, scale=scale
        )
        return out, lse
    scores = query @ key.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + mask
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp() @ value, lse


@dataclass(frozen=True, slots=True)
class _Tile:
    sequence: int
    first_row: int  # among the T tokens of the batch
    num_rows: int
    position: int  # of the first row
    blocks: range


def _tiles(batch: ForwardBatch, window: int | None) -> Iterator[_Tile]:
    row = 0
    for sequence, (queries, context) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
        for start in range(0, queries, TILE):
            count = min(TILE, queries - start)
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


def _part(batch: ForwardBatch, window: int | None, tiles: list[_Tile]) -> _Part:
    device = batch.slot_table.device
    items = [(index, tile, block) for index, tile in enumerate(tiles) for block in tile.blocks]
    table_rows = torch.tensor([batch.table_rows[tile.sequence] for _, tile, _ in items], device=device)
    context = torch.tensor([batch.context_lens[tile.sequence] for _, tile, _ in items], device=device)
    start = torch.tensor([block * BLOCK for _, _, block in items], device=device)
    position = torch.tensor([tile.position for _, tile, _ in items], device=device)
    rows = torch.tensor([[min(r, tile.num_rows - 1) for r in range(TILE)] for tile in tiles], device=device)
    item_tile = torch.tensor([index for index, _, _ in items], device=device)

    keys = start.unsqueeze(1) + torch.arange(BLOCK, device=device)  # [W, BLOCK] positions
    inside = keys < context.unsqueeze(1)
    slots = batch.slot_table[table_rows.unsqueeze(1), keys.clamp(max=batch.slot_table.shape[1] - 1)]
    queries = position.unsqueeze(1) + rows[item_tile]  # [W, TILE] positions
    seen = inside.unsqueeze(1).expand(-1, TILE, -1)
    if batch.causal:
        seen = seen & (keys.unsqueeze(1) <= queries.unsqueeze(2))
    if window is not None:
        seen = seen & (queries.unsqueeze(2) - keys.unsqueeze(1) < window)
    first_rows = torch.tensor([tile.first_row for tile in tiles], device=device)
    return _Part(
        slots=torch.where(inside, slots, 0).long(),
        mask=torch.where(seen, 0.0, _MASKED),
        rows=first_rows.unsqueeze(1) + rows,
        item_tile=item_tile,
        rounds=tuple(_rounds(tiles, device)),
    )


def _rounds(tiles: list[_Tile], device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """For k = 0, 1, …: the tiles with a k-th item, and that item."""
    starts, total = [], 0
    for tile in tiles:
        starts.append(total)
        total += len(tile.blocks)
    for k in range(max(len(tile.blocks) for tile in tiles)):
        having = [index for index, tile in enumerate(tiles) if len(tile.blocks) > k]
        yield (
            torch.tensor(having, device=device),
            torch.tensor([starts[index] + k for index in having], device=device),
        )


def _valid_rows(batch: ForwardBatch) -> torch.Tensor:
    valid: list[int] = []
    offset = 0
    for queries in batch.query_lens:
        valid += range(offset, offset + queries)
        offset += -(-queries // TILE) * TILE
    return torch.tensor(valid, dtype=torch.int64, device=batch.slot_table.device)
