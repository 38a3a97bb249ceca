"""Tandem in this process, without HTTP: one request at a time, with its token ids and exact counters."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import count

from anyio.from_thread import start_blocking_portal
from timing import Timing

from app.application import build
from app.deps import EnginePort, TokenizerPort
from app.lifecycle import Lifecycle
from app.sampling_settings import SamplingSettings
from app.settings import EngineSettings, ServerSettings
from app.sources import Sources
from containers.application import ApplicationContainer
from containers.startup import StartUpError
from engine.request import OutputEvent, Request, SamplingParams, SpeculationParams, SpeculationStats


@dataclass(frozen=True)
class Answer:
    """One request's answer."""

    text: str
    token_ids: tuple[int, ...]
    timing: Timing
    speculation: SpeculationStats


class InProcess:
    """A running engine."""

    def __init__(
        self,
        engine: EnginePort,
        tokenizer: TokenizerPort,
        max_context_len: int,
        algorithms: Sequence[str] = ("none",),
    ) -> None:
        """`algorithms` are those that a request may ask for."""
        self.algorithms = algorithms
        self._engine = engine
        self._tokenizer = tokenizer
        self.max_context_len = max_context_len
        self._ids = count()

    def encode(self, turns: Sequence[str]) -> list[int]:
        """Token ids of a conversation: the user speaks first, then answers and questions take turns.

        A model without a chat template gets the turns as plain text.
        """
        if self._tokenizer.chat_template is None:
            return self._tokenizer.encode("\n".join(turns))
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
        text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return self._tokenizer.encode(text, add_special_tokens=False)

    def generate(
        self, prompt_ids: Sequence[int], sampling: SamplingParams, algorithm: str | None = None
    ) -> Answer:
        """Run one request to its end. Raises InvalidRequest where the prompt does not fit, RuntimeError on failure."""
        events: list[OutputEvent] = []
        arrivals: list[tuple[float, int]] = []
        done = threading.Event()

        def sink(event: OutputEvent) -> None:
            if event.token_ids:
                arrivals.append((time.perf_counter(), len(event.token_ids)))
            events.append(event)
            if event.finish_reason is not None:
                done.set()

        speculation = SpeculationParams(algorithm=algorithm)
        request = Request(
            f"benchmark-{next(self._ids)}", list(prompt_ids), sampling, sink, speculation=speculation
        )
        start = time.perf_counter()
        self._engine.submit(request)
        done.wait()
        last = events[-1]
        if last.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"the request ended with {last.finish_reason}: {last.error}")
        return Answer(
            "".join(event.text for event in events),
            tuple(token for event in events for token in event.token_ids),
            Timing.of(start, arrivals),
            last.speculation or SpeculationStats(),
        )


def sources(environ: Mapping[str, str]) -> Sources:
    """Engine settings beside flags: `TANDEM_*` variables and --config, as for `tandem` itself."""
    schemas = (ServerSettings, SamplingSettings)
    return Sources(environ, {field.name for schema in schemas for field in fields(schema)})


def same_tokens(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two texts have in common before the first one that differs."""
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


@contextmanager
def tandem(
    settings: EngineSettings, wire: Callable[[EngineSettings], ApplicationContainer] = build
) -> Iterator[InProcess]:
    """An engine that is up inside and gone outside. Raises ValueError where it cannot start."""
    container = wire(settings)
    lifecycle = Lifecycle(container.startup(), container.engine)
    with start_blocking_portal() as portal:
        try:
            ended, _ = portal.start_task(lifecycle.run)
        except StartUpError as error:
            raise ValueError(str(error)) from error
        try:
            yield InProcess(
                container.engine(),
                container.tokenizer(),
                container.max_context_len(),
                container.algorithms(),
            )
        finally:
            portal.call(lifecycle.stop)
            ended.result()
