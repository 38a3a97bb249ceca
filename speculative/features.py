"""What drafters share that read the target's hidden states: which of them are still to be read, and whose they are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import NamedTuple

import torch

from engine.request import Request
from engine.runner import ModelRunner
from engine.worker import SequenceStep
from speculative.drafter import Drafter

# Rows of the target's outputs that are kept until they are needed. One context pass over many costs little more than
# one over a few, and while nothing is drafted nobody waits for it.
MAX_KEPT = 256


@dataclass(slots=True)
class _Captured:
    """Outputs of one pass of the target, and which of its rows hold tokens that stay."""

    states: Mapping[int, torch.Tensor]
    rows: list[int] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return len(next(iter(self.states.values())))


class Span(NamedTuple):
    """Tokens of a request, at positions [start, end)."""

    request: Request
    start: int
    end: int


class FeatureDrafter(Drafter):
    """Keeps the drafter's context up to date, batched over requests and steps.

    A request's row of the slot table lists the slots of its tokens that the drafter has filled, one after another,
    then its scratch slots. Where some tokens have no entry the others close up: their positions are in their keys,
    and a draft sees all of its context.
    """

    def __init__(
        self, runner: ModelRunner, num_draft_tokens: int, vocab_size: int, window_size: int | None = None
    ) -> None:
        """`window_size`: how many of the last tokens a draft sees; None: all."""
        super().__init__(runner, num_draft_tokens, vocab_size)
        self.counts: dict[Request, int] = {}  # context slots in the request's row of the table
        self._window = window_size
        self._offsets: dict[Request, int] = {}  # where the rows of the current pass begin
        self._captured: list[_Captured] = []
        self._pending: list[Span] = []  # in the order of the captured rows
        self._num_kept = 0  # rows of the passes that any are pending of

    @abstractmethod
    def fits(self, num_tokens: int) -> bool:
        """Whether anything can be drafted behind so many tokens."""

    @abstractmethod
    def num_known(self, slots: Sequence[int]) -> int:
        """Of `slots`, a cached prefix, how many the target need not compute again. Nothing is pending."""

    @abstractmethod
    def write(self, spans: Sequence[Span], captured: torch.Tensor) -> None:
        """Write the entries of `spans`, given what the target computed for them, and tell `wrote` of them.

        captured: [T, capture layers * hidden_size], the outputs of those layers side by side, span after span.
        """

    def usable_prefix(self, request: Request, slots: Sequence[int]) -> int:
        if not slots or not self.fits(len(slots)):
            return len(slots)
        self.flush()
        return self.num_known(slots)

    def target_wrote(self, steps: Sequence[SequenceStep], captured: Mapping[int, torch.Tensor]) -> None:
        super().target_wrote(steps, captured)
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
        if offset is None or not self.fits(end):
            return
        captured = self._captured[-1]
        if not captured.rows:
            self._num_kept += captured.num_rows
        captured.rows += range(offset, offset + num_tokens)
        self._pending.append(Span(request, end - num_tokens, end))
        if self._num_kept >= MAX_KEPT:
            self.flush()

    def moved(self, request: Request, old_slots: Sequence[int]) -> None:
        """What the drafter has of the request goes along, where the new slots lack it."""
        self.flush()
        pool = self.runner.kv_pool
        assert pool is not None
        new_slots = request.slots[: len(old_slots)]
        # A slot that stays is filled both before and after, or neither.
        filled = zip(self.filled(old_slots), self.filled(new_slots), strict=True)
        lacking = [before and not after for before, after in filled]
        old, new = list(compress(old_slots, lacking)), list(compress(new_slots, lacking))
        pool.copy(self.tensor(old), self.tensor(new))
        self.fill(new)
        self.counts.pop(request, None)

    @torch.inference_mode()
    def flush(self) -> None:
        """Write the context of all tokens that are pending."""
        if not self._pending:
            return
        spans, captured = self._pending, self._side_by_side()
        self._pending, self._num_kept = [], 0
        del self._captured[:-1]
        self._captured[-1].rows = []  # of that pass, more requests may commit tokens
        self.write(spans, captured)

    def forget(self, request: Request) -> None:
        if any(span.request is request for span in self._pending):
            self.flush()
        self.counts.pop(request, None)

    def catch_up(self, requests: Sequence[Request]) -> None:
        """All that is known is in the context, and in the rows of `requests`."""
        self.flush()
        for request in requests:
            if request not in self.counts:
                self.rebuild(request, request.cached_len)

    def wrote(self, spans: Sequence[Span]) -> None:
        """The entries of `spans` are in their slots."""
        written: dict[Request, list[int]] = {}
        for request, start, end in spans:
            if request not in self.counts:
                self.rebuild(request, start)
            written.setdefault(request, []).extend(request.slots[start:end])
        for request, own in written.items():
            self._append(request, own)
            self.fill(own)

    def rebuild(self, request: Request, end: int) -> None:
        """Write the request's row of the table anew, with what the drafter has of its first `end` tokens."""
        slots = request.slots[:end]
        self.counts[request] = 0
        self._append(request, list(compress(slots, self.filled(slots))))

    def _append(self, request: Request, slots: Sequence[int]) -> None:
        """Continue the context of the request's row with `slots`, and put its scratch slots behind it."""
        table = self.runner.slot_table
        assert table is not None
        row, count = request.table_row, self.counts[request]
        if self._window is not None and count + len(slots) > self._window:
            slots = slots[-self._window :]
            kept = self._window - len(slots)
            table.tensor[row, :kept] = table.tensor[row, count - kept : count].clone()
            count = kept
        self.counts[request] = count + len(slots)
        room = table.tensor.shape[1] - count
        table.write(row, count, [*slots, *self.scratch(request)][:room])

    def _side_by_side(self) -> torch.Tensor:
        """Captured outputs of the pending rows, in the order in which they were committed."""
        parts = []
        for captured in self._captured:
            if captured.rows:
                outputs = torch.cat([captured.states[layer] for layer in self.capture_layers], dim=-1)
                parts.append(outputs.index_select(0, self.tensor(captured.rows)))
        return torch.cat(parts) if len(parts) > 1 else parts[0]
