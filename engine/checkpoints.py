"""Checkpoints of recurrent state: rows of the state pool, each the state of a prefix that the radix tree has.

A pass writes them at multiples of a stride, for the request that it computes; the tree holds them once it holds the
tokens. There is a fixed number of them. The least recently used one, of those that no running request is above, gives
way to a new one; a prefix without is computed from the nearest one below it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from engine.radix_cache import Node


class Checkpoint(NamedTuple):
    """The state after `position` tokens is in `row` of the state pool."""

    position: int
    row: int


class Checkpoints:
    """Who has which of `rows`: nobody, a request that is to write it, or a node of the tree."""

    def __init__(self, interval: int, rows: range) -> None:
        self.interval = interval
        self.rows = rows
        self._free = list(reversed(rows))
        self._holders: dict[int, tuple[Node, int]] = {}  # by row, the least recently used first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        """How many nodes of the tree have."""
        return len(self._holders)

    def boundaries(self, start: int, end: int) -> range:
        """Positions of checkpoints behind `start`, up to and with `end`."""
        return range(start - start % self.interval + self.interval, end + 1, self.interval)

    def take(self) -> int | None:
        """A row to write, if need be of the checkpoint that was used the longest ago; None if all are protected."""
        if not self._free:
            self._free += self._least_recently_used()
        return self._free.pop() if self._free else None

    def free(self, rows: Iterable[int]) -> None:
        """Take back rows that no node holds."""
        self._free += rows

    def hold(self, node: Node, position: int, row: int) -> None:
        """`node`, which covers `position`, has the checkpoint from now on, or keeps the one that it has there."""
        if position in node.checkpoints:
            self._free.append(row)
            return
        node.checkpoints[position] = row
        self._holders[row] = node, position

    def drop(self, node: Node, end: int) -> None:
        """The tokens of `node` behind position `end` are evicted, and their checkpoints with them."""
        for position in [position for position in node.checkpoints if position > end]:
            row = node.checkpoints.pop(position)
            del self._holders[row]
            self._free.append(row)

    def split(self, upper: Node, lower: Node) -> None:
        """`upper` has the first of the tokens that `lower` had, up to `lower.start`: it gets their checkpoints."""
        for position in [position for position in lower.checkpoints if position <= lower.start]:
            row = upper.checkpoints[position] = lower.checkpoints.pop(position)
            self._holders[row] = upper, position

    def nearest(self, node: Node, limit: int) -> Checkpoint | None:
        """The last checkpoint on the path to `node` at or before position `limit`; marks it as used."""
        current: Node | None = node
        while current is not None:
            position = max((each for each in current.checkpoints if each <= limit), default=None)
            if position is not None:
                row = current.checkpoints[position]
                self._holders[row] = self._holders.pop(row)
                return Checkpoint(position, row)
            current = current.parent
        return None

    def _least_recently_used(self) -> list[int]:
        for row, (node, position) in self._holders.items():
            if not node.locks:
                del node.checkpoints[position], self._holders[row]
                return [row]
        return []
