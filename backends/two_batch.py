"""Two-batch overlap: attention in two halves of the batch, each by a backend of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate

from backends.base import AttentionBackend
from backends.forward import ForwardBatch
from backends.parts import Part, PartedBackend, Piece, cut


class TwoBatchBackend(PartedBackend):
    """Cuts a batch between two sequences, where the halves have the most equal work. One sequence is not cut."""

    name = "two_batch"

    def __init__(self, primary: AttentionBackend, first: AttentionBackend, second: AttentionBackend) -> None:
        """`primary` takes the passes that are not cut."""
        self.primary = primary
        self.halves = (first, second)

    @classmethod
    def make(cls, make: Callable[[], AttentionBackend]) -> TwoBatchBackend:
        return cls(make(), make(), make())

    def children(self) -> Iterator[AttentionBackend]:
        yield self.primary
        yield from self.halves

    def assign(self, batch: ForwardBatch) -> Iterator[tuple[AttentionBackend, Part]]:
        if len(batch.query_lens) < 2:
            yield self.primary, Part(batch)
            return
        pieces = [Piece(sequence, 0, queries) for sequence, queries in enumerate(batch.query_lens)]
        middle = _middle(batch)
        for backend, half in zip(self.halves, (pieces[:middle], pieces[middle:]), strict=True):
            yield backend, cut(batch, half)


def _middle(batch: ForwardBatch) -> int:
    """How many sequences the first half has: by pairs of a query and a key, at least one in each half."""
    work = [queries * context for queries, context in zip(batch.query_lens, batch.context_lens, strict=True)]
    before = list(accumulate(work))
    return min(range(1, len(work)), key=lambda middle: abs(2 * before[middle - 1] - before[-1]))
