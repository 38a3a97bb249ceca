"""The prefix cache: a radix tree from token ids to the KV slots that hold them, shared by all requests.

The tree owns the slots in it. Everything is in whole pages, and what is left of a page belongs to the request.
Requests lock the path they use; what is not locked is evicted from the leaves upwards, least recently used first.
Only committed tokens may be inserted; that is the caller's duty. For a model with recurrent state, nodes also hold
checkpoints of it.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.allocator import SlotAllocator
from engine.checkpoints import Checkpoint, Checkpoints


class Node:
    """An edge of the tree: some pages of tokens, their slots, and what may follow, keyed by its first page.

    `start` tokens come before it. `checkpoints`: rows of state, by position: start < position <= start + its length.
    """

    __slots__ = (
        "checkpoints",
        "children",
        "last_used",
        "locks",
        "parent",
        "queued",
        "slots",
        "start",
        "token_ids",
    )

    def __init__(self, token_ids: list[int], slots: list[int], parent: Node | None, last_used: int) -> None:
        self.token_ids = token_ids
        self.slots = slots
        self.parent = parent
        self.start: int = 0 if parent is None else parent.start + len(parent.token_ids)
        self.checkpoints: dict[int, int] = {}
        self.children: dict[tuple[int, ...], Node] = {}
        self.locks = 0  # locks held on this node and on nodes below it
        self.last_used = last_used
        self.queued = False  # has its entry in the eviction heap


@dataclass(frozen=True, slots=True)
class Match:
    """A cached prefix: its slots, whole pages, and the node it ends at. Good until the next eviction unless locked."""

    slots: list[int]
    node: Node


class RadixCache:
    """Prefix cache over the slots of `allocator`. Disabled, it matches nothing and takes nothing.

    Recency is a counter, so that behaviour depends on the order of calls alone.
    """

    def __init__(
        self, allocator: SlotAllocator, enabled: bool = True, checkpoints: Checkpoints | None = None
    ) -> None:
        """`checkpoints` are for a model with recurrent state; None: it has none."""
        self.checkpoints = checkpoints
        self._enabled = enabled
        self._allocator = allocator
        self._page_size = allocator.page_size
        self._root = Node([], [], None, 0)
        self._clock = 0
        # (last_used when queued, id, node): every unlocked leaf has exactly one entry. Entries may lag behind their
        # node, which is sorted out when they come up.
        self._lru: list[tuple[int, int, Node]] = []
        self._evictable = 0
        self._protected = 0

    @property
    def evictable(self) -> int:
        """Slots in the tree that no lock holds."""
        return self._evictable

    @property
    def protected(self) -> int:
        """Slots in the tree that locks hold."""
        return self._protected

    def match(self, token_ids: Sequence[int]) -> Match:
        """The longest cached prefix of `token_ids` in whole pages; marks it as used."""
        slots: list[int] = []
        node = self._root
        if not self._enabled:
            return Match(slots, node)
        self._clock += 1
        end = self._whole_pages(len(token_ids))
        while len(slots) < end:
            start = len(slots)
            child = node.children.get(self._first_page(token_ids, start))
            if child is None:
                break
            stop = min(end, start + len(child.token_ids))
            shared = self.common_prefix(child.token_ids, list(token_ids[start:stop]))
            node = child if shared == len(child.token_ids) else self._split(child, shared)
            node.last_used = self._clock
            slots += node.slots
        return Match(slots, node)

    def common_prefix(self, a: list[int], b: list[int]) -> int:
        """How many leading tokens of both could be shared: whole pages, and none if the cache is disabled."""
        return self._whole_pages(_shared_length(a, b)) if self._enabled else 0

    def resume(self, match: Match, limit: int) -> Checkpoint | None:
        """From where a sequence can go on whose first `limit` tokens are in `match`; None: from its beginning.

        For a model with recurrent state only, which needs more than slots.
        """
        assert self.checkpoints is not None
        return self.checkpoints.nearest(match.node, limit)

    def insert(
        self, token_ids: Sequence[int], slots: Sequence[int], checkpoints: Mapping[int, int] | None = None
    ) -> Match:
        """Share the whole pages of `token_ids`, whose KV is in `slots` (as many); marks them as used.

        The tree becomes the owner of those pages. Where it has a prefix of them already in other slots, it keeps its
        own and frees the given ones, so the caller continues with the slots returned, one for each token in whole
        pages. The rest of `slots`, less than a page (or everything, if the cache is disabled), remains the caller's.

        `checkpoints` are rows by position; those within the pages go to the tree in the same way.
        """
        if len(slots) != len(token_ids):
            raise RuntimeError(f"{len(token_ids)} tokens cannot be in {len(slots)} slots")
        found = self.match(token_ids)
        if not self._enabled:
            return found
        known, end = len(found.slots), self._whole_pages(len(token_ids))
        self._free_duplicates(slots, found.slots)
        if known < end:
            leaf = Node(list(token_ids[known:end]), list(slots[known:end]), found.node, self._clock)
            found.node.children[self._first_page(token_ids, known)] = leaf
            self._evictable += end - known
            self._queue(leaf)
            found = Match(found.slots + leaf.slots, leaf)
        if checkpoints:
            self._hold(found.node, {at: row for at, row in checkpoints.items() if at <= end})
        return found

    def lock(self, node: Node) -> None:
        """Protect `node` and its path to the root from eviction. Locks count."""
        current = node
        while current.parent is not None:
            if current.locks == 0:
                self._evictable -= len(current.slots)
                self._protected += len(current.slots)
            current.locks += 1
            current = current.parent

    def unlock(self, node: Node) -> None:
        """Take back one `lock`. Raises RuntimeError if there is none."""
        current = node
        while current.parent is not None:
            if current.locks == 0:
                raise RuntimeError("unlock of a node that is not locked")
            current.locks -= 1
            if current.locks == 0:
                self._protected -= len(current.slots)
                self._evictable += len(current.slots)
                self._queue(current)
            current = current.parent

    def held_by_others(self, node: Node) -> int:
        """How many of the tokens up to `node`, which its caller has locked, somebody else has locked, too."""
        count = 0
        while node.parent is not None:
            count += len(node.slots) if node.locks > 1 else 0
            node = node.parent
        return count

    def evict(self, num_slots: int) -> int:
        """Free at least `num_slots` slots, or all that are evictable; returns how many, rounded up to whole pages.

        The least recently used leaf goes first, from its end, so that a long prefix is not lost for a few slots.
        """
        wanted = min(-(-num_slots // self._page_size) * self._page_size, self._evictable)
        freed = 0
        while freed < wanted:
            queued_at, _, node = heapq.heappop(self._lru)
            node.queued = False
            if node.last_used == queued_at and not node.locks and not node.children:
                freed += self._trim(node, wanted - freed)
            self._queue(node)
        return freed

    def reset(self) -> None:
        """Forget everything that is not locked."""
        self.evict(self._evictable)

    def _trim(self, leaf: Node, num_slots: int) -> int:
        """Free up to `num_slots` slots at the end of an unlocked leaf, which goes when it is empty."""
        keep = max(0, len(leaf.slots) - num_slots)
        freed = leaf.slots[keep:]
        self._allocator.free(freed)
        self._evictable -= len(freed)
        if self.checkpoints is not None:
            self.checkpoints.drop(leaf, leaf.start + keep)
        if keep == 0:
            assert leaf.parent is not None
            del leaf.parent.children[self._first_page(leaf.token_ids, 0)]
            self._queue(leaf.parent)
        del leaf.slots[keep:], leaf.token_ids[keep:]
        return len(freed)

    def _queue(self, node: Node) -> None:
        """Make `node` a candidate for eviction, if it is an unlocked leaf."""
        if node.slots and not node.locks and not node.children and not node.queued:
            node.queued = True
            heapq.heappush(self._lru, (node.last_used, id(node), node))

    def _split(self, node: Node, length: int) -> Node:
        """Cut `node` after `length` tokens; returns the new upper part. `node` stays the lower one, as locks and
        holders of a Match name the end of their prefix."""
        assert node.parent is not None
        upper = Node(node.token_ids[:length], node.slots[:length], node.parent, node.last_used)
        upper.locks = node.locks
        node.parent.children[self._first_page(upper.token_ids, 0)] = upper
        del node.token_ids[:length], node.slots[:length]
        node.parent = upper
        node.start += length
        upper.children[self._first_page(node.token_ids, 0)] = node
        if self.checkpoints is not None:
            self.checkpoints.split(upper, node)
        return upper

    def _hold(self, end: Node, checkpoints: Mapping[int, int]) -> None:
        """Give `checkpoints` to the nodes on the path to `end` that cover them, the first ones first."""
        assert self.checkpoints is not None
        path = [end]
        while path[-1].start:
            assert path[-1].parent is not None
            path.append(path[-1].parent)
        for position, row in sorted(checkpoints.items()):
            while path[-1].start + len(path[-1].token_ids) < position:
                path.pop()
            self.checkpoints.hold(path[-1], position, row)

    def _free_duplicates(self, given: Sequence[int], kept: list[int]) -> None:
        """Free the pages of `given` for which the tree keeps other ones."""
        if list(given[: len(kept)]) == kept:
            return
        for start in range(0, len(kept), self._page_size):
            if given[start] != kept[start]:
                self._allocator.free(given[start : start + self._page_size])

    def _first_page(self, token_ids: Sequence[int], start: int) -> tuple[int, ...]:
        return tuple(token_ids[start : start + self._page_size])

    def _whole_pages(self, length: int) -> int:
        return length // self._page_size * self._page_size


def _shared_length(a: list[int], b: list[int]) -> int:
    """How many leading items agree. By halving, as comparing slices is fast; linear in all."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
