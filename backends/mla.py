"""Latent attention (MLA, DeepSeek-AI, 2024) with keys and values decompressed of the cache (MHA), in plain torch.

Entries are decompressed block by block at fixed absolute positions, those of the prefix and the pass's own alike, and
the partial results are merged in order of position. So a prompt's rows have the same bits whole and in chunks. MQA, the
absorbed form, needs nothing of its own: it is attention over one wide head of keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from backends.base import LatentAttentionLayer
from backends.forward import ForwardBatch
from backends.softmax import MASKED, RunningSoftmax, partial_attention

TILE = 32  # query rows of MHA
BLOCK = 256  # positions that are decompressed at once


@dataclass(frozen=True, slots=True)
class _Round:
    """One block of positions of every sequence that reaches it.

    keys: [BLOCK] the positions. slots: [S, BLOCK] where they are; behind a sequence's end, its last one again.
    tiles: [N] those that see some of the block. sequences: [N] which of the S each of them belongs to.
    """

    keys: torch.Tensor
    slots: torch.Tensor
    tiles: torch.Tensor
    sequences: torch.Tensor


@dataclass(frozen=True, slots=True)
class MHAPlan:
    """A pass in tiles of query rows, and the blocks that these see, in order of position.

    rows: [N, TILE] of the batch; what stands behind a tile's last row is filled up with it. last_seen: [N, TILE] the
    last position that each of them sees. valid: [T] those of all tiles' rows that are the batch's, in order.
    """

    rows: torch.Tensor
    last_seen: torch.Tensor
    valid: torch.Tensor
    rounds: tuple[_Round, ...]


def plan_mha(batch: ForwardBatch) -> MHAPlan:
    """Worked out once a pass, for all of its layers."""
    device = batch.slot_table.device
    tiles: list[tuple[int, int, int, int]] = []  # sequence, first row, rows, last position that is seen
    row = 0
    for sequence, (queries, context) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
        for start in range(0, queries, TILE):
            count = min(TILE, queries - start)
            last = context - queries + start + count if batch.causal else context
            tiles.append((sequence, row + start, count, last - 1))
        row += queries
    sequences, firsts, counts, lasts = torch.tensor(tiles, device=device).view(-1, 4).unbind(1)
    within = torch.arange(TILE, device=device).minimum(counts.unsqueeze(1) - 1)
    rows = firsts.unsqueeze(1) + within
    contexts = torch.tensor(batch.context_lens, device=device)
    table_rows = torch.tensor(batch.table_rows, device=device)
    rounds = []
    for start in range(0, max((last for *_, last in tiles), default=-1) + 1, BLOCK):
        keys = torch.arange(start, start + BLOCK, device=device)
        seeing = (lasts >= start).nonzero().squeeze(1)
        reached, index = sequences[seeing].unique(return_inverse=True)
        positions = keys.minimum(contexts[reached].unsqueeze(1) - 1)
        slots = batch.slot_table[table_rows[reached].unsqueeze(1), positions].long()
        rounds.append(_Round(keys, slots, seeing, index))
    return MHAPlan(
        rows=rows,
        last_seen=batch.positions[rows] if batch.causal else contexts[sequences].unsqueeze(1) - 1,
        valid=(torch.arange(TILE, device=device) < counts.unsqueeze(1)).flatten().nonzero().squeeze(1),
        rounds=tuple(rounds),
    )


def attend_mha(
    query: torch.Tensor, layer: LatentAttentionLayer, batch: ForwardBatch, plan: MHAPlan
) -> torch.Tensor:
    """query [T, num_heads, k_dim] over the entries in the pool, the pass's own among them: [T, num_heads, v_dim].

    What is held besides the result is one decompressed block of every sequence.
    """
    tiles = query.index_select(0, plan.rows.flatten()).float().unflatten(0, plan.rows.shape).transpose(1, 2)
    running: RunningSoftmax | None = None
    for part in plan.rounds:
        entries, _ = batch.kv_pool.gather(layer.layer_id, part.slots)
        blocks = [layer.decompress(block) for block in entries.squeeze(2)]
        keys, values = (torch.stack(of_all).float().transpose(1, 2) for of_all in zip(*blocks, strict=True))
        seen = part.keys <= plan.last_seen[part.tiles].unsqueeze(-1)
        mask = torch.where(seen, 0.0, MASKED).unsqueeze(1)
        out, lse = partial_attention(
            tiles[part.tiles], keys[part.sequences], values[part.sequences], mask, layer.scale
        )
        if running is None:  # every tile sees the first block
            running = RunningSoftmax.of(out, lse)
        else:
            running.add(part.tiles, out, lse)
    assert running is not None
    return running.result().transpose(1, 2).flatten(0, 1).index_select(0, plan.valid).to(query.dtype)
