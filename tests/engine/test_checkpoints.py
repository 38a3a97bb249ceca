"""Checkpoints of recurrent state: who has them, which one gives way, and from where a request goes on."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.allocator import SlotAllocator
from engine.checkpoints import Checkpoint, Checkpoints
from engine.options import STATE_CHUNK, SchedulerOptions
from engine.radix_cache import Node, RadixCache
from engine.request import Request, SamplingParams
from engine.scheduler import Scheduler
from engine.slot_table import SlotTable
from engine.worker import SequenceStep
from kernels.linear_attention import CHUNK

INTERVAL = 4
CONTEXT = 40


class States:
    """A scheduler, and in place of states what they are the states of: rows of tokens."""

    def __init__(self, rows: int = 8, slots: int = 64, page: int = 1, running: int = 3) -> None:
        self.checkpoints = Checkpoints(INTERVAL, range(100, 100 + rows))
        self.allocator = SlotAllocator(slots, page)
        self.cache = RadixCache(self.allocator, checkpoints=self.checkpoints)
        self.usable = CONTEXT
        self.scheduler = Scheduler(
            SchedulerOptions(max_running_requests=running, chunked_prefill_size=8),
            self.allocator,
            self.cache,
            SlotTable(running, CONTEXT, torch.device("cpu")),
            usable_prefix=lambda request, slots: min(self.usable, len(slots)),
            resume=self.resume,
        )
        self.written: dict[int, list[int]] = {}  # by row of the pool
        self.resumed: list[Checkpoint] = []
        self.requests: list[Request] = []

    def resume(self, table_row: int, checkpoint: Checkpoint) -> None:
        assert len(self.written[checkpoint.row]) == checkpoint.position
        self.written[table_row] = self.written[checkpoint.row]
        self.resumed.append(checkpoint)

    def add(self, prompt: list[int], **sampling: object) -> Request:
        request = Request(str(len(self.requests)), prompt, SamplingParams(**sampling), lambda event: None)
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def run(self, step: SequenceStep, kept: int) -> None:
        """What a pass does, of which `kept` tokens are emitted, each a 1."""
        request, start = step.request, step.request.cached_len
        if start:
            assert self.written[request.table_row] == request.token_ids(0, start)
        request.output_ids.extend([1] * kept)
        end = start + step.num_tokens + max(0, kept - 1)
        self.written[request.table_row] = request.token_ids(0, end)
        for position, row in request.checkpoints.items():
            if start < position <= end:
                self.written[row] = request.token_ids(0, position)
        self.scheduler.commit(step, kept)

    def step(self) -> list[SequenceStep]:
        steps = self.scheduler.plan()
        for step in steps:
            self.run(step, int(step.samples))
        return steps

    def finish(self, request: Request) -> None:
        self.scheduler.remove(request)
        self.requests.remove(request)

    def serve(self, prompt: list[int], tokens: int) -> Request:
        request = self.add(prompt)
        while len(request.output_ids) < tokens:
            self.step()
        self.finish(request)
        return request

    def nodes(self) -> list[Node]:
        found, todo = [], [self.cache._root]
        while todo:
            node = todo.pop()
            found.append(node)
            todo += node.children.values()
        return found

    def positions(self) -> list[int]:
        return sorted(position for node in self.nodes() for position in node.checkpoints)


def test_the_stride_is_in_chunks_of_the_kernel() -> None:
    assert STATE_CHUNK == CHUNK


def test_a_request_leaves_the_state_at_each_boundary_of_prompt_and_output() -> None:
    states = States()
    states.serve(list(range(10, 19)), tokens=9)  # of 18 tokens, the last has no state
    assert states.positions() == [4, 8, 12, 16]


def test_a_hit_goes_on_from_the_last_boundary_and_computes_the_rest_into_the_same_slots() -> None:
    states = States()
    first = states.add(list(range(10, 20)))
    while first.pending > 1:
        states.step()
    second = states.add([*range(10, 20), 30, 31])
    states.step()
    assert states.resumed[-1].position == second.prefix_hit_tokens == 8
    assert second.slots[:10] == first.slots[:10]


def test_a_hit_goes_no_further_than_what_else_is_usable() -> None:
    states = States()
    states.serve(list(range(10, 30)), tokens=1)
    for usable, position in ((11, 8), (8, 8), (7, 4), (3, 0)):
        states.usable = usable
        assert states.serve(list(range(10, 30)), tokens=1).prefix_hit_tokens == position


def test_where_texts_part_each_part_keeps_its_own() -> None:
    states = States()
    states.serve([*range(10, 16), *range(20, 30)], tokens=1)
    parted = states.serve([*range(10, 16), *range(30, 40)], tokens=1)
    assert parted.prefix_hit_tokens == 4
    assert states.positions() == [4, 8, 8, 12, 12, 16, 16]
    by_length = {(node.start, len(node.slots)): sorted(node.checkpoints) for node in states.nodes()[1:]}
    assert by_length == {(0, 6): [4], (6, 10): [8, 12, 16]}


def test_an_evicted_end_takes_its_checkpoints_along() -> None:
    states = States()
    states.serve(list(range(10, 27)), tokens=1)
    states.cache.evict(6)
    assert states.positions() == [4, 8]
    assert (states.checkpoints.num_held, states.checkpoints.num_free) == (2, 6)


def test_the_one_that_served_the_longest_ago_gives_way() -> None:
    states = States(rows=4)
    states.serve(list(range(10, 19)), tokens=1)
    states.serve(list(range(20, 29)), tokens=1)
    states.serve(list(range(10, 16)), tokens=1)  # goes on from 4
    states.serve(list(range(30, 39)), tokens=1)
    held = [states.written[row] for node in states.nodes() for row in node.checkpoints.values()]
    assert sorted((tokens[0], len(tokens)) for tokens in held) == [(10, 4), (20, 8), (30, 4), (30, 8)]


def test_what_running_requests_are_above_does_not_give_way() -> None:
    states = States(rows=2)
    running = states.add(list(range(10, 20)))
    while running.pending > 1:
        states.step()
    states.serve(list(range(30, 40)), tokens=1)
    assert states.positions() == [4, 8]
    assert states.serve(list(range(10, 20)), tokens=1).prefix_hit_tokens == 8


def test_a_request_that_has_none_left_keeps_its_last_boundaries() -> None:
    states = States(rows=2)
    states.serve(list(range(10, 35)), tokens=1)
    assert states.positions() == [20, 24]


def test_a_preempted_request_gives_all_back_and_goes_on_from_its_last_boundary() -> None:
    states = States(slots=24, page=6)
    early, late = states.add(list(range(10, 16))), states.add(list(range(20, 24)))
    held = 0
    while not states.scheduler.preemptions:
        held = len(late.checkpoints)
        states.step()
    assert held and not late.checkpoints
    states.finish(early)
    states.step()
    assert late.cached_len > 4 and states.resumed[-1].position >= 4


def test_rejected_drafts_leave_no_checkpoint() -> None:
    states = States()
    request = states.add(list(range(10, 13)))
    states.step()
    states.scheduler.plan()
    assert states.scheduler.reserve_drafts(request, 6) == 6
    states.run(SequenceStep(request, 1, True, (1,) * 6), kept=2)  # 5 of up to 10 tokens
    states.finish(request)
    assert states.positions() == [4]


class Lifecycle(RuleBasedStateMachine):
    """Random arrivals, drafts, acceptance, preemptions, finishes and aborts over few checkpoints."""

    page = 1

    def __init__(self) -> None:
        super().__init__()
        self.states = States(rows=7, slots=42, page=self.page)

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=24),
        caching=st.booleans(),
        usable=st.sampled_from([0, 5, 10, CONTEXT]),
    )
    def arrive(self, prompt: list[int], caching: bool, usable: int) -> None:
        self.states.usable = usable
        self.states.add(prompt, prompt_logprobs=None if caching else 0)

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        scheduler = self.states.scheduler
        for step in scheduler.plan():
            request = step.request
            drafts = 0
            if step.samples and step.num_tokens == 1:
                wanted = min(data.draw(st.integers(0, 9)), CONTEXT - request.num_tokens - 1)
                drafts = scheduler.reserve_drafts(request, max(0, wanted))
            kept = data.draw(st.integers(1, drafts + 1)) if step.samples else 0
            self.states.run(SequenceStep(request, step.num_tokens, step.samples, (1,) * drafts), kept)
            if request.num_tokens >= CONTEXT:
                self.states.finish(request)

    @rule(data=st.data(), after_plan=st.booleans())
    def finish_or_abort(self, data: st.DataObject, after_plan: bool) -> None:
        """Also with rows reserved for a pass that fails."""
        if self.states.requests:
            request = data.draw(st.sampled_from(self.states.requests))
            if after_plan:
                self.states.scheduler.plan()
            self.states.finish(request)

    @rule(slots=st.integers(1, 30))
    def evict(self, slots: int) -> None:
        self.states.cache.evict(slots)

    @invariant()
    def every_row_has_one_owner(self) -> None:
        states = self.states
        in_tree = [row for node in states.nodes() for row in node.checkpoints.values()]
        pending = [row for request in states.requests for row in request.checkpoints.values()]
        assert len(in_tree) == states.checkpoints.num_held
        owned = in_tree + pending
        assert len(set(owned)) == len(owned) and set(owned) <= set(states.checkpoints.rows)
        assert len(owned) + states.checkpoints.num_free == len(states.checkpoints.rows)

    @invariant()
    def every_slot_is_accounted_for(self) -> None:
        states, cache = self.states, self.states.cache
        held = states.allocator.num_free + cache.evictable + cache.protected + states.scheduler.in_use
        assert held == states.allocator.num_slots

    @invariant()
    def the_tree_has_the_states_of_its_own_tokens(self) -> None:
        def look(node: Node, before: list[int]) -> None:
            assert node.start == len(before)
            tokens = before + node.token_ids
            for position, row in node.checkpoints.items():
                assert len(before) < position <= len(tokens) and position % INTERVAL == 0
                assert self.states.written[row] == tokens[:position]
            for child in node.children.values():
                look(child, tokens)

        look(self.states.cache._root, [])

    def teardown(self) -> None:
        states = self.states
        for request in list(states.requests):
            states.finish(request)
        states.cache.reset()
        assert states.checkpoints.num_free == len(states.checkpoints.rows)
        assert states.allocator.num_free == states.allocator.num_slots


class LifecycleInPages(Lifecycle):
    page = 6  # boundaries within pages, and pages across boundaries


TestLifecycle = Lifecycle.TestCase
TestLifecycleInPages = LifecycleInPages.TestCase
TestLifecycle.settings = TestLifecycleInPages.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None
)
