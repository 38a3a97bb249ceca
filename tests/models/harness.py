"""Runs a model the way the engine does: flat batches over a paged pool, here with slots in shuffled order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from backends.base import AttentionBackend
from backends.forward import ForwardBatch, ForwardMode, forward_context
from backends.kv_pool import KVPool
from backends.linear_attention import HybridLinearBackend
from backends.state_pool import StatePool
from backends.torch_native import TorchNativeBackend
from engine.graphs import capture
from models.base import CausalLM, HiddenStates


class Sequences:
    """Up to `rows` sequences in one pool, each named by its row. `extend` appends tokens to some of them.

    `captured` runs the passes through what the last start-up hook prepares, which must then be there.
    """

    def __init__(
        self,
        model: CausalLM,
        rows: int = 4,
        length: int = 160,
        backend: AttentionBackend | None = None,
        captured: bool = False,
        native: bool = True,
    ) -> None:
        """native: take native kernels where there are some."""
        self.model = model
        self.backend = backend or TorchNativeBackend(native)
        num_slots = rows * length + 5
        self.pool = KVPool(model.kv_layout(model.kv_dtype), num_slots, torch.device("cpu"))
        state_layout = model.state_layout()
        self.state_pool: StatePool | None = None
        if state_layout is not None:
            self.state_pool = StatePool(state_layout, rows, torch.device("cpu"), num_checkpoints=4)
            self.backend = HybridLinearBackend(self.backend, native)
        shuffled = torch.randperm(num_slots, generator=torch.Generator().manual_seed(0))[: rows * length]
        self.slot_table = shuffled.view(rows, length).int()
        self.lengths = [0] * rows
        self.last_counts: dict[int, int] = {}
        self.drafts: Mapping[int, int] = {}
        self.checkpoints: dict[int, dict[int, int]] = {}  # by row, where the state at a position is to go
        self.graph = capture(model, self.pool, self.backend) if captured else None
        assert not captured or self.graph is not None, "nothing was captured"

    def extend(
        self, tokens: Mapping[int, Sequence[int]], drafts: Mapping[int, int] | None = None
    ) -> dict[int, torch.Tensor]:
        """Append `tokens[row]` to each row, in one pass; float32 logits [len(tokens[row]), vocab_size] by row.

        The last `drafts[row]` of them are guesses, which `keep` says the fate of.
        """
        self.drafts = drafts or {}
        with torch.inference_mode():
            if self.graph is not None:
                logits, _ = self.graph.run(self._batch(tokens))
            else:
                logits = self.model.logits(self.forward(tokens).last)
        parts = logits.split([len(ids) for ids in tokens.values()])
        return dict(zip(tokens, parts, strict=True))

    def keep(self, counts: Mapping[int, int]) -> None:
        """After a pass with drafts: the first `counts[row]` of that pass's tokens stand, the others never were."""
        for row, count in counts.items():
            self.lengths[row] += count - self.last_counts[row]
        if self.state_pool is not None:
            commit = self.backend.mamba_commit()
            assert commit is not None
            with torch.inference_mode():
                commit(self.state_pool, counts)

    def forward(
        self, tokens: Mapping[int, Sequence[int]], capture_layers: tuple[int, ...] = ()
    ) -> HiddenStates:
        """The same pass, as hidden states of all its tokens, row after row."""
        batch = self._batch(tokens, capture_layers)
        with torch.inference_mode(), forward_context(batch, self.backend):
            return self.model(batch)

    def _batch(
        self, tokens: Mapping[int, Sequence[int]], capture_layers: tuple[int, ...] = ()
    ) -> ForwardBatch:
        positions, slots = [], []
        self.last_counts = {row: len(ids) for row, ids in tokens.items()}
        for row, ids in tokens.items():
            span = slice(self.lengths[row], self.lengths[row] + len(ids))
            positions.append(torch.arange(span.start, span.stop))
            slots.append(self.slot_table[row, span].long())
            self.lengths[row] = span.stop
        decoding = all(len(ids) == 1 for ids in tokens.values())
        flat = [token for ids in tokens.values() for token in ids]
        return ForwardBatch(
            mode=ForwardMode.DECODE if decoding else ForwardMode.EXTEND,
            input_ids=torch.tensor(flat),
            positions=torch.cat(positions),
            out_slots=torch.cat(slots),
            query_lens=tuple(len(ids) for ids in tokens.values()),
            context_lens=tuple(self.lengths[row] for row in tokens),
            slot_table=self.slot_table,
            table_rows=tuple(tokens),
            logits_rows=torch.arange(len(flat)),
            kv_pool=self.pool,
            capture_layers=capture_layers,
            num_draft_rows=tuple(self.drafts.get(row, 0) for row in tokens),
            state_pool=self.state_pool,
            state_checkpoints=tuple(self.checkpoints.get(row, {}) for row in tokens),
        )
