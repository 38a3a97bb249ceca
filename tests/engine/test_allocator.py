"""The slot allocator hands out every page once and refuses to take back what it did not hand out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.allocator import SlotAllocator


def test_pages_are_runs_of_consecutive_slots_lowest_first() -> None:
    allocator = SlotAllocator(num_slots=16, page_size=4)
    assert allocator.allocate(2) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert allocator.allocate(1) == [8, 9, 10, 11]
    assert allocator.num_free == 4


def test_freed_pages_are_handed_out_again_in_ascending_order() -> None:
    allocator = SlotAllocator(num_slots=6, page_size=1)
    allocator.allocate(6)
    allocator.free([4, 1, 2])
    assert allocator.allocate(2) == [1, 2]
    assert allocator.allocate(1) == [4]


def test_nothing_is_taken_when_there_are_too_few_pages() -> None:
    allocator = SlotAllocator(num_slots=8, page_size=4)
    allocator.allocate(1)
    assert allocator.allocate(2) is None
    assert allocator.num_free == 4


def test_no_pages_are_an_empty_list_even_when_full() -> None:
    allocator = SlotAllocator(num_slots=4, page_size=4)
    allocator.allocate(1)
    assert allocator.allocate(0) == []
    allocator.free([])
    assert allocator.num_free == 0


def test_the_pool_is_a_whole_number_of_pages() -> None:
    with pytest.raises(ValueError, match="whole number of pages"):
        SlotAllocator(num_slots=10, page_size=4)


@pytest.mark.parametrize(
    ("page_size", "slots", "reason"),
    [
        (1, [5, 5], "twice"),
        (1, [6], "free already"),
        (1, [12], "does not exist"),
        (1, [-1], "does not exist"),
        (4, [0, 1, 2], "whole pages"),
        (4, [0, 1, 2, 3, 4], "whole pages"),
        (4, [1, 2, 3, 4], "whole pages"),
        (4, [0, 1, 2, 3, 0, 1, 2, 3], "twice"),
        (4, [8, 9, 10, 11], "free already"),
    ],
)
def test_a_wrong_free_raises_and_changes_nothing(page_size: int, slots: list[int], reason: str) -> None:
    allocator = SlotAllocator(num_slots=12, page_size=page_size)
    allocator.allocate(6 if page_size == 1 else 2)
    free = allocator.num_free
    with pytest.raises(RuntimeError, match=reason):
        allocator.free([0, *slots] if page_size == 1 else slots)
    assert allocator.num_free == free
    assert allocator.allocate(free // page_size) == list(range(12 - free, 12))


@given(st.sampled_from([1, 4]), st.lists(st.integers(-5, 6), max_size=30))
def test_a_slot_has_at_most_one_owner(page_size: int, moves: list[int]) -> None:
    """A positive move allocates that many pages, any other frees the oldest allocation."""
    allocator = SlotAllocator(num_slots=12 * page_size, page_size=page_size)
    held: list[list[int]] = []
    for move in moves:
        if move > 0:
            slots = allocator.allocate(move)
            fits = move * page_size <= 12 * page_size - sum(map(len, held))
            assert (slots is not None) == fits
            if slots is not None:
                held.append(slots)
        elif held:
            allocator.free(held.pop(0))
        owned = [slot for slots in held for slot in slots]
        assert len(set(owned)) == len(owned)
        assert set(owned) <= set(range(allocator.num_slots))
        assert allocator.num_free + len(owned) == allocator.num_slots
