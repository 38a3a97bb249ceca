"""Who takes part in the next step, and which KV slots they hold.

Every step carries all decoding requests, and prompt chunks up to a token budget, in order of arrival. A request is
admitted when the rest of its known tokens fits beside what the running ones still need. When the pool runs dry
all the same, the latest arrival is preempted: it keeps its tokens and seed, gives its slots back and is recomputed
later (or served from the cache, if its pages survive). A request whose prompt a running one is computing waits for
that one to share it, which costs it next to nothing: prompts are computed in order of arrival. Since a blocked head is
never overtaken and the earliest runner is never preempted, nobody starves.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from itertools import count

from engine.allocator import SlotAllocator
from engine.checkpoints import Checkpoint
from engine.options import SchedulerOptions
from engine.radix_cache import Match, RadixCache
from engine.request import Request, RequestState
from engine.slot_table import SlotTable
from engine.worker import SequenceStep

# Tokens of a prompt that are worth a step's wait for a request that computes them already.
_WORTH_WAITING = 32
# Prompt tokens whose pass takes about as long as the log-probabilities of one, row by row over the vocabulary.
_LOGPROBS_COST = 8


def _always() -> bool:
    return True


def _all(request: Request, slots: Sequence[int]) -> int:
    return len(slots)


def _nothing(*_: object) -> None:
    pass


class Scheduler:
    """Owns the queues and all slots. Used by the engine thread only.

    At all times `free + evictable + protected + in_use == total`, in slots.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        allocator: SlotAllocator,
        cache: RadixCache,
        table: SlotTable,
        usable_prefix: Callable[[Request, Sequence[int]], int] = _all,
        before_release: Callable[[Request], None] = _nothing,
        resume: Callable[[int, Checkpoint], None] = _nothing,
        recomputes_exactly: Callable[[], bool] = _always,
    ) -> None:
        """`usable_prefix(request, slots)` says how much of a cached prefix serves `request`; the rest is computed
        again, into the same slots. `before_release` is told before a request gives its slots back, for good or
        until it is admitted again. `resume(table_row, checkpoint)` puts a request's recurrent state there.
        `recomputes_exactly()` tells whether what is computed again has the same bits: if not, it leaves alone what
        running requests read."""
        self._options = options
        self.allocator = allocator
        self.cache = cache
        self._table = table
        self._usable_prefix = usable_prefix
        self._before_release = before_release
        self._resume = resume
        self._recomputes_exactly = recomputes_exactly
        self._arrivals = count()
        self._waiting: list[tuple[int, Request]] = []  # heap by arrival
        self._running: dict[Request, int] = {}  # request -> arrival, in order of admission
        self._blocked = False  # the pool is too full for the first that waits
        self.preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def max_running(self) -> int:
        return self._options.max_running_requests

    @property
    def num_seats(self) -> int:
        """How many requests the next plan may admit. None while the first that waits has no room in the pool."""
        return 0 if self._blocked and self._waiting else self.max_running - len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def in_use(self) -> int:
        """Slots that running requests hold outside the radix tree."""
        return sum(len(request.slots) - request.tree_len for request in self._running)

    def add(self, request: Request) -> None:
        """Queue a request."""
        heapq.heappush(self._waiting, (next(self._arrivals), request))

    def remove(self, request: Request) -> None:
        """Take a finished or aborted request out, wherever it is, and give its slots back."""
        if request in self._running:
            del self._running[request]
            self._release(request)
        else:
            self._waiting = [entry for entry in self._waiting if entry[1] is not request]
            heapq.heapify(self._waiting)
        request.state = RequestState.FINISHED

    def plan(self) -> list[SequenceStep]:
        """The next step, its slots reserved. Empty only if nobody waits or runs."""
        self._admit()
        steps: list[SequenceStep] = []
        budget = self._options.chunked_prefill_size
        for request in list(self._running):
            if request not in self._running:  # preempted for an earlier one in this very loop
                continue
            decoding = request.pending == 1
            # They are worked out while the others wait for their next token.
            cost = _LOGPROBS_COST if request.wants_prompt_logprobs and len(self._running) > 1 else 1
            tokens = 1 if decoding else min(request.pending, -(-budget // cost))
            if request.pending - tokens == 1 and tokens > 1:
                tokens -= 1  # a last chunk of one token would look like a decode row
            if tokens == 0 or not self._reserve(request, tokens):
                continue
            if not decoding:
                budget = max(0, budget - tokens * cost)
            self._reserve_checkpoints(request, tokens)
            steps.append(SequenceStep(request, tokens, samples=tokens == request.pending))
        return [step for step in steps if step.request in self._running]

    def reserve_drafts(self, request: Request, drafts: int) -> int:
        """Slots for `drafts` more rows of a planned decode step; returns for how many there was room.

        Drafts are guesses, so they take free and evictable slots only and never preempt anyone.
        """
        page = self.allocator.page_size
        room = len(request.slots) - request.cached_len - 1
        if drafts > room:
            spare = self.allocator.num_free + self.cache.evictable
            pages = min(self._pages(drafts - room), spare // page)
            self._grow(request, pages)
            room += pages * page
        drafts = min(drafts, room)
        self._reserve_checkpoints(request, 1 + drafts)
        return drafts

    def commit(self, step: SequenceStep, emitted: int) -> None:
        """The step's tokens have KV, and so have all but the last of the `emitted` ones, which are appended already.

        Slots behind that point go back at once. A prompt that is now complete is shared through the tree.
        """
        request = step.request
        request.cached_len += step.num_tokens + max(0, emitted - 1)
        self._trim(request)
        if step.samples and step.num_tokens > 1:
            self._share(request)

    def _admit(self) -> None:
        self._blocked = False
        while self._waiting and len(self._running) < self.max_running:
            arrival, request = self._waiting[0]
            # The last token is always recomputed: its logits are what comes next.
            use_cache = request.sampling.prompt_logprobs is None
            match = self.cache.match(request.token_ids(0, request.num_tokens - 1) if use_cache else [])
            self.cache.lock(match.node)
            promised = sum(self._pages(r.num_tokens + 1) - self._pages(len(r.slots)) for r in self._running)
            needed = self._pages(request.num_tokens + 1) - self._pages(len(match.slots))
            spare = (self.allocator.num_free + self.cache.evictable) // self.allocator.page_size
            self._blocked = bool(self._running) and promised + needed > spare
            if self._blocked or (use_cache and self._is_computed_by_another(request, match)):
                self.cache.unlock(match.node)
                return
            heapq.heappop(self._waiting)
            request.node = match.node
            request.slots = list(match.slots)
            request.tree_len = len(match.slots)
            request.table_row = self._table.acquire()
            request.cached_len = self._start(request, match)
            if request.prefix_hit_tokens is None:
                request.prefix_hit_tokens = request.cached_len
                request.admitted_at = time.monotonic()
            self._table.write(request.table_row, 0, request.slots)
            request.state = RequestState.RUNNING
            self._running[request] = arrival

    def _is_computed_by_another(self, request: Request, match: Match) -> bool:
        """Whether a running request is about to share much more of this one's prompt than serves it of `match`."""
        computing = [other for other in self._running if other.pending > 1]
        if not computing:
            return False
        own = request.token_ids(0, request.num_tokens)
        common = max(self.cache.common_prefix(r.token_ids(0, r.num_tokens), own) for r in computing)
        if common < _WORTH_WAITING:
            return False
        return common - self._usable(request, match) >= _WORTH_WAITING

    def _start(self, request: Request, match: Match) -> int:
        """How many of its tokens an admitted request need not compute."""
        usable = self._usable(request, match)
        if self.cache.checkpoints is None:
            return usable
        checkpoint = self.cache.resume(match, usable)
        if checkpoint is None:
            return 0
        self._resume(request.table_row, checkpoint)
        return checkpoint.position

    def _usable(self, request: Request, match: Match) -> int:
        """How much of `match`, which is locked, need not or must not be computed again."""
        usable = self._usable_prefix(request, match.slots)
        if self._recomputes_exactly():
            return usable
        return max(usable, self.cache.held_by_others(match.node))

    def _reserve_checkpoints(self, request: Request, tokens: int) -> None:
        """Rows for the state at the boundaries that `tokens` more positions reach, if there are any.

        The last ones matter most: where none is left, the request gives up the first ones that it has written.
        """
        checkpoints = self.cache.checkpoints
        if checkpoints is None:
            return
        own = request.checkpoints
        for position in reversed(checkpoints.boundaries(request.cached_len, request.cached_len + tokens)):
            if position in own:
                continue
            row = checkpoints.take()
            if row is None:
                first = min(own, default=position)
                if first > request.cached_len:
                    return
                row = own.pop(first)
            own[position] = row

    def _reserve(self, request: Request, tokens: int) -> bool:
        """Make room for `tokens` more positions, evicting and then preempting later arrivals; False if preempted."""
        while True:
            pages = self._pages(request.cached_len + tokens) - self._pages(len(request.slots))
            if self._grow(request, pages):
                return True
            victim = max(self._running, key=self._running.__getitem__)
            self._preempt(victim)
            if victim is request:
                return False

    def _grow(self, request: Request, pages: int) -> bool:
        if pages <= 0:
            return True
        missing = pages * self.allocator.page_size - self.allocator.num_free
        if missing > 0:
            self.cache.evict(missing)
        slots = self.allocator.allocate(pages)
        if slots is None:
            return False
        self._table.write(request.table_row, len(request.slots), slots)
        request.slots.extend(slots)
        return True

    def _preempt(self, request: Request) -> None:
        self.preemptions += 1
        self._blocked = True
        arrival = self._running.pop(request)
        self._release(request)
        request.state = RequestState.WAITING
        heapq.heappush(self._waiting, (arrival, request))

    def _release(self, request: Request) -> None:
        """Leave what is committed to the tree, free the rest, give the row back."""
        self._before_release(request)
        self._trim(request)
        if request.cached_len > request.tree_len:
            self._share(request)
        if self.cache.checkpoints is not None:
            self.cache.checkpoints.free(request.checkpoints.values())
            request.checkpoints.clear()
        self.allocator.free(request.slots[request.tree_len :])
        self._unlock(request)
        self._table.release(request.table_row)
        request.node = None
        request.slots = []
        request.cached_len = request.tree_len = 0

    def _share(self, request: Request) -> None:
        """Put the committed whole pages into the tree; where it has them already, use its slots and free ours."""
        result = self.cache.insert(
            request.token_ids(0, request.cached_len), request.slots[: request.cached_len], request.checkpoints
        )
        self.cache.lock(result.node)
        self._unlock(request)
        request.node = result.node
        shared = len(result.slots)
        if request.slots[:shared] != result.slots:
            request.slots[:shared] = result.slots
            self._table.write(request.table_row, 0, result.slots)
        request.tree_len = shared
        for position in [position for position in request.checkpoints if position <= shared]:
            del request.checkpoints[position]

    def _unlock(self, request: Request) -> None:
        assert request.node is not None, "a running request holds a node"
        self.cache.unlock(request.node)

    def _trim(self, request: Request) -> None:
        # Behind what is computed there may still be slots of the tree, of a prefix that is computed again.
        keep = max(self._pages(request.cached_len) * self.allocator.page_size, request.tree_len)
        if keep < len(request.slots):
            self.allocator.free(request.slots[keep:])
            del request.slots[keep:]

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.allocator.page_size)
