"""A pass cut into parts that attend apart from each other, and the base of the backends that do so.

Only attention is cut: the rest of a layer sees all rows at once. A sequence's rows may go to two parts, if the first
of them go to the earlier one, whose keys and values are written when the later one runs.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from backends.base import AttentionBackend, AttentionLayer, LatentAttentionLayer, StateLayer
from backends.forward import ForwardBatch, ForwardMode, forward_context


class Piece(NamedTuple):
    """Query tokens [start, stop) of one sequence of a batch."""

    sequence: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Part:
    """Some of a batch's tokens as a batch of their own; `rows` [t] int64 says which. None: all, in order."""

    batch: ForwardBatch
    rows: torch.Tensor | None = None

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """This part's rows of a tensor [T, …] of the whole batch."""
        return tensor if self.rows is None else tensor[self.rows]


def cut(batch: ForwardBatch, pieces: Sequence[Piece]) -> Part:
    """The part of `batch` that `pieces` are, in their order. It has no rows of logits."""
    firsts = [0]
    for queries in batch.query_lens:
        firsts.append(firsts[-1] + queries)
    rows = torch.tensor(
        [row for s, start, stop in pieces for row in range(firsts[s] + start, firsts[s] + stop)],
        dtype=torch.int64,
        device=batch.input_ids.device,
    )
    prompt, drafts, lens = batch.num_prompt_rows, batch.num_draft_rows, batch.query_lens
    checkpoints, prefixes = batch.state_checkpoints, batch.prefix_lens
    part = dataclasses.replace(
        batch,
        input_ids=batch.input_ids[rows],
        positions=batch.positions[rows],
        out_slots=batch.out_slots[rows],
        query_lens=tuple(stop - start for _, start, stop in pieces),
        context_lens=tuple(batch.context_lens[s] - batch.query_lens[s] + stop for s, _, stop in pieces),
        table_rows=tuple(batch.table_rows[s] for s, _, _ in pieces),
        logits_rows=batch.logits_rows[:0],
        num_prompt_rows=prompt
        and tuple(min(max(prompt[s] - start, 0), stop - start) for s, start, stop in pieces),
        num_draft_rows=drafts
        and tuple(max(stop - max(start, lens[s] - drafts[s]), 0) for s, start, stop in pieces),
        prefix_lens=prefixes and tuple(prefixes[s] for s, _, _ in pieces),
        state_checkpoints=checkpoints and tuple(checkpoints[s] for s, _, _ in pieces),
    )
    return Part(part, rows)


def phases(batch: ForwardBatch) -> list[Part]:
    """The parts of a pass that are prefill, verify and decode, each with its own mode, so that what is computed
    for a row does not depend on who shares the pass. Rows recomputed after a preemption count as what they were."""
    if batch.num_prompt_rows is None:
        return [Part(batch)]
    pieces: dict[ForwardMode, list[Piece]] = {
        ForwardMode.EXTEND: [],
        ForwardMode.TARGET_VERIFY: [],
        ForwardMode.DECODE: [],
    }
    for sequence, (queries, prompt) in enumerate(zip(batch.query_lens, batch.num_prompt_rows, strict=True)):
        if prompt:
            pieces[ForwardMode.EXTEND].append(Piece(sequence, 0, prompt))
        if queries > prompt:
            mode = ForwardMode.DECODE if queries - prompt == 1 else ForwardMode.TARGET_VERIFY
            pieces[mode].append(Piece(sequence, prompt, queries))
    present = [(mode, found) for mode, found in pieces.items() if found]
    parts = [Part(batch)] if len(present) == 1 else [cut(batch, found) for _, found in present]
    return [
        dataclasses.replace(part, batch=dataclasses.replace(part.batch, mode=mode, num_prompt_rows=None))
        for part, (mode, _) in zip(parts, present, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Share:
    """What one child does in a pass."""

    backend: AttentionBackend
    part: Part
    plan: object


class PartedBackend(AttentionBackend):
    """A backend that hands each part of a pass to one of its children. Each sees itself in the forward context."""

    @abstractmethod
    def assign(self, batch: ForwardBatch) -> Iterable[tuple[AttentionBackend, Part]]:
        """The parts of `batch`, in the order in which they run, and who runs them. Every row is in one of them."""

    def plan(self, batch: ForwardBatch) -> tuple[_Share, ...]:
        return tuple(_Share(backend, part, backend.plan(part.batch)) for backend, part in self.assign(batch))

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        plan: object,
    ) -> torch.Tensor:
        def attend(share: _Share) -> torch.Tensor:
            part, take = share.part, share.part.take
            return share.backend.forward(take(query), take(key), take(value), layer, part.batch, share.plan)

        return _gather(plan, attend, len(query))

    def forward_mha(
        self,
        query: torch.Tensor,
        entry: torch.Tensor,
        layer: LatentAttentionLayer,
        batch: ForwardBatch,
        plan: object,
    ) -> torch.Tensor:
        def attend(share: _Share) -> torch.Tensor:
            part, take = share.part, share.part.take
            return share.backend.forward_mha(take(query), take(entry), layer, part.batch, share.plan)

        return _gather(plan, attend, len(query))

    def convolve(self, x: torch.Tensor, layer: StateLayer, batch: ForwardBatch, plan: object) -> torch.Tensor:
        def convolve(share: _Share) -> torch.Tensor:
            return share.backend.convolve(share.part.take(x), layer, share.part.batch, share.plan)

        return _gather(plan, convolve, len(x))

    def recur(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor | None,
        layer: StateLayer,
        batch: ForwardBatch,
        plan: object,
    ) -> torch.Tensor:
        def recur(share: _Share) -> torch.Tensor:
            take = share.part.take
            rows = take(query), take(key), take(value), take(log_decay), None if beta is None else take(beta)
            return share.backend.recur(*rows, layer, share.part.batch, share.plan)

        return _gather(plan, recur, len(query))


def _gather(plan: object, attend: Callable[[_Share], torch.Tensor], num_rows: int) -> torch.Tensor:
    """What every share gives for its rows, each in its own context, as [num_rows, …]."""
    assert isinstance(plan, tuple)
    out: torch.Tensor | None = None
    for share in plan:
        with forward_context(share.part.batch, share.backend, share.plan):
            attended = attend(share)
        if share.part.rows is None:
            return attended
        if out is None:
            out = attended.new_empty(num_rows, *attended.shape[1:])
        out[share.part.rows] = attended
    assert out is not None
    return out
