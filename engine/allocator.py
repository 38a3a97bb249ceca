"""Which KV slots are free. Slots are handed out and taken back in whole pages of consecutive slots."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


class SlotAllocator:
    """Free list of slots 0 .. num_slots - 1; page p is slots [p * page_size, (p + 1) * page_size).

    The lowest free pages go first, so that what is allocated together is mostly contiguous, and stays so after
    many requests have come and gone. O(log pages) a page.
    """

    def __init__(self, num_slots: int, page_size: int) -> None:
        if num_slots % page_size:
            raise ValueError(f"{num_slots} slots are not a whole number of pages of {page_size}")
        self.num_slots = num_slots
        self.page_size = page_size
        num_pages = num_slots // page_size
        self._free_pages = list(range(num_pages))  # a heap
        self._is_free = bytearray(b"\x01") * num_pages

    @property
    def num_free(self) -> int:
        """Free slots, a multiple of page_size."""
        return len(self._free_pages) * self.page_size

    def allocate(self, num_pages: int) -> list[int] | None:
        """Take pages, in ascending order; returns their num_pages * page_size slots, or None if there are too few."""
        if num_pages > len(self._free_pages):
            return None
        pages = [heapq.heappop(self._free_pages) for _ in range(num_pages)]
        for page in pages:
            self._is_free[page] = 0
        if self.page_size == 1:
            return pages
        return [slot for page in pages for slot in self._page(page)]

    def free(self, slots: Sequence[int]) -> None:
        """Take back whole pages, in any order. Raises RuntimeError, changing nothing, for part of a page, a slot
        that does not exist, or a page that is free already: each is a bug of the caller."""
        starts = slots[:: self.page_size]
        pages = [start // self.page_size for start in starts]
        if self.page_size > 1 and list(slots) != [slot for page in pages for slot in self._page(page)]:
            raise RuntimeError("only whole pages can be freed")
        if len(set(pages)) != len(pages):
            raise RuntimeError("a page was freed twice in one call")
        for page in pages:
            if not 0 <= page < len(self._is_free):
                raise RuntimeError(f"page {page} does not exist")
            if self._is_free[page]:
                raise RuntimeError(f"page {page} was free already")
        for page in pages:
            self._is_free[page] = 1
            heapq.heappush(self._free_pages, page)

    def _page(self, page: int) -> range:
        return range(page * self.page_size, (page + 1) * self.page_size)
