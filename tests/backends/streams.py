"""Sequences whose queries, keys and values are all drawn beforehand, fed to a backend in any cut and company."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from backends.base import AttentionBackend
from backends.forward import ForwardBatch, ForwardMode, forward_context
from backends.kv_pool import KVLayout, KVPool

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Layer:
    """An attention layer as backends see it."""

    layer_id: int = 1
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 16
    v_head_dim: int = 16
    scale: float = 0.25
    sliding_window: int | None = None
    logit_softcap: float | None = None


def stored(entries: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[…, dim] as a pool of `dtype` rounds it, float64. int8 is by the largest number of each […]."""
    if dtype != torch.int8:
        return entries.to(dtype).double()
    scale = entries.float().abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return (entries.float() / scale).round().double() * scale.double()


class Streams:
    """`lengths[s]` tokens of each sequence, in a pool whose slots are in shuffled order and full of old values."""

    def __init__(
        self,
        layer: Layer,
        lengths: Sequence[int],
        dtype: torch.dtype = torch.float32,
        pool_dtype: torch.dtype | None = None,
        seed: int = 0,
        device: torch.device = CPU,
        latent: bool = False,
    ) -> None:
        """The tokens are those of `seed` and depend on nothing else; where they lie in the pool is drawn anew.

        latent: values are the first columns of keys, and the pool holds none.
        """
        self.layer = layer
        self.lengths = tuple(lengths)
        contents = torch.Generator().manual_seed(seed)

        def draw(heads: int, dim: int) -> list[torch.Tensor]:
            return [torch.randn(n, heads, dim, generator=contents).to(device, dtype) for n in self.lengths]

        self.query = draw(layer.num_heads, layer.head_dim)
        self.key = draw(layer.num_kv_heads, layer.head_dim)
        self.value = draw(layer.num_kv_heads, layer.v_head_dim)
        if latent:
            self.value = [key[..., : layer.v_head_dim] for key in self.key]
        layout = KVLayout(
            num_layers=layer.layer_id + 1,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            v_head_dim=0 if latent else layer.v_head_dim,
            dtype=pool_dtype or dtype,
        )
        width = max(self.lengths)
        self.pool = KVPool(layout, len(self.lengths) * width + 7, device)
        for tensor in (self.pool.key, self.pool.value):
            tensor.copy_(torch.randn(tensor.shape, device=device) * 100)
        slots = torch.randperm(self.pool.num_slots)[: len(self.lengths) * width]
        self.slot_table = slots.view(-1, width).int().to(device)
        self.done = [0] * len(self.lengths)

    def batch(
        self,
        counts: Mapping[int, int],
        mode: ForwardMode = ForwardMode.EXTEND,
        causal: bool = True,
        num_prompt_rows: tuple[int, ...] | None = None,
    ) -> ForwardBatch:
        """A pass over the next `counts[s]` tokens of each sequence s, in the order given."""
        spans = {s: slice(self.done[s], self.done[s] + count) for s, count in counts.items()}
        total, device = sum(counts.values()), self.slot_table.device
        return ForwardBatch(
            mode=mode,
            input_ids=torch.zeros(total, dtype=torch.int64, device=device),
            positions=torch.cat([torch.arange(span.start, span.stop) for span in spans.values()]).to(device),
            out_slots=torch.cat([self.slot_table[s, span].long() for s, span in spans.items()]),
            query_lens=tuple(counts.values()),
            context_lens=tuple(span.stop for span in spans.values()),
            slot_table=self.slot_table,
            table_rows=tuple(counts),
            logits_rows=torch.arange(total, device=device),
            kv_pool=self.pool,
            causal=causal,
            num_prompt_rows=num_prompt_rows,
        )

    def rows(self, tensors: Sequence[torch.Tensor], batch: ForwardBatch) -> torch.Tensor:
        """The rows of `query`, `key` or `value` that `batch` is about."""
        parts = zip(batch.table_rows, batch.query_lens, batch.context_lens, strict=True)
        return torch.cat([tensors[s][context - queries : context] for s, queries, context in parts])

    def attend(self, backend: AttentionBackend, batch: ForwardBatch) -> dict[int, torch.Tensor]:
        """The pass itself: [count, num_heads, v_head_dim] for each sequence. Its tokens are done then."""
        with forward_context(batch, backend) as context:
            out = backend.forward(
                self.rows(self.query, batch),
                self.rows(self.key, batch),
                self.rows(self.value, batch),
                self.layer,
                batch,
                context.plan,
            )
        for s, context_len in zip(batch.table_rows, batch.context_lens, strict=True):
            self.done[s] = context_len
        return dict(zip(batch.table_rows, out.split(batch.query_lens), strict=True))

    def cache(self, counts: Mapping[int, int]) -> None:
        """Have the next `counts[s]` tokens in the pool as if a pass had been over them."""
        for s, count in counts.items():
            span = slice(self.done[s], self.done[s] + count)
            slots = self.slot_table[s, span].long()
            self.pool.write(self.layer.layer_id, slots, self.key[s][span], self.value[s][span])
            self.done[s] = span.stop

    def feed(
        self, backend: AttentionBackend, counts: Mapping[int, int], causal: bool = True
    ) -> dict[int, torch.Tensor]:
        """`attend` over the next `counts[s]` tokens of each sequence."""
        decode = all(count == 1 for count in counts.values())
        return self.attend(
            backend, self.batch(counts, ForwardMode.DECODE if decode else ForwardMode.EXTEND, causal)
        )

    def expected(self, s: int, start: int, stop: int, causal: bool = True) -> torch.Tensor:
        """Rows [start, stop) of sequence s by the formula, dense, in float64, keys and values as the pool rounds them."""
        layer = self.layer
        layout = self.pool.layout
        group = layer.num_heads // layer.num_kv_heads
        query = self.query[s][start:stop].double()
        key = stored(self.key[s][:stop], layout.dtype)
        value = (
            key[..., : layer.v_head_dim] if layout.is_latent else stored(self.value[s][:stop], layout.dtype)
        )
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * layer.scale
        if layer.logit_softcap is not None:
            scores = layer.logit_softcap * torch.tanh(scores / layer.logit_softcap)
        distance = torch.arange(start, stop, device=query.device)[:, None] - torch.arange(
            stop, device=query.device
        )
        seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
        if layer.sliding_window is not None:
            seen &= distance < layer.sliding_window
        scores = scores.masked_fill(~seen, float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)
