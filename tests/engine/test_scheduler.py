"""Slots are never lost, whatever happens to requests; nobody starves; prefixes are shared."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.allocator import SlotAllocator
from engine.options import SchedulerOptions
from engine.radix_cache import RadixCache
from engine.request import Request, SamplingParams
from engine.scheduler import Scheduler
from engine.slot_table import SlotTable
from engine.worker import SequenceStep

CONTEXT = 32


def build(
    slots: int = 64,
    page: int = 1,
    running: int = 4,
    chunk: int = 8,
    caching: bool = True,
    **hooks: Callable[..., object],
) -> Scheduler:
    allocator = SlotAllocator(slots, page)
    return Scheduler(
        SchedulerOptions(max_running_requests=running, chunked_prefill_size=chunk),
        allocator,
        RadixCache(allocator, enabled=caching),
        SlotTable(running, CONTEXT, torch.device("cpu")),
        **hooks,
    )


def request(name: str, prompt: list[int], **sampling: object) -> Request:
    return Request(name, prompt, SamplingParams(**sampling), sink=lambda event: None)


def emit(scheduler: Scheduler, step: SequenceStep, tokens: list[int]) -> None:
    """What the engine does after a pass: keep the tokens, then commit."""
    step.request.output_ids.extend(tokens)
    scheduler.commit(step, len(tokens))


def run_one(scheduler: Scheduler, token: int = 7) -> list[SequenceStep]:
    steps = scheduler.plan()
    for step in steps:
        emit(scheduler, step, [token] if step.samples else [])
    return steps


def total(scheduler: Scheduler) -> int:
    return (
        scheduler.allocator.num_free
        + scheduler.cache.evictable
        + scheduler.cache.protected
        + scheduler.in_use
    )


def test_a_prompt_whose_logprobs_are_asked_for_takes_smaller_chunks_beside_others() -> None:
    scheduler = build(chunk=24)
    alone = request("alone", list(range(1, 21)), prompt_logprobs=0)
    scheduler.add(alone)
    assert [step.num_tokens for step in run_one(scheduler)] == [20]
    scheduler.add(request("beside", list(range(30, 38)), prompt_logprobs=0))
    assert [step.num_tokens for step in run_one(scheduler)] == [1, 3]
    assert [step.num_tokens for step in run_one(scheduler)] == [1, 3]
    assert [step.num_tokens for step in run_one(scheduler)] == [1, 2]


def test_a_long_prompt_is_computed_in_chunks_beside_decoding_requests() -> None:
    scheduler = build(chunk=8)
    short, long = request("short", [1, 2, 3]), request("long", list(range(10, 30)))
    scheduler.add(short)
    run_one(scheduler)
    scheduler.add(long)

    shapes = [[(s.request.request_id, s.num_tokens, s.samples) for s in run_one(scheduler)] for _ in range(4)]

    assert shapes == [
        [("short", 1, True), ("long", 8, False)],
        [("short", 1, True), ("long", 8, False)],
        [("short", 1, True), ("long", 4, True)],
        [("short", 1, True), ("long", 1, True)],
    ]


@pytest.mark.parametrize("length", range(7, 20))
def test_a_complete_prompt_is_shared_at_once_whatever_its_last_chunk(length: int) -> None:
    scheduler, prompt = build(chunk=8), list(range(10, 10 + length))
    scheduler.add(request("first", prompt))
    while not any(step.samples for step in run_one(scheduler)):
        pass
    second = request("second", prompt)
    scheduler.add(second)
    run_one(scheduler)
    assert second.prefix_hit_tokens == length - 1


def test_a_fully_cached_prompt_still_recomputes_its_last_token() -> None:
    scheduler = build()
    first, second = request("first", [1, 2, 3, 4]), request("second", [1, 2, 3, 4])
    scheduler.add(first)
    run_one(scheduler)
    scheduler.add(second)
    steps = run_one(scheduler)

    assert [(s.request.request_id, s.num_tokens) for s in steps] == [("first", 1), ("second", 1)]
    assert second.prefix_hit_tokens == 3
    assert second.slots[:3] == first.slots[:3]


def test_copies_of_a_prompt_wait_for_the_first_to_compute_it() -> None:
    scheduler = build(slots=256, chunk=20)
    prompt = [*range(100, 140), *range(5)]
    first, copy, similar = (
        request(name, ids) for name, ids in zip("abc", (prompt, prompt, prompt[:42]), strict=True)
    )
    for each in (first, copy, similar, request("d", [1, 2, 3])):
        scheduler.add(each)

    assert [[(s.request, s.num_tokens) for s in run_one(scheduler)] for _ in range(3)] == [
        [(first, 20)],
        [(first, 20)],
        [(first, 5)],
    ]
    assert scheduler.num_seats == 3, "who waits for a prompt will have a seat"
    assert [(s.request.request_id, s.num_tokens) for s in run_one(scheduler)] == [
        ("a", 1),
        ("b", 1),
        ("c", 1),
        ("d", 3),
    ]


def test_nobody_waits_for_a_prompt_that_will_not_be_shared_or_is_hardly_the_same() -> None:
    prompt = list(range(100, 150))
    for caching, other, wanted in (
        (False, prompt, {}),
        (True, [*prompt[:31], 1, 2], {}),
        (True, prompt, {"prompt_logprobs": 0}),
    ):
        scheduler = build(slots=256, chunk=20, caching=caching)
        scheduler.add(request("first", prompt))
        scheduler.add(request("other", other, **wanted))
        scheduler.plan()
        assert scheduler.num_running == 2


def test_copies_wait_also_where_what_is_cached_serves_none_of_them() -> None:
    """As the drafter knows nothing of it: the first one to compute it again does so for all."""
    known: list[int] = []

    def usable(request: Request, slots: Sequence[int]) -> int:
        return len(slots) if known else 0

    scheduler = build(slots=256, chunk=64, usable_prefix=usable)
    prompt = list(range(100, 150))
    scheduler.add(request("earlier", prompt))
    run_one(scheduler)
    for name in ("first", "copy"):
        scheduler.add(request(name, prompt))
    assert [s.num_tokens for s in run_one(scheduler)] == [1, 50]
    known.append(1)
    assert [s.num_tokens for s in run_one(scheduler)] == [1, 1, 1]


@pytest.mark.parametrize(("exact", "computed"), [(True, 49), (False, 1)])
def test_what_running_requests_read_is_computed_again_only_with_the_same_bits(
    exact: bool, computed: int
) -> None:
    scheduler = build(
        slots=256, chunk=64, usable_prefix=lambda request, slots: 0, recomputes_exactly=lambda: exact
    )
    prompt = list(range(100, 149))
    scheduler.add(request("running", prompt))
    run_one(scheduler)
    scheduler.add(request("second", prompt))
    assert [s.num_tokens for s in scheduler.plan()] == [1, computed]


def test_nobody_waits_for_a_page_that_will_not_be_whole() -> None:
    scheduler = build(slots=256, page=16, chunk=40)
    for name, end in (("first", 200), ("other", 300)):
        scheduler.add(request(name, [*range(100, 147), *range(end, end + 20)]))
    scheduler.plan()
    assert scheduler.num_running == 1, "two pages are worth a wait"
    scheduler = build(slots=256, page=16, chunk=40)
    for name, end in (("first", 200), ("other", 300)):
        scheduler.add(request(name, [*range(100, 131), *range(end, end + 20)]))
    scheduler.plan()
    assert scheduler.num_running == 2


def test_a_copy_does_not_wait_for_one_that_was_aborted() -> None:
    scheduler = build(slots=256, chunk=20)
    first, copy = request("first", list(range(100, 150))), request("copy", list(range(100, 150)))
    for each in (first, copy):
        scheduler.add(each)
    run_one(scheduler)
    scheduler.remove(first)
    (step,) = scheduler.plan()
    assert (step.request, step.num_tokens) == (copy, 20)
    assert copy.cached_len == 20, "and what it had computed serves"


def test_a_request_that_wants_prompt_logprobs_does_not_skip_its_prompt() -> None:
    scheduler = build(chunk=32)
    scheduler.add(request("first", [1, 2, 3, 4]))
    run_one(scheduler)
    second = request("second", [1, 2, 3, 4], prompt_logprobs=1)
    scheduler.add(second)

    assert scheduler.plan()[-1].num_tokens == 4
    assert second.prefix_hit_tokens == 0


def test_seats_are_free_for_as_many_as_may_still_run() -> None:
    scheduler = build(running=2)
    assert scheduler.num_seats == 2
    scheduler.add(request("first", [1, 2, 3]))
    run_one(scheduler)
    assert scheduler.num_seats == 1


def test_no_seat_is_free_while_somebody_waits_for_room_in_the_pool() -> None:
    scheduler = build(slots=16)
    first, large = request("first", list(range(10))), request("large", list(range(20, 30)))
    scheduler.add(first)
    scheduler.add(large)
    run_one(scheduler)
    assert (scheduler.num_running, scheduler.num_seats) == (1, 0)
    scheduler.remove(large)
    assert scheduler.num_seats == 3


def test_a_dry_pool_preempts_the_latest_arrival_which_resumes_with_its_tokens() -> None:
    scheduler = build(slots=16, running=2)
    early, late = request("early", list(range(6))), request("late", list(range(10, 16)))
    scheduler.add(early)
    scheduler.add(late)
    while not scheduler.preemptions:
        run_one(scheduler)
    kept = list(late.output_ids)
    assert early.slots and not late.slots

    scheduler.remove(early)
    resumed = scheduler.plan()[0]

    assert resumed.request is late and late.output_ids == kept
    assert late.cached_len + resumed.num_tokens == late.num_tokens


def test_the_last_page_may_reach_past_the_end_of_the_context() -> None:
    scheduler = build(slots=60, page=6, chunk=CONTEXT)
    whole = request("whole", list(range(100, 100 + CONTEXT)))
    scheduler.add(whole)
    run_one(scheduler)
    assert len(whole.slots) == 36 > CONTEXT
    assert scheduler._table.tensor[whole.table_row].tolist() == whole.slots[:CONTEXT]


def test_drafts_get_what_is_left_and_never_preempt() -> None:
    scheduler = build(slots=12, running=2)
    one, two = request("one", [1, 2, 3, 4]), request("two", [5, 6, 7, 8])
    scheduler.add(one)
    scheduler.add(two)
    run_one(scheduler)
    steps = scheduler.plan()

    assert scheduler.reserve_drafts(one, 7) == 2
    assert scheduler.reserve_drafts(two, 7) == 0
    assert scheduler.preemptions == 0
    emit(scheduler, SequenceStep(one, 1, True, (1, 1)), [9])
    emit(scheduler, steps[1], [9])
    assert scheduler.allocator.num_free == 2, "slots of rejected drafts go back at once"


def test_a_blocked_head_is_not_overtaken() -> None:
    scheduler = build(slots=16, running=4, caching=False)
    scheduler.add(request("running", list(range(8))))
    run_one(scheduler)
    scheduler.add(request("big", list(range(100, 112))))
    scheduler.add(request("small", [50]))

    assert [s.request.request_id for s in scheduler.plan()] == ["running"]


def test_what_is_not_usable_of_a_cached_prefix_is_computed_again_into_the_same_slots() -> None:
    scheduler = build(chunk=4, usable_prefix=lambda request, slots: min(3, len(slots)))
    first, second = request("first", list(range(10))), request("second", list(range(10)))
    scheduler.add(first)
    while first.pending > 1:
        run_one(scheduler)
    scheduler.add(second)
    shapes = []
    while second.pending != 1:
        shapes += [s.num_tokens for s in run_one(scheduler) if s.request is second]
        assert second.slots[: len(first.prompt_ids) - 1] == first.slots[: len(first.prompt_ids) - 1]

    assert second.prefix_hit_tokens == 3
    assert shapes == [4, 3]
    assert second.slots[:10] == first.slots[:10]


def test_an_abort_while_a_prefix_is_computed_again_leaves_the_prefix_cached() -> None:
    scheduler = build(chunk=4, usable_prefix=lambda request, slots: 0)
    first, second = request("first", list(range(10))), request("second", list(range(10)))
    scheduler.add(first)
    while first.pending > 1:
        run_one(scheduler)
    scheduler.remove(first)
    scheduler.add(second)
    run_one(scheduler)
    scheduler.remove(second)

    assert scheduler.cache.evictable == 10
    assert total(scheduler) == scheduler.allocator.num_slots


def test_whoever_keeps_things_by_slot_is_told_before_slots_go() -> None:
    told: list[tuple[str, int]] = []

    def before_release(leaving: Request) -> None:
        told.append((leaving.request_id, len(leaving.slots)))

    scheduler = build(slots=16, running=2, before_release=before_release)
    early, late = request("early", list(range(6))), request("late", list(range(10, 16)))
    scheduler.add(early)
    scheduler.add(late)
    while not scheduler.preemptions:
        run_one(scheduler)
    scheduler.remove(early)
    scheduler.remove(late)

    assert [name for name, _ in told] == ["late", "early"]
    assert all(slots >= 6 for _, slots in told)


class Lifecycle(RuleBasedStateMachine):
    """Random arrivals, steps with random drafts and acceptance, finishes and aborts."""

    page = 1

    def __init__(self) -> None:
        super().__init__()
        self.usable = 0
        self.scheduler = build(slots=48, page=self.page, running=3, usable_prefix=self.usable_prefix)
        self.requests: list[Request] = []
        self.names = 0

    def usable_prefix(self, request: Request, slots: Sequence[int]) -> int:
        return min(self.usable, len(slots))

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        caching=st.booleans(),
        usable=st.integers(0, 20),
    )
    def arrive(self, prompt: list[int], caching: bool, usable: int) -> None:
        self.names += 1
        self.usable = usable
        new = request(str(self.names), prompt, prompt_logprobs=None if caching else 0)
        self.requests.append(new)
        self.scheduler.add(new)

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        steps = self.scheduler.plan()
        assert bool(steps) == bool(self.requests)
        for step in steps:
            target = step.request
            drafts: tuple[int, ...] = ()
            if step.samples and step.num_tokens == 1:
                wanted = min(data.draw(st.integers(0, 5)), CONTEXT - target.num_tokens - 1)
                drafts = (1,) * self.scheduler.reserve_drafts(target, max(0, wanted))
            held = target.slots[: target.cached_len + step.num_tokens + len(drafts)]
            assert len(held) == target.cached_len + step.num_tokens + len(drafts)
            assert self.scheduler._table.tensor[target.table_row, : len(held)].tolist() == held
            kept = data.draw(st.integers(1, len(drafts) + 1)) if step.samples else 0
            emit(self.scheduler, SequenceStep(target, step.num_tokens, step.samples, drafts), [1] * kept)
            if target.num_tokens >= CONTEXT:
                self.end(target)

    @rule(data=st.data())
    def finish_or_abort(self, data: st.DataObject) -> None:
        if self.requests:
            self.end(data.draw(st.sampled_from(self.requests)))

    def end(self, target: Request) -> None:
        self.scheduler.remove(target)
        self.requests.remove(target)

    @invariant()
    def every_slot_is_accounted_for(self) -> None:
        assert total(self.scheduler) == self.scheduler.allocator.num_slots

    @invariant()
    def no_slot_has_two_owners(self) -> None:
        own = [slot for r in self.requests for slot in r.slots[r.tree_len :]]
        assert len(own) == len(set(own))

    def teardown(self) -> None:
        for target in list(self.requests):
            self.end(target)
        assert self.scheduler.cache.protected == 0 and self.scheduler.in_use == 0
        self.scheduler.cache.evict(self.scheduler.allocator.num_slots)
        assert self.scheduler.allocator.num_free == self.scheduler.allocator.num_slots


class LifecycleInPages(Lifecycle):
    page = 4


TestLifecycle = Lifecycle.TestCase
TestLifecycleInPages = LifecycleInPages.TestCase
TestLifecycle.settings = TestLifecycleInPages.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None
)
