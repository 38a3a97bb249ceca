"""Which KV slot holds which position, for every running request, where kernels can read it."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class SlotTable:
    """An int32 tensor [rows, max_context_len] on the runner's device; a running request owns one row."""

    def __init__(self, rows: int, max_context_len: int, device: torch.device) -> None:
        self.tensor = torch.zeros(rows, max_context_len, dtype=torch.int32, device=device)
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
        if slots:
            self.tensor[row, start : start + len(slots)] = torch.tensor(slots, dtype=torch.int32)
