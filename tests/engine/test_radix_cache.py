"""The radix cache: what is found, who owns which slot, what is evicted and when."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.allocator import SlotAllocator
from engine.radix_cache import Node, RadixCache


def make(num_slots: int = 64, page_size: int = 1, enabled: bool = True) -> tuple[SlotAllocator, RadixCache]:
    allocator = SlotAllocator(num_slots, page_size)
    return allocator, RadixCache(allocator, enabled)


def take(allocator: SlotAllocator, tokens: int) -> list[int]:
    slots = allocator.allocate(-(-tokens // allocator.page_size))
    assert slots is not None
    return slots[:tokens]


def test_an_empty_cache_matches_nothing() -> None:
    _, cache = make()
    assert cache.match([1, 2, 3]).slots == []
    assert (cache.evictable, cache.protected) == (0, 0)


def test_an_inserted_prefix_is_found_and_owned_by_the_tree() -> None:
    allocator, cache = make()
    slots = take(allocator, 4)
    inserted = cache.insert([1, 2, 3, 4], slots)
    assert inserted.slots == slots
    assert cache.match([1, 2, 3, 4, 5]).slots == slots
    assert cache.match([1, 2, 3, 4, 5]).node is inserted.node
    assert cache.match([1, 2, 9]).slots == slots[:2]
    assert cache.match([2, 3]).slots == []
    assert cache.evictable == 4


def test_only_whole_pages_are_shared_and_the_rest_stays_with_the_caller() -> None:
    allocator, cache = make(page_size=4)
    slots = take(allocator, 7)
    assert cache.insert(range(7), slots).slots == slots[:4]
    assert cache.evictable == 4
    assert cache.match(range(7)).slots == slots[:4]
    assert cache.match(range(3)).slots == []
    assert cache.match([0, 1, 2, 9, 4]).slots == []


def test_prefixes_that_part_within_a_page_share_the_pages_before_it() -> None:
    allocator, cache = make(page_size=2)
    first = take(allocator, 6)
    cache.insert([1, 2, 3, 4, 5, 6], first)
    second = take(allocator, 6)
    inserted = cache.insert([1, 2, 3, 9, 5, 6], second)
    assert inserted.slots == first[:2] + second[2:]
    assert cache.match([1, 2, 3, 4, 5, 6]).slots == first
    assert allocator.num_free + cache.evictable == 64


def test_duplicates_are_freed_where_the_tree_has_other_slots() -> None:
    allocator, cache = make()
    first, second = take(allocator, 3), take(allocator, 5)
    cache.insert([1, 2, 3], first)
    inserted = cache.insert([1, 2, 3, 4, 5], second)
    assert inserted.slots == first + second[3:]
    assert allocator.num_free == 64 - 5
    assert cache.evictable == 5


def test_slots_that_are_the_trees_already_are_not_freed() -> None:
    allocator, cache = make()
    shared = cache.insert([1, 2], take(allocator, 2))
    cache.lock(shared.node)
    own = take(allocator, 4)
    other = cache.insert([1, 2, 3, 4], shared.slots + take(allocator, 2))
    inserted = cache.insert([1, 2, 3, 4, 5, 6], shared.slots + own)
    assert inserted.slots == other.slots + own[2:]
    assert allocator.num_free == 64 - 6


def test_tokens_and_slots_must_be_as_many() -> None:
    allocator, cache = make()
    with pytest.raises(RuntimeError, match="3 tokens"):
        cache.insert([1, 2, 3], take(allocator, 2))


def test_the_least_recently_used_leaf_is_evicted_first() -> None:
    allocator, cache = make()
    for first in (10, 20, 30):
        cache.insert([first, first + 1], take(allocator, 2))
    cache.match([10, 11])
    assert cache.evict(2) == 2
    assert [len(cache.match([first, first + 1]).slots) for first in (10, 20, 30)] == [2, 0, 2]


def test_a_leaf_shrinks_from_its_end() -> None:
    allocator, cache = make(page_size=4)
    slots = take(allocator, 12)
    cache.insert(range(12), slots)
    assert cache.evict(1) == 4
    assert cache.match(range(12)).slots == slots[:8]
    assert cache.evict(5) == 8
    assert allocator.num_free == 64


def test_a_parent_goes_after_its_last_child() -> None:
    allocator, cache = make()
    cache.insert([1, 2, 3], take(allocator, 3))
    cache.insert([1, 2, 4], take(allocator, 3))
    assert cache.evict(2) == 2
    assert len(cache.match([1, 2, 3]).slots) == 2
    assert cache.evict(100) == 2
    assert (cache.evictable, allocator.num_free) == (0, 64)


def test_a_locked_path_survives_eviction_and_what_hangs_below_it_does_not() -> None:
    allocator, cache = make()
    whole = take(allocator, 4)
    cache.insert([1, 2, 3, 4], whole)
    node = cache.match([1, 2]).node
    cache.lock(node)
    assert (cache.protected, cache.evictable) == (2, 2)
    assert cache.evict(100) == 2
    assert cache.match([1, 2, 3, 4]).slots == whole[:2]
    cache.unlock(node)
    assert cache.evict(100) == 2


def test_locks_count_and_survive_a_split() -> None:
    allocator, cache = make()
    node = cache.insert([1, 2, 3, 4], take(allocator, 4)).node
    cache.lock(node)
    cache.lock(node)
    cache.match([1, 2, 9])  # splits the locked node
    assert cache.protected == 4
    cache.unlock(node)
    assert cache.evict(100) == 0
    cache.unlock(node)
    assert (cache.protected, cache.evictable) == (0, 4)
    with pytest.raises(RuntimeError, match="not locked"):
        cache.unlock(node)


def test_reset_forgets_what_is_not_locked() -> None:
    allocator, cache = make()
    cache.lock(cache.insert([1, 2], take(allocator, 2)).node)
    cache.insert([5, 6], take(allocator, 2))
    cache.reset()
    assert cache.match([5, 6]).slots == []
    assert (cache.protected, cache.evictable, allocator.num_free) == (2, 0, 62)


def test_a_disabled_cache_takes_and_matches_nothing() -> None:
    allocator, cache = make(enabled=False)
    inserted = cache.insert([1, 2], take(allocator, 2))
    assert inserted.slots == []
    cache.lock(inserted.node)
    cache.unlock(inserted.node)
    assert cache.match([1, 2]).slots == []
    assert (cache.evictable, cache.protected, allocator.num_free) == (0, 0, 62)


def test_long_prompts_and_deep_trees() -> None:
    """100k tokens in one node, then a path of thousands of nodes: no recursion, no quadratic walk."""
    allocator, cache = make(num_slots=120_000)
    prompt = list(range(100_000))
    cache.insert(prompt, take(allocator, 100_000))
    for length in range(5_000, 0, -1):
        cache.match(prompt[: 2 * length])  # each splits the head of the one before
    match = cache.match(prompt)
    assert match.slots == prompt  # slots were handed out in order, too
    cache.lock(match.node)
    assert cache.protected == 100_000
    cache.unlock(match.node)
    assert cache.evict(100_000) == 100_000
    assert allocator.num_free == 120_000


@dataclass
class Sequence:
    """A request of the model below, holding slots as the scheduler's requests do."""

    token_ids: list[int]
    slots: list[int]
    shared: int
    node: Node


@dataclass
class Reference:
    """What the KV pool would contain: the prefix that each slot's key and value were computed from."""

    prefix_of: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def write(self, token_ids: list[int], start: int, slots: list[int]) -> None:
        for position, slot in enumerate(slots, start):
            self.prefix_of[slot] = tuple(token_ids[: position + 1])


class CacheUnderLoad(RuleBasedStateMachine):
    """Requests come, grow, share, finish and abort in any order; pages run dry and are evicted.

    A slot's content depends on every token before it, so a match is right iff each slot was last written for exactly
    the prefix that is asked for. Two token values and short prompts make shared prefixes and splits common.
    """

    page_size = 1
    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=70)

    @initialize()
    def start(self) -> None:
        self.total = 160
        self.allocator = SlotAllocator(self.total, self.page_size)
        self.cache = RadixCache(self.allocator)
        self.pool = Reference()
        self.running: list[Sequence] = []

    def pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def allocate(self, pages: int) -> list[int] | None:
        missing = pages * self.page_size - self.allocator.num_free
        if missing > 0:
            before = self.cache.evictable
            assert self.cache.evict(missing) == min(self.pages(missing) * self.page_size, before)
        return self.allocator.allocate(pages)

    def share(self, sequence: Sequence) -> None:
        count = len(sequence.token_ids)
        result = self.cache.insert(sequence.token_ids, sequence.slots[:count])
        assert len(result.slots) == count // self.page_size * self.page_size
        self.cache.lock(result.node)
        self.cache.unlock(sequence.node)
        sequence.node, sequence.shared = result.node, len(result.slots)
        sequence.slots[: sequence.shared] = result.slots

    def leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.allocator.free(sequence.slots[sequence.shared :])
        self.cache.unlock(sequence.node)

    @rule(token_ids=tokens)
    def admit(self, token_ids: list[int]) -> None:
        match = self.cache.match(token_ids)
        assert [self.pool.prefix_of[slot] for slot in match.slots] == [
            tuple(token_ids[: length + 1]) for length in range(len(match.slots))
        ]
        self.cache.lock(match.node)
        cached = len(match.slots)
        own = self.allocate(self.pages(len(token_ids)) - self.pages(cached))
        if own is None:
            self.cache.unlock(match.node)
            return
        sequence = Sequence(list(token_ids), match.slots + own, cached, match.node)
        self.pool.write(token_ids, cached, sequence.slots[cached : len(token_ids)])
        self.running.append(sequence)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), token_ids=tokens)
    def extend(self, data: st.DataObject, token_ids: list[int]) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        start = len(sequence.token_ids)
        more = self.allocate(self.pages(start + len(token_ids)) - self.pages(start))
        if more is None:
            return
        sequence.slots += more
        sequence.token_ids += token_ids
        end = len(sequence.token_ids)
        self.pool.write(sequence.token_ids, start, sequence.slots[start:end])

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def share_while_running(self, data: st.DataObject) -> None:
        self.share(data.draw(st.sampled_from(self.running)))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), keeps=st.booleans())
    def finish_or_abort(self, data: st.DataObject, keeps: bool) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        if keeps:
            self.share(sequence)
        self.leave(sequence)

    @rule(num_slots=st.integers(0, 200))
    def evict(self, num_slots: int) -> None:
        wanted = min(self.pages(num_slots) * self.page_size, self.cache.evictable)
        assert self.cache.evict(num_slots) == wanted

    @rule()
    def reset(self) -> None:
        self.cache.reset()
        assert self.cache.evictable == 0

    @invariant()
    def every_slot_has_one_owner(self) -> None:
        in_use = sum(len(sequence.slots) - sequence.shared for sequence in self.running)
        held = self.allocator.num_free + self.cache.evictable + self.cache.protected + in_use
        assert held == self.total

    @invariant()
    def running_requests_keep_their_kv(self) -> None:
        for sequence in self.running:
            for position, slot in enumerate(sequence.slots[: len(sequence.token_ids)]):
                assert self.pool.prefix_of[slot] == tuple(sequence.token_ids[: position + 1])

    @invariant()
    def running_requests_find_what_they_share(self) -> None:
        for sequence in self.running:
            found = self.cache.match(sequence.token_ids).slots
            assert found[: sequence.shared] == sequence.slots[: sequence.shared]

    def teardown(self) -> None:
        for sequence in list(getattr(self, "running", [])):
            self.leave(sequence)
        if hasattr(self, "cache"):
            self.cache.reset()
            assert self.allocator.num_free == self.total


class CacheUnderLoadPagesOf4(CacheUnderLoad):
    page_size = 4


class CacheUnderLoadPagesOf16(CacheUnderLoad):
    page_size = 16


LOAD = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPagesOf1 = CacheUnderLoad.TestCase
TestPagesOf1.settings = LOAD
TestPagesOf4 = CacheUnderLoadPagesOf4.TestCase
TestPagesOf4.settings = LOAD
TestPagesOf16 = CacheUnderLoadPagesOf16.TestCase
TestPagesOf16.settings = LOAD
