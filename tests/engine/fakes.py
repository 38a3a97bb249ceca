"""A worker without a model, and what an engine needs beside it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from engine.allocator import SlotAllocator
from engine.engine import Engine
from engine.options import SchedulerOptions
from engine.radix_cache import RadixCache
from engine.request import OutputEvent, Request, SamplingParams, TokenLogprob
from engine.scheduler import Scheduler
from engine.slot_table import SlotTable
from engine.worker import SequenceStep, StepOutput

EOS = 0


class LetterTokenizer:
    """Token n is the nth letter of the alphabet; token 0 ends a text."""

    vocab_size = 27
    eos_token_ids = special_token_ids = frozenset({EOS})

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(self.letter(token, skip_special_tokens) for token in ids)

    def token_bytes(self, token_id: int) -> bytes:
        return self.letter(token_id, False).encode()

    @staticmethod
    def letter(token: int, skip_special_tokens: bool) -> str:
        if token == EOS:
            return "" if skip_special_tokens else "$"
        return chr(ord("a") + token - 1)


def letters(text: str) -> list[int]:
    return [ord(letter) - ord("a") + 1 for letter in text]


@dataclass
class CountingWorker:
    """Continues every text with the next letter of the alphabet, after z with a. Drafts right, `wrong` of them wrong."""

    num_drafts: int = 0
    wrong: int = 0
    fail_on: Callable[[Request], str | None] = lambda request: None
    released: list[str] = field(default_factory=list)
    gate: threading.Semaphore | None = None  # steps wait for it, if given

    def max_draft_tokens(self, request: Request) -> int:
        return self.num_drafts

    def draft(self, requests: Sequence[Request], limits: Sequence[int], rows: int) -> list[tuple[int, ...]]:
        return [self._drafts(request, limit) for request, limit in zip(requests, limits, strict=True)]

    def forward(self, steps: Sequence[SequenceStep]) -> list[StepOutput]:
        if self.gate is not None:
            self.gate.acquire()
        return [self._output(step) for step in steps]

    def observe(self, request: Request, step: SequenceStep, emitted: int) -> None:
        pass

    def usable_prefix(self, request: Request, slots: Sequence[int]) -> int:
        return len(slots)

    def before_release(self, request: Request) -> None:
        pass

    def gauges(self) -> Mapping[str, float]:
        return {}

    def release(self, request: Request) -> None:
        self.released.append(request.request_id)

    def _drafts(self, request: Request, limit: int) -> tuple[int, ...]:
        right = self._continue(request, limit)
        return tuple(right[: max(0, limit - self.wrong)] + [EOS] * min(self.wrong, limit))

    def _output(self, step: SequenceStep) -> StepOutput:
        error = self.fail_on(step.request)
        if error is not None:
            return StepOutput(error=error)
        if not step.samples:
            return StepOutput()
        tokens = self._continue(step.request, len(step.drafts) + 1)
        agreed = 0
        while agreed < len(step.drafts) and step.drafts[agreed] == tokens[agreed]:
            agreed += 1
        kept = tuple(tokens[: agreed + 1])
        return StepOutput(kept, tuple(TokenLogprob(token, 0.0, ()) for token in kept))

    @staticmethod
    def _continue(request: Request, count: int) -> list[int]:
        last = request.token_ids(request.num_tokens - 1, request.num_tokens)[0]
        return [(last - 1 + step) % 26 + 1 for step in range(1, count + 1)]


class Receiver:
    """Collects the events of one request; `wait()` returns when the last one is there."""

    def __init__(self) -> None:
        self.events: list[OutputEvent] = []
        self.first = threading.Event()
        self._done = threading.Event()

    def __call__(self, event: OutputEvent) -> None:
        self.events.append(event)
        self.first.set()
        if event.finish_reason is not None:
            self._done.set()

    def wait(self) -> OutputEvent:
        assert self._done.wait(120), "the request never ended"
        return self.events[-1]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    @property
    def token_ids(self) -> list[int]:
        return [token for event in self.events for token in event.token_ids]


def make_request(name: str, prompt: str, **sampling: object) -> tuple[Request, Receiver]:
    receiver = Receiver()
    return Request(name, letters(prompt), SamplingParams(**sampling), sink=receiver), receiver


@contextmanager
def running_engine(
    worker: object,
    slots: int = 256,
    context: int = 128,
    running: int = 4,
    queued: int = 8,
) -> Iterator[Engine]:
    """An engine whose loop runs on a thread until the block ends."""

    def scheduler() -> Scheduler:
        allocator = SlotAllocator(slots, 1)
        options = SchedulerOptions(max_running_requests=running, chunked_prefill_size=16)
        table = SlotTable(running, context, torch.device("cpu"))
        return Scheduler(options, allocator, RadixCache(allocator), table)

    engine = Engine(worker, scheduler, LetterTokenizer(), LetterTokenizer.vocab_size, lambda: context, queued)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            engine.run()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    engine.started.wait(10)
    try:
        yield engine
    finally:
        engine.stop()
        thread.join(30)
        assert not thread.is_alive()
        engine.failures = failures  # type: ignore[attr-defined]
