"""Latent attention (MLA, DeepSeek-AI, 2024) with keys and values decompressed of the cache (MHA), in plain torch.

Entries are decompressed block by block at fixed absolute positions, those of the prefix and the pass's own alike, and
the partial results are merged in order of position. So a prompt's rows have the same bits whole and in chunks. MQA, the
absorbed form, needs nothing of its own: it is attention over one wide head of keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from backends.base import LatentAttentionLayer
from backends.forward import ForwardBatch
from backends.softmax import MASKED, RunningSoftmax, partial_attention

TILE = 32  # query rows of MHA
BLOCK = 256  # positions that are decompressed at once


@dataclass(frozen=True, slots=True)
class _Block:
    """Positions that are decompressed together: `positions` [BLOCK], and the `slots` [BLOCK] that they are in, behind
    the end of the context its last one again. tiles: [n] which of the prompt's tiles see some of it."""

    positions: torch.Tensor
    slots: torch.Tensor
    tiles: torch.Tensor


@dataclass(frozen=True, slots=True)
class Prompt:
    """The query rows of one sequence, in tiles, and the blocks that they see, in order of position.

    rows: [N, TILE] of the batch; what stands behind the last one, the `count`-th, is filled up with it. last_seen:
    [N, TILE] the last position that each of them sees.
    """

    count: int
    rows: torch.Tensor
    last_seen: torch.Tensor
    blocks: tuple[_Block, ...]


def plan_mha(batch: ForwardBatch) -> list[Prompt]:
    """Worked out once a pass, for all of its layers."""
    prompts, first = [], 0
    for count, context, table_row in zip(batch.query_lens, batch.context_lens, batch.table_rows, strict=True):
        prompts.append(_prompt(batch, first, count, context, table_row))
        first += count
    return prompts


def _prompt(batch: ForwardBatch, first: int, count: int, context: int, table_row: int) -> Prompt:
    device = batch.slot_table.device
    within = torch.arange(-(-count // TILE) * TILE, device=device).clamp_(max=count - 1).view(-1, TILE)
    last_seen = within + (context - count) if batch.causal else torch.full_like(within, context - 1)
    blocks = []
    for start in range(0, context, BLOCK):
        positions = torch.arange(start, start + BLOCK, device=device)
        slots = batch.slot_table[table_row, positions.clamp(max=context - 1)].long()
        blocks.append(_Block(positions, slots, (last_seen[:, -1] >= start).nonzero().squeeze(1)))
    return Prompt(count, within + first, last_seen, tuple(blocks))


def attend_mha(
    query: torch.Tensor, layer: LatentAttentionLayer, batch: ForwardBatch, prompts: Sequence[Prompt]
) -> torch.Tensor:
    """query [T, num_heads, k_dim] over the entries in the pool, the pass's own among them: [T, num_heads, v_dim].

    What is held besides the result is one decompressed block.
    """
    return torch.cat([_attend(query, layer, batch, prompt) for prompt in prompts]).to(query.dtype)


def _attend(
    query: torch.Tensor, layer: LatentAttentionLayer, batch: ForwardBatch, prompt: Prompt
) -> torch.Tensor:
    """[count, num_heads, v_dim] float32."""
    tiles = query.index_select(0, prompt.rows.flatten()).float()
    tiles = tiles.unflatten(0, prompt.rows.shape).transpose(1, 2)
    running: RunningSoftmax | None = None
    for block in prompt.blocks:
        entries, _ = batch.kv_pool.gather(layer.layer_id, block.slots)
        key, value = (of_heads.float().transpose(0, 1) for of_heads in layer.decompress(entries.squeeze(1)))
        seen = block.positions <= prompt.last_seen[block.tiles].unsqueeze(-1)
        mask = torch.where(seen, 0.0, MASKED).unsqueeze(1)
        out, lse = partial_attention(tiles[block.tiles], key[None], value[None], mask, layer.scale)
        if running is None:  # every tile sees the first block
            running = RunningSoftmax.of(out, lse)
        else:
            running.add(block.tiles, out, lse)
    assert running is not None
    return running.result().transpose(1, 2).flatten(0, 1)[: prompt.count]
