"""The target's hidden states over training data: computed by its own runner, as at serving time, and cached."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.request import Request, SamplingParams
from engine.runner import ModelRunner
from engine.worker import SequenceStep
from speculative.training.data import Example

_TOKENS_A_PASS = 4096


class TargetStates:
    """States of `layer_ids`, concatenated. The file maps into memory: the system keeps in it what there is room for.

    What is beyond `cache_bytes` is computed each time anew. A killed run loses nothing that was computed.
    """

    def __init__(
        self,
        runner: ModelRunner,
        layer_ids: Sequence[int],
        examples: Sequence[Example],
        cache: Path,
        cache_bytes: int,
    ) -> None:
        """`cache` is the beginning of the names of two files. What is in them must be of the same target."""
        assert runner.model is not None and runner.kv_pool is not None and runner.slot_table is not None
        self.passes = 0  # of the target, so far
        self._runner, self._layer_ids, self._examples = runner, tuple(layer_ids), examples
        self.width = len(layer_ids) * runner.model.config.hidden_size
        ends = np.cumsum([len(example.ids) for example in examples])
        self._starts = ends - [len(example.ids) for example in examples]
        self._cached = int(np.searchsorted(ends, cache_bytes // (2 * self.width), side="right"))
        rows = int(ends[self._cached - 1]) if self._cached else 0
        name = f"{cache.name}-{'-'.join(map(str, layer_ids))}"
        states = _mapped(cache.with_name(f"{name}.bf16"), rows * self.width, torch.bfloat16)
        self._states = states[: rows * self.width].view(rows, self.width)
        # An example's mark stands here once its states are in the file. Those of other texts, or of other places, are
        # cleared at once: their states may be written over, and the texts come back.
        marks = _mapped(cache.with_name(f"{name}.filled"), self._cached, torch.int64)
        wanted = torch.tensor([self._mark(member) for member in range(self._cached)], dtype=torch.int64)
        self._filled = marks[: self._cached]
        self._filled[self._filled != wanted] = 0
        marks[self._cached :] = 0
        self._requests = [
            Request(f"states-{row}", [], SamplingParams(), sink=lambda event: None)
            for row in range(runner.slot_table.tensor.shape[0])
        ]

    def padded(self, members: Sequence[int]) -> Tensor:
        """[G, L, width] bfloat16, L the longest of the examples `members`; zeros behind the shorter ones."""
        self._fill([member for member in members if not self._has(member)])
        fresh = self._compute([member for member in members if member >= self._cached])
        length = max(len(self._examples[member].ids) for member in members)
        padded = torch.zeros(len(members), length, self.width, dtype=torch.bfloat16)
        for row, member in zip(padded, members, strict=True):
            states = fresh[member] if member in fresh else self._states[self._rows(member)]
            row[: len(states)] = states
        return padded

    def _has(self, member: int) -> bool:
        return member >= self._cached or int(self._filled[member]) != 0

    def _mark(self, member: int) -> int:
        """Of an example at its place in the file; never 0."""
        return self._examples[member].checksum << 24 ^ int(self._starts[member]) << 1 | 1

    def _rows(self, member: int) -> slice:
        start = int(self._starts[member])
        return slice(start, start + len(self._examples[member].ids))

    def _fill(self, members: Sequence[int]) -> None:
        for member, states in self._compute(members).items():
            self._states[self._rows(member)] = states
            self._filled[member] = self._mark(member)

    def _compute(self, members: Sequence[int]) -> dict[int, Tensor]:
        """States by member, as many examples in a pass as the runner has rows and slots for."""
        assert self._runner.kv_pool is not None
        slots = self._runner.kv_pool.num_slots
        found: dict[int, Tensor] = {}
        waiting = list(members)
        while waiting:
            batch: list[int] = []
            used = 0
            while waiting and len(batch) < len(self._requests):
                length = len(self._examples[waiting[0]].ids)
                if batch and used + length > min(slots, _TOKENS_A_PASS):
                    break
                batch.append(waiting.pop(0))
                used += length
            states = self._pass(batch)
            lengths = [len(self._examples[member].ids) for member in batch]
            found |= dict(zip(batch, states.split(lengths), strict=True))
        return found

    def _pass(self, members: Sequence[int]) -> Tensor:
        table = self._runner.slot_table
        assert table is not None
        steps, used = [], 0
        for row, (member, request) in enumerate(zip(members, self._requests, strict=False)):
            request.prompt_ids = self._examples[member].ids.tolist()
            request.slots = list(range(used, used + len(request.prompt_ids)))
            request.table_row = row
            table.write(row, 0, request.slots)
            used += len(request.prompt_ids)
            steps.append(SequenceStep(request, len(request.prompt_ids), samples=False))
        self.passes += 1
        captured = self._runner.forward(self._runner.batch(steps, self._layer_ids)).captured
        return torch.cat([captured[layer].to(torch.bfloat16) for layer in self._layer_ids], dim=1).cpu()


def _mapped(path: Path, size: int, dtype: torch.dtype) -> Tensor:
    """A tensor over the whole file, which is made or enlarged as needed; what it holds already stays."""
    path.touch()
    if path.stat().st_size < size * dtype.itemsize:
        os.truncate(path, size * dtype.itemsize)  # torch would do it too, but writes a 0 at the beginning
    held = path.stat().st_size // dtype.itemsize
    return torch.from_file(str(path), shared=True, size=held, dtype=dtype)
