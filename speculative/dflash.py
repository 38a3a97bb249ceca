"""Drafting with DFlash: what the target computed for known tokens becomes the drafter's context, then one pass
drafts a block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from backends.forward import ForwardBatch, ForwardMode
from engine.request import Request
from engine.runner import ModelRunner
from engine.worker import SequenceStep
from models.dflash import DFlashDrafter
from speculative.drafter import Drafter
from speculative.proposal import DraftVocabulary, MakeSamplingRow, Proposal, choose

# Rows of the target's outputs that are kept until they are needed. One context pass over many costs little more than
# one over a few, and while nothing is drafted nobody waits for it.
MAX_PENDING = 256


@dataclass(slots=True)
class _Captured:
    """Outputs of one pass of the target, and which of its rows hold tokens that stay."""

    states: Mapping[int, torch.Tensor]
    rows: list[int] = field(default_factory=list)


class DFlash(Drafter):
    """Keeps the drafter's context up to date, batched over requests and steps, and drafts blocks.

    A request's row of the slot table lists the slots of its tokens that the drafter has filled, one after another,
    then scratch slots for the block. Where some tokens have no entry the others close up: their positions are in
    their keys, and a block sees all of its context.
    """

    name = "dflash"

    def __init__(
        self, runner: ModelRunner, num_draft_tokens: int, vocab_size: int, window_size: int | None = None
    ) -> None:
        """`window_size`: how many of the last tokens a block sees; None: all."""
        super().__init__(runner, num_draft_tokens, vocab_size)
        self._window = window_size
        self._offsets: dict[Request, int] = {}  # where the rows of the current pass begin
        self._captured: list[_Captured] = []
        # Whose tokens they are, and at which positions [start, end): in the order of the captured rows.
        self._pending: list[tuple[Request, int, int]] = []
        self._num_pending = 0
        self._counts: dict[Request, int] = {}  # context slots in the request's row of the table
        self._first_scratch = self._limit = 0

    def prepare(self) -> None:
        super().prepare()
        model, pool, table = self._model, self.runner.kv_pool, self.runner.slot_table
        assert pool is not None and table is not None
        self.capture_layers = model.target_layer_ids
        self.num_draft_tokens = min(self.num_draft_tokens, model.block_size)
        if model.draft_token_ids is not None:
            self.vocabulary = DraftVocabulary(self.vocabulary.size, model.draft_token_ids.cpu().numpy())
        rows, width = table.tensor.shape
        self._first_scratch = pool.num_slots - rows * model.block_size
        self._limit = min(model.context_length, width)

    @property
    def promised_accept_length(self) -> float | None:
        dflash = self.runner.files.dflash
        return None if dflash is None else dflash.accept_length

    @property
    def _model(self) -> DFlashDrafter:
        model = self.runner.model
        assert isinstance(model, DFlashDrafter)
        return model

    def room(self, request: Request) -> int:
        return self.num_draft_tokens - 1 if self._fits(request.num_tokens) else 0

    def usable_prefix(self, request: Request, slots: Sequence[int]) -> int:
        if not slots or not self._fits(len(slots)):
            return len(slots)
        self.flush()
        first = 0 if self._window is None else max(0, len(slots) - self._window)
        missing = (~self.valid[self.tensor(slots[first:])]).nonzero()
        return first + int(missing[0]) if len(missing) else len(slots)

    def target_wrote(
        self, steps: Sequence[SequenceStep], slots: torch.Tensor, captured: Mapping[int, torch.Tensor]
    ) -> None:
        super().target_wrote(steps, slots, captured)
        self._offsets.clear()
        if self._captured and not self._captured[-1].rows:
            self._captured.pop()
        if not captured:
            return
        self._captured.append(_Captured(captured))
        offset = 0
        for step in steps:
            self._offsets[step.request] = offset
            offset += step.num_tokens + len(step.drafts)

    def committed(self, request: Request, num_tokens: int) -> None:
        offset, end = self._offsets.get(request), request.cached_len
        if offset is None or not self._fits(end):
            return
        self._captured[-1].rows += range(offset, offset + num_tokens)
        self._pending.append((request, end - num_tokens, end))
        self._num_pending += num_tokens
        if self._num_pending >= MAX_PENDING:
            self.flush()

    def moved(self, request: Request, old_slots: Sequence[int]) -> None:
        """What the drafter has of the request goes along, where the new slots lack it."""
        self.flush()
        pool = self.runner.kv_pool
        assert pool is not None
        old, new = self.tensor(old_slots), self.tensor(request.slots[: len(old_slots)])
        lacking = (old != new) & self.valid[old] & ~self.valid[new]
        pool.copy(old[lacking], new[lacking])
        self.valid.index_fill_(0, new[lacking], True)
        self._counts.pop(request, None)

    @torch.inference_mode()
    def flush(self) -> None:
        """Write the context of all tokens that are pending."""
        if not self._pending:
            return
        positions: list[int] = []
        slots: list[int] = []
        written: dict[Request, list[int]] = {}
        for request, start, end in self._pending:
            if request not in written:
                written[request] = []
                if request not in self._counts:
                    self._rebuild(request, start)
            own = request.slots[start:end]
            positions += range(start, end)
            slots += own
            written[request] += own
        pool = self.runner.kv_pool
        assert pool is not None
        out_slots = self.tensor(slots)
        self._model.write_context(self._features(), self.tensor(positions), out_slots, pool)
        self.valid.index_fill_(0, out_slots, True)
        for request, own in written.items():
            self._append(request, own)
        self._pending.clear()
        self._num_pending = 0
        del self._captured[:-1]
        self._captured[-1].rows = []  # of that pass, more requests may commit tokens

    @torch.inference_mode()
    def propose(
        self, requests: Sequence[Request], limits: Sequence[int], sampling_row: MakeSamplingRow
    ) -> list[Proposal]:
        self.flush()
        for request in requests:
            if request not in self._counts:
                self._rebuild(request, request.cached_len)
        drafted = self.num_draft_tokens - 1
        logits = self.runner.forward(self._block(requests)).logits.view(len(requests), drafted, -1)
        return [
            choose(rows[:limit], request, self.vocabulary, sampling_row)
            for rows, request, limit in zip(logits, requests, limits, strict=True)
        ]

    def forget(self, request: Request) -> None:
        if any(owner is request for owner, _, _ in self._pending):
            self.flush()
        self._counts.pop(request, None)

    def _fits(self, num_tokens: int) -> bool:
        """Whether a block behind so many tokens, the last of which begins it, is within all limits."""
        return num_tokens - 1 + self.num_draft_tokens <= self._limit

    def _features(self) -> torch.Tensor:
        """[pending rows, capture layers * hidden_size], in the order in which they were committed."""
        parts = []
        for captured in self._captured:
            if captured.rows:
                side_by_side = torch.cat([captured.states[layer] for layer in self.capture_layers], dim=-1)
                parts.append(side_by_side.index_select(0, self.tensor(captured.rows)))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _block(self, requests: Sequence[Request]) -> ForwardBatch:
        """The last token of each request, and masks at the positions behind it."""
        pool, table = self.runner.kv_pool, self.runner.slot_table
        assert pool is not None and table is not None
        count, size = len(requests), self.num_draft_tokens
        ids = np.full((count, size), self._model.mask_token_id)
        ids[:, 0] = [request.token_ids(request.num_tokens - 1, request.num_tokens)[0] for request in requests]
        offsets = np.arange(size)
        positions = np.array([request.num_tokens - 1 for request in requests])[:, None] + offsets
        scratch = np.array([self._scratch(request).start for request in requests])[:, None] + offsets
        wanted = np.arange(count * size).reshape(count, size)[:, 1:]
        return ForwardBatch(
            mode=ForwardMode.DRAFT_EXTEND,
            input_ids=self._device(ids),
            positions=self._device(positions),
            out_slots=self._device(scratch),
            query_lens=(size,) * count,
            context_lens=tuple(self._counts[request] + size for request in requests),
            slot_table=table.tensor,
            table_rows=tuple(request.table_row for request in requests),
            logits_rows=self._device(wanted),
            kv_pool=pool,
            causal=False,
        )

    def _device(self, values: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values).reshape(-1)).to(self.runner.device)

    def _scratch(self, request: Request) -> range:
        first = self._first_scratch + request.table_row * self._model.block_size
        return range(first, first + self.num_draft_tokens)

    def _rebuild(self, request: Request, end: int) -> None:
        """Write the request's row of the table anew, with what the drafter has of its first `end` tokens."""
        slots = self.tensor(request.slots[:end])
        self._counts[request] = 0
        self._append(request, slots[self.valid[slots]].tolist())

    def _append(self, request: Request, slots: Sequence[int]) -> None:
        """Continue the context of the request's row with `slots`, and put its scratch slots behind it."""
        table = self.runner.slot_table
        assert table is not None
        row, count = request.table_row, self._counts[request]
        if self._window is not None and count + len(slots) > self._window:
            slots = slots[-self._window :]
            kept = self._window - len(slots)
            table.tensor[row, :kept] = table.tensor[row, count - kept : count].clone()
            count = kept
        self._counts[request] = count + len(slots)
        room = table.tensor.shape[1] - count
        table.write(row, count, [*slots, *self._scratch(request)][:room])
