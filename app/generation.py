"""Between the event loop and the engine: an API request becomes engine requests, their events an async iteration.

The engine calls sinks on its own thread. Events of all clients go into one mailbox, and the event loop is woken
once for as many as have come by then, so a step with many requests costs one wake-up.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import chain
from operator import itemgetter

from msgspec.structs import replace
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from app.answers import PromptTokensDetails, SpeculationUsage, Usage
from app.deps import EnginePort
from app.errors import ApiError, from_engine, unavailable
from app.metrics import Metrics, Timing
from engine.errors import EngineStopped, InvalidRequest, QueueFull
from engine.request import EventSink, OutputEvent, Request, SamplingParams, SpeculationParams

Burst = list[tuple[int, OutputEvent]]
"""What came since the last look: (index of the choice, event)."""

LONGEST_WAIT = 0.2  # seconds that tokens wait for more, in a stream that sends several together


class _Mailbox:
    """Carries events from any thread to `loop`, waking it once a burst."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._events: deque[tuple[Callable[[OutputEvent], None], OutputEvent]] = deque()
        self._woken = False

    def put(self, receiver: Callable[[OutputEvent], None], event: OutputEvent) -> None:
        """On the engine thread: have `receiver(event)` called on the loop."""
        self._events.append((receiver, event))
        if self._woken:
            return
        self._woken = True
        with suppress(RuntimeError):  # the loop has closed: nobody waits for this any more
            self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        # Cleared first: an event that comes while this runs wakes the loop again rather than be left behind.
        self._woken = False
        while self._events:
            receiver, event = self._events.popleft()
            receiver(event)


class Generation:
    """The choices of one API request, in flight. Lives on the event loop.

    Its `bursts` go on until every choice has finished. They raise ApiError where a choice fails, and ClientDisconnect
    once the client has gone.
    """

    def __init__(self, engine: EnginePort, mailbox: _Mailbox, metrics: Metrics) -> None:
        self.sink: EventSink = partial(mailbox.put, self._receive)
        self._engine = engine
        self._metrics = metrics
        self._requests: Sequence[Request] = ()
        self._indices: dict[str, int] = {}
        self._timings: list[Timing] = []
        self._burst: Burst = []
        self._held: Counter[int] = Counter()  # tokens in it, by choice
        self._interval = 1
        self._seen: set[int] = set()  # choices of which something was to be seen
        self._timer: asyncio.TimerHandle | None = None  # while tokens wait for more
        self._news = asyncio.Event()
        self._gone = False
        self._last_events: dict[int, OutputEvent] = {}

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue the choices, in order, all or none. Raises ApiError 400, 429 or 503 where the engine refuses."""
        self._requests = requests
        self._indices = {request.request_id: index for index, request in enumerate(requests)}
        self._timings = [self._metrics.start() for _ in requests]
        try:
            self._engine.submit(*requests)
        except (InvalidRequest, QueueFull, EngineStopped) as error:
            raise from_engine(error) from error

    def _receive(self, event: OutputEvent) -> None:
        index = self._indices[event.request_id]
        self._metrics.observe(self._timings[index], self._requests[index], event)
        if event.finish_reason is not None:
            self._last_events[index] = event
        self._burst.append((index, event))
        self._held[index] += len(event.token_ids)
        if self._held[index] >= self._interval or index not in self._seen or event.finish_reason is not None:
            self._news.set()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LONGEST_WAIT, self._news.set)
        if event.text or event.logprobs:
            self._seen.add(index)

    async def bursts(self, interval: int = 1) -> AsyncIterator[Burst]:
        """What has come, one event for each choice: the first tokens of a choice and the last at once, others when
        there are `interval` of one choice, or when they have waited for long."""
        self._interval = interval
        left = len(self._indices)
        while left:
            await self._news.wait()
            self._news.clear()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._gone:
                raise ClientDisconnect
            burst, self._burst = self._burst, []
            failures = [(at, failure) for at, (_, event) in enumerate(burst) if (failure := _failure(event))]
            if failures:
                at, failure = failures[0]
                if at:  # what came before it was emitted all the same
                    yield _merged(burst[:at])
                raise failure
            left -= sum(event.finish_reason is not None for _, event in burst)
            self._held.clear()
            yield _merged(burst)

    @asynccontextmanager
    async def attached(self, receive: Receive) -> AsyncIterator[None]:
        """Watch the connection meanwhile; on the way out, for whatever reason, abort what has not finished."""
        watcher = asyncio.create_task(self._watch(receive))
        try:
            yield
        finally:
            watcher.cancel()
            self.abort()

    def abort(self) -> None:
        """Have the engine drop the choices that have not finished."""
        for request_id, index in self._indices.items():
            if index not in self._last_events:
                self._engine.abort(request_id)

    def usage(self) -> Usage:
        """What all choices used, once they have finished. A prompt counts once, however many its choices."""
        prompt = completion = cached = 0
        speculation = SpeculationUsage(0, 0, 0)
        for index, request in enumerate(self._requests):
            event = self._last_events[index]
            completion += event.completion_tokens
            # Later choices of a prompt find what the first one cached; that says nothing of the prompt.
            if request.choice == 0:
                prompt += len(request.prompt_ids)
                cached += event.cached_tokens
            if stats := event.speculation:
                speculation.drafted_tokens += stats.drafted_tokens
                speculation.accepted_tokens += stats.accepted_tokens
                speculation.verify_steps += stats.verify_steps
        return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached), speculation)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self.abort()
        self._news.set()


def _merged(burst: Burst) -> Burst:
    """One event for each choice, with all that its events say."""
    if len(burst) == 1:
        return burst
    events: dict[int, list[OutputEvent]] = {}
    for index, event in burst:
        events.setdefault(index, []).append(event)
    return [(index, _joined(own)) for index, own in events.items()]


def _joined(events: Sequence[OutputEvent]) -> OutputEvent:
    if len(events) == 1:
        return events[0]
    return replace(
        events[-1],
        text="".join(event.text for event in events),
        token_ids=tuple(chain.from_iterable(event.token_ids for event in events)),
        logprobs=tuple(chain.from_iterable(event.logprobs for event in events)),
        prompt_logprobs=next((e.prompt_logprobs for e in events if e.prompt_logprobs is not None), None),
    )


def _failure(event: OutputEvent) -> ApiError | None:
    if event.finish_reason == "error":
        return ApiError(500, event.error or "the request failed")
    if event.finish_reason == "abort":
        return unavailable(event.error or "the server is shutting down")
    return None


class Generator:
    """Starts generations on the engine."""

    def __init__(self, engine: Callable[[], EnginePort], metrics: Metrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._mailbox: _Mailbox | None = None

    def start(
        self,
        api_id: str,
        prompts: Sequence[list[int]],
        n: int,
        sampling: SamplingParams,
        speculation: SpeculationParams,
    ) -> Generation:
        """Submit `n` choices for each prompt, all or none; choice j of prompt i has index `i * n + j`.

        Call it on the event loop, and give the result to `attached` before anything is awaited.
        Raises ApiError 400, 429 or 503 where the engine refuses.
        """
        loop = asyncio.get_running_loop()
        if self._mailbox is None or self._mailbox.loop is not loop:
            self._mailbox = _Mailbox(loop)
        generation = Generation(self._engine(), self._mailbox, self._metrics)
        generation.submit(
            [
                Request(
                    request_id=f"{api_id}-{i * n + j}",
                    prompt_ids=prompt,
                    sampling=sampling,
                    sink=generation.sink,
                    choice=j,
                    speculation=speculation,
                )
                for i, prompt in enumerate(prompts)
                for j in range(n)
            ]
        )
        return generation


async def collect(generation: Generation, receive: Receive) -> list[OutputEvent]:
    """All of each choice, as one event. Raises as iterating does; the choices are aborted if the client goes away."""
    events: Burst = []
    async with generation.attached(receive):
        async for burst in generation.bursts(sys.maxsize):
            events += burst
    return [event for _, event in sorted(_merged(events), key=itemgetter(0))]
