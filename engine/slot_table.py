"""Which KV slot holds which position, for every running request, where kernels can read it."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class SlotTable:
    """An int32 tensor [rows, max_context_len] on the runner's device; a running request owns one row."""

    def __init__(self, rows: int, max_context_len: int, device: torch.device) -> None:
        self.tensor = torch.zeros(rows, max_context_len, dtype=torch.int32, device=device)
        # The same memory where numpy can reach it: every row is written every few steps, and a torch call costs more
        # than what it writes.
        self._array = self.tensor.numpy() if device.type == "cpu" else None
        self._free = list(range(rows - 1, -1, -1))

    def acquire(self) -> int:
        """Take a row. There are as many as requests may run, so an empty list is an engine bug (IndexError)."""
        return self._free.pop()

    def release(self, row: int) -> None:
        self._free.append(row)

    def write(self, row: int, start: int, slots: Sequence[int]) -> None:
        """Positions [start, start + len(slots)) of `row` now live in `slots`.

        A page may reach past the end of the context; nothing is ever there.
        """
        slots = slots[: self.tensor.shape[1] - start]
        if not slots:
            return
        if self._array is not None:
            self._array[row, start : start + len(slots)] = slots
        else:
            self.tensor[row, start : start + len(slots)] = torch.tensor(slots, dtype=torch.int32)
