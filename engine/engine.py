"""The decode loop: takes requests in, steps, and sends out what each step adds.

`run()` occupies one thread; everything else here is safe to call from any thread. Hand-over is by a locked inbox
and a wake-up on the way in, and by each request's `sink` on the way out; nobody polls.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from engine.errors import EngineStopped, InvalidRequest, QueueFull
from engine.request import FinishReason, OutputEvent, Request, TokenLogprob
from engine.scheduler import Scheduler
from engine.stopping import StopChecker
from engine.tokenizer import Tokenizer
from engine.worker import GenerationWorker, SequenceStep, StepOutput

logger = logging.getLogger(__name__)


class EngineStats(msgspec.Struct, frozen=True):
    """A snapshot for probes and metrics. Slots are counted in tokens; totals grow for the life of the process."""

    running: int = 0
    waiting: int = 0
    slots_total: int = 0
    slots_free: int = 0
    slots_evictable: int = 0
    slots_protected: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    cached_tokens_total: int = 0
    drafted_tokens_total: int = 0
    accepted_tokens_total: int = 0
    verify_steps_total: int = 0
    preemptions_total: int = 0
    steps_total: int = 0
    requests_finished: Mapping[str, int] = {}
    worker: Mapping[str, float] = {}  # the worker's own gauges


@dataclass(slots=True)
class _Live:
    """What the engine keeps for a request beside its own state."""

    request: Request
    stops: StopChecker
    prompt_logprobs: list[TokenLogprob | None] | None


class Engine:
    """Serves requests with one worker. Build it, `run()` it on a thread of its own, `submit` from anywhere."""

    def __init__(
        self,
        worker: GenerationWorker,
        scheduler: Callable[[], Scheduler],
        tokenizer: Tokenizer,
        vocab_size: int,
        max_context_len: Callable[[], int],
        max_queued_requests: int,
    ) -> None:
        """`scheduler` and `max_context_len` are called when the loop starts: they depend on the loaded model.

        `vocab_size` is the model's; its tokenizer may know more tokens than that, or fewer.
        """
        self._worker = worker
        self._make_scheduler = scheduler
        self._get_max_context_len = max_context_len
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_queued = max_queued_requests
        self._wake = threading.Condition()
        self._inbox: deque[Request] = deque()
        self._aborts: set[str] = set()
        self._stopping = False
        self._open = False
        self._room = 0  # requests that may still be submitted
        self._live: dict[str, _Live] = {}
        self._totals: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._stats = EngineStats()
        self.max_context_len = 0
        self.started = threading.Event()

    # -- from any thread ---------------------------------------------------------------------------------------

    def submit(self, *requests: Request) -> None:
        """Queue requests, all or none. Raises InvalidRequest, QueueFull or EngineStopped, and then queued none."""
        with self._wake:
            self._check_room(len(requests))
        # Choices of one prompt share it, and it may be long.
        for request in {id(request.prompt_ids): request for request in requests}.values():
            self._check(request)
        with self._wake:
            self._check_room(len(requests))
            self._room -= len(requests)
            self._inbox.extend(requests)
            self._wake.notify()

    def abort(self, request_id: str) -> None:
        """End a request before the next step. Unknown and finished ids are ignored."""
        with self._wake:
            self._aborts.add(request_id)
            self._wake.notify()

    def stop(self) -> None:
        """Make `run` return after the current step; requests still in flight end with `abort`."""
        with self._wake:
            self._stopping = True
            self._open = False
            self._wake.notify()

    def stats(self) -> EngineStats:
        """The state after the last step."""
        return self._stats

    @property
    def num_unfinished(self) -> int:
        """Requests submitted and not yet answered to the end."""
        return len(self._live) + len(self._inbox)

    # -- on the engine thread ----------------------------------------------------------------------------------

    def run(self) -> None:
        """Step until `stop`. If the loop itself fails, every request is answered with an error, then it raises."""
        self._scheduler = self._make_scheduler()
        self.max_context_len = self._get_max_context_len()
        self._publish()
        self._count_room()
        with self._wake:
            self._open = not self._stopping
        self.started.set()
        try:
            while self._take_in():
                if self._scheduler.has_work:
                    self.step()
        except BaseException as error:
            logger.exception("the decode loop failed")
            self._end_all("error", f"engine failure: {error}")
            raise
        self._end_all("abort", None)

    def step(self) -> None:
        """Plan, draft, compute, emit: one token or one verified block for every request that takes part."""
        worker, scheduler = self._worker, self._scheduler
        steps = self._with_drafts(scheduler.plan())
        self._count_room()
        outputs = worker.forward(steps)
        for step, output in zip(steps, outputs, strict=True):
            self._emit(step, output)
        self._totals["steps"] += 1
        self._publish()

    def _check_room(self, count: int) -> None:
        if not self._open:
            raise EngineStopped("the engine is not running")
        most = self._scheduler.max_running + self._max_queued
        if count > most:  # no use in trying again
            raise InvalidRequest(
                f"{count} choices at once are more than may run and wait here: {most} "
                "(--max-running-requests and --max-queued-requests)",
                param="n",
            )
        if count > self._room:
            raise QueueFull(self._max_queued, retry_after=1 + max(0, self._max_queued - self._room) // 8)

    def _check(self, request: Request) -> None:
        if not request.prompt_ids:
            raise InvalidRequest("the prompt has no tokens", param="prompt")
        highest = max(request.prompt_ids)
        if highest >= self._vocab_size:  # some tokenizers have tokens that their model was never given
            raise InvalidRequest(
                f"token {highest} of the prompt is not in the model's vocabulary of {self._vocab_size}",
                param="prompt",
            )
        limit = self.max_context_len
        if limit and len(request.prompt_ids) >= limit + (request.sampling.max_tokens == 0):
            raise InvalidRequest(
                f"the prompt has {len(request.prompt_ids)} tokens, which leaves no room in a context of {limit}",
                param="prompt",
            )

    def _take_in(self) -> bool:
        """Wait for something to do, then take in new requests and aborts. False when it is time to stop."""
        with self._wake:
            while not (self._inbox or self._aborts or self._stopping or self._scheduler.has_work):
                self._wake.wait()
            if self._stopping:
                return False
            aborts, self._aborts = self._aborts, set()
            requests = list(self._inbox)
        for request in requests:
            # Sampling is keyed by the seed, so an unseeded request needs one that nobody else has.
            seed = request.sampling.seed
            request.seed = secrets.randbits(63) if seed is None else seed
            wants_prompt = request.sampling.prompt_logprobs is not None
            self._live[request.request_id] = _Live(
                request,
                StopChecker(self._tokenizer, request, self.max_context_len),
                [None] if wants_prompt else None,
            )
            self._scheduler.add(request)
            self._totals["prompt_tokens"] += len(request.prompt_ids)
            self._inbox.popleft()  # after it is live, so that num_unfinished never misses it
        for request_id in aborts:
            if live := self._live.get(request_id):
                self._finish(live, OutputEvent(request_id, "", (), finish_reason="abort"))
        if aborts:
            self._publish()
        return True

    def _count_room(self) -> None:
        """What has just come counts as running while there are seats for it."""
        scheduler = self._scheduler
        with self._wake:
            waiting = len(self._inbox) + scheduler.num_waiting
            self._room = self._max_queued + scheduler.num_seats - waiting

    def _with_drafts(self, steps: list[SequenceStep]) -> list[SequenceStep]:
        """Add drafts to decode rows, as many as the request, its context and the pool have room for."""
        limits = [self._draft_limit(step) for step in steps]
        drafting = [index for index, limit in enumerate(limits) if limit > 0]
        if not drafting:
            return steps
        proposals = self._worker.draft(
            [steps[index].request for index in drafting],
            [limits[index] for index in drafting],
            sum(step.num_tokens for step in steps),
        )
        for index, drafts in zip(drafting, proposals, strict=True):
            if not drafts:
                continue
            step = steps[index]
            room = self._scheduler.reserve_drafts(step.request, len(drafts))
            steps[index] = SequenceStep(step.request, step.num_tokens, True, tuple(drafts[:room]))
        return steps

    def _draft_limit(self, step: SequenceStep) -> int:
        request = step.request
        if not step.samples or step.num_tokens != 1:
            return 0
        # One token comes from the target in any case: only what could follow it is worth a guess.
        left = request.sampling.max_tokens - len(request.output_ids) - 1
        context = self.max_context_len - request.num_tokens - 1
        return min(left, context, self._worker.max_draft_tokens(request))

    def _emit(self, step: SequenceStep, output: StepOutput) -> None:
        """Cut the step's tokens where the request ends, keep and send what is left."""
        request = step.request
        live = self._live[request.request_id]
        if output.error is not None:
            logger.warning("request %s ends with an error: %s", request.request_id, output.error)
            self._finish(
                live, OutputEvent(request.request_id, "", (), finish_reason="error", error=output.error)
            )
            return
        if live.prompt_logprobs is not None:
            # By position: after a preemption the prompt is gone through again.
            live.prompt_logprobs[request.cached_len + 1 :] = output.prompt_logprobs

        text, kept, shown = "", 0, 0
        finish: FinishReason | None = None
        stop_reason: str | int | None = None
        if step.samples and request.sampling.max_tokens == 0:
            finish = "length"
        else:
            for token in output.token_ids:
                request.output_ids.append(token)
                kept += 1
                pushed = live.stops.push(token)
                text += pushed.text
                shown += not pushed.is_hidden
                finish, stop_reason = pushed.finish_reason, pushed.stop_reason
                if finish is not None:
                    break
        self._count(step, kept, accepted=min(kept, len(output.token_ids) - 1))
        self._scheduler.commit(step, kept)
        self._worker.observe(request, step, kept)
        if not kept and finish is None:
            return
        event = OutputEvent(
            request.request_id,
            text,
            output.token_ids[:kept],
            output.logprobs[:shown],
            finish_reason=finish,
            stop_reason=stop_reason,
            prompt_logprobs=tuple(live.prompt_logprobs) if live.prompt_logprobs is not None else None,
        )
        live.prompt_logprobs = None
        if finish is not None:
            self._finish(live, event)
        else:
            self._send(request, event)

    def _count(self, step: SequenceStep, kept: int, accepted: int) -> None:
        totals, stats = self._totals, step.request.stats
        totals["generation_tokens"] += kept
        if not step.drafts:
            return
        stats.drafted_tokens += len(step.drafts)
        stats.accepted_tokens += accepted
        stats.verify_steps += 1
        stats.verify_emitted_tokens += kept
        totals["drafted_tokens"] += len(step.drafts)
        totals["accepted_tokens"] += accepted
        totals["verify_steps"] += 1

    def _finish(self, live: _Live, event: OutputEvent) -> None:
        """Give the request's slots back and send its last event."""
        request = live.request
        del self._live[request.request_id]
        self._scheduler.remove(request)
        self._worker.release(request)
        self._count_room()
        reason: FinishReason = event.finish_reason or "stop"
        self._finished[reason] += 1
        self._totals["cached_tokens"] += request.prefix_hit_tokens or 0
        self._send(request, event)

    def _send(self, request: Request, event: OutputEvent) -> None:
        """Send `event` with the request's counts, which are the same for whoever made it."""
        complete = replace(
            event,
            prompt_tokens=len(request.prompt_ids),
            completion_tokens=len(request.output_ids),
            cached_tokens=request.prefix_hit_tokens or 0,
            speculation=request.stats if event.finish_reason is not None else None,
        )
        try:
            request.sink(complete)
        except Exception:
            # A receiver that is gone must not take the others down with it.
            logger.warning("request %s: its receiver failed; aborting it", request.request_id, exc_info=True)
            if event.finish_reason is None:
                self.abort(request.request_id)

    def _end_all(self, reason: FinishReason, error: str | None) -> None:
        with self._wake:
            self._open = False
            requests = [live.request for live in self._live.values()]
            requests += [request for request in self._inbox if request.request_id not in self._live]
            self._inbox.clear()
        self._live.clear()
        for request in requests:
            self._finished[reason] += 1
            self._send(request, OutputEvent(request.request_id, "", (), finish_reason=reason, error=error))
        self._stats = replace(self._stats, running=0, waiting=0, requests_finished=dict(self._finished))

    def _publish(self) -> None:
        scheduler, totals = self._scheduler, self._totals
        cache, allocator = scheduler.cache, scheduler.allocator
        self._stats = EngineStats(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            slots_total=allocator.num_slots,
            slots_free=allocator.num_free,
            slots_evictable=cache.evictable,
            slots_protected=cache.protected,
            prompt_tokens_total=totals["prompt_tokens"],
            generation_tokens_total=totals["generation_tokens"],
            cached_tokens_total=totals["cached_tokens"],
            drafted_tokens_total=totals["drafted_tokens"],
            accepted_tokens_total=totals["accepted_tokens"],
            verify_steps_total=totals["verify_steps"],
            preemptions_total=scheduler.preemptions,
            steps_total=totals["steps"],
            requests_finished=dict(self._finished),
            worker=self._worker.gauges(),
        )
