"""What a pass hands to FlashInfer: tables in pinned memory, and wrappers planned from them.

FlashInfer's `plan` starts copies to the device, from the tables that it is given and from pinned memory of its own
wrapper, and returns before they are done. Neither may be written until then, so passes take turns on lanes, each with
its own memory and wrappers, and a lane is not used again before an event says that its copies are done.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from backends.base import Workspace
from backends.forward import ForwardBatch

_RESTING = 2  # lanes that are free before one of them is used again: its copies had a whole pass to finish
_STAGED_NUMBERS = 1 << 14  # of int32 that a lane holds at first
WORKSPACE_BYTES = 128 << 20  # what FlashInfer recommends for partial results


class Event(Protocol):
    """A mark in the device's queue of work, as `torch.cuda.Event`."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Lane:
    """The host memory and the wrappers of one pass at a time."""

    def __init__(self, device: torch.device, new_event: Callable[[], Event]) -> None:
        self._device = device
        self._copied = new_event()
        self._wrappers: dict[Hashable, tuple[Any, int]] = {}
        self._memory = self._allocate(_STAGED_NUMBERS)
        self._used = 0

    def start(self) -> None:
        """Make ready for a pass, when the copies of the last one are done."""
        self._copied.synchronize()
        self._used = 0

    def stage(self, numbers: npt.NDArray[np.int32]) -> torch.Tensor:
        """`numbers`, integers, as [n] int32 in host memory that copies can run from meanwhile."""
        stop = self._used + len(numbers)
        if stop > len(self._memory):
            # What was staged in this pass stays where it is: its tensors keep that memory.
            self._memory, self._used, stop = self._allocate(2 * stop), 0, len(numbers)
        staged = self._memory[self._used : stop]
        staged.numpy()[:] = numbers
        self._used = stop
        return staged

    def planned(
        self,
        key: Hashable,
        workspace: Workspace,
        num_bytes: int,
        make: Callable[[torch.Tensor], Any],
        plan: Callable[[Any], None],
    ) -> Any:
        """The wrapper of this lane called `key`, after `plan(wrapper)`.

        make: gives a wrapper over float workspace, of which `plan` needs `num_bytes` at most.
        """
        wrapper, has_bytes = self._wrappers.get(key, (None, 0))
        if has_bytes < num_bytes:
            has_bytes = max(WORKSPACE_BYTES, 1 << (num_bytes - 1).bit_length())
            wrapper = make(workspace.take(has_bytes))
            self._wrappers[key] = wrapper, has_bytes
        try:
            plan(wrapper)
        finally:
            self._copied.record()
        return wrapper

    def _allocate(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.int32, pin_memory=self._device.type == "cuda")


class Lanes:
    """The lanes of a backend: as many as passes under way need, and those at rest."""

    def __init__(self, device: torch.device, new_event: Callable[[], Event]) -> None:
        self._make = lambda: Lane(device, new_event)
        self._free: deque[Lane] = deque()

    def take(self, plan: object) -> Lane:
        """A lane of its own for a pass, for as long as its `plan` lives."""
        lane = self._free.popleft() if len(self._free) >= _RESTING else self._make()
        lane.start()
        weakref.finalize(plan, self._free.append, lane)
        return lane


@dataclass(frozen=True, slots=True)
class PageTable:
    """R requests and where their keys are, in FlashInfer's form, with a page for each slot.

    A page of one slot is right for any slot table, also one whose slots stand in no order, as a drafter's may; the
    kernels gather single slots as fast as pages.

    qo_indptr: [R + 1] first query row of each request. kv_indptr: [R + 1] its first entry of `kv_indices`.
    kv_lens: [R] keys of each request. last_page_len: [R] ones. All four are int32 in host memory.
    kv_indices: [kv_indptr[-1]] int32 on the device, the slots.
    """

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_lens: torch.Tensor
    last_page_len: torch.Tensor
    kv_indices: torch.Tensor


def row_positions(query_lens: Sequence[int], context_lens: Sequence[int]) -> npt.NDArray[np.int32]:
    """[T] the place of each query row in its own context, from 0."""
    queries, contexts = np.asarray(query_lens), np.asarray(context_lens)
    ends = np.cumsum(queries)
    return np.arange(ends[-1]) + np.repeat(contexts - ends, queries)


def page_table(batch: ForwardBatch, lane: Lane, by_row: bool) -> PageTable:
    """The table of a pass with at least one token.

    by_row: make each query row a request of its own, with the keys up to itself. Else a sequence is one.
    """
    queries, contexts = np.asarray(batch.query_lens), np.asarray(batch.context_lens)
    rows = np.asarray(batch.table_rows)
    if by_row:
        rows = np.repeat(rows, queries)
        contexts = row_positions(batch.query_lens, batch.context_lens) + 1
        queries = np.ones_like(contexts)
    count, num_keys = len(contexts), int(contexts.sum())
    staged = lane.stage(
        np.concatenate(
            [[0], np.cumsum(queries), [0], np.cumsum(contexts), contexts, np.ones_like(contexts), rows]
        )
    )
    sizes = [count + 1, count + 1, count, count, count]
    qo_indptr, kv_indptr, kv_lens, last_page_len, _ = staged.split(sizes)
    _, starts, lens, _, table_rows = staged.to(batch.slot_table.device, non_blocking=True).split(sizes)
    kv_indices = _slots(batch.slot_table, table_rows, -starts[:-1], lens, num_keys)
    return PageTable(qo_indptr, kv_indptr, kv_lens, last_page_len, kv_indices)


def spans_of_context(
    batch: ForwardBatch, lane: Lane, start: int, counts: npt.NDArray[np.int32]
) -> torch.Tensor:
    """The slots of `counts[s]` positions from `start` on of each sequence s: [sum of counts] int32 on the device."""
    offsets = start - (np.cumsum(counts) - counts)
    staged = lane.stage(np.concatenate([batch.table_rows, offsets, counts]))
    table_rows, offsets_, lens = staged.to(batch.slot_table.device, non_blocking=True).chunk(3)
    return _slots(batch.slot_table, table_rows, offsets_, lens, int(counts.sum()))


def _slots(
    slot_table: torch.Tensor, rows: torch.Tensor, offsets: torch.Tensor, lens: torch.Tensor, total: int
) -> torch.Tensor:
    """[total]: of each of R spans one after another, `lens[r]` slots of `rows[r]` of the table. The n-th of all is at
    position n + `offsets[r]`."""
    span = torch.repeat_interleave(lens, output_size=total)
    position = torch.arange(total, dtype=torch.int32, device=slot_table.device) + offsets[span]
    return slot_table[rows[span], position]


def window_mask(batch: ForwardBatch, lane: Lane, window: int) -> torch.Tensor:
    """Which keys each query row sees in a pass that is not causal but has a window: [sum of query_len * context_len]
    bool on the device, row by row. It sees the last `window` keys up to itself, and all those after it."""
    queries, contexts = np.asarray(batch.query_lens), np.asarray(batch.context_lens)
    total = int((queries * contexts).sum())
    staged = lane.stage(
        np.concatenate([np.repeat(contexts, queries), row_positions(batch.query_lens, batch.context_lens)])
    )
    device = batch.slot_table.device
    lens, positions = staged.to(device, non_blocking=True).chunk(2)
    row = torch.repeat_interleave(lens, output_size=total)
    first = lens.cumsum(0) - lens
    key = torch.arange(total, device=device) - first[row]
    return positions[row] - key < window
