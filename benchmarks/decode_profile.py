"""Which part of a decode step costs what: greedy streams without drafts, in this process and read over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from typing import Annotated

import msgspec
import uvicorn
from command import print_row, run
from cyclopts import Parameter
from cyclopts.validators import Number
from dependency_injector import providers
from in_process import InProcess, sources
from prompts import PromptOptions

from app.application import build, create_app
from app.lifecycle import Lifecycle
from app.server import Server, configure_logging, listen
from app.settings import EngineSettings, ServerSettings
from containers.application import ApplicationContainer
from engine.plain_worker import PlainWorker, Rows
from engine.request import OutputEvent, Request, SamplingParams, TokenLogprob
from engine.runner import ModelRunner
from engine.worker import SequenceStep

READERS = Path(__file__).with_name("readers.py")
_PARTS = ("engine", "batch", "pass", "sampling")
_PLACES = ("in process", "over HTTP")
_WIDTHS = (12, 10, 10, 10, 10, 10, 10)


class TimedWorker(PlainWorker):
    """Plain decoding that notes how long the parts of each decode step took, in seconds.

    Only steps of `width` rows that follow another one count: all streams decode, and none is read or ends.
    """

    def __init__(self, runner: ModelRunner, eos_token_ids: frozenset[int], width: int) -> None:
        super().__init__(runner, eos_token_ids)
        self._width = width
        # When the pass of a step that counts was done, or a token of it chosen since.
        self._sent: float | None = None
        self._sampling = 0.0
        self.parts: dict[str, list[float]] = {}
        self.clear()

    def clear(self) -> None:
        """Forget what was noted."""
        self._sent = None
        self.parts = {name: [] for name in _PARTS}

    def run_pass(self, steps: Sequence[SequenceStep]) -> Rows:
        start = time.perf_counter()
        batch = self.runner.batch(steps)
        built = time.perf_counter()
        rows, _ = self.run_batch(steps, batch)
        done = time.perf_counter()
        is_full = len(steps) == self._width and all(step.num_tokens == 1 for step in steps)
        if is_full and self._sent is not None:
            times = (start - self._sent, built - start, done - built, self._sampling)
            for name, seconds in zip(_PARTS, times, strict=True):
                self.parts[name].append(seconds)
        self._sent = done if is_full else None
        self._sampling = 0.0
        return rows

    def choose(self, step: SequenceStep, rows: Rows) -> list[tuple[int, TokenLogprob | None]]:
        chosen = super().choose(step, rows)
        if self._sent is not None:
            end = time.perf_counter()
            self._sampling += end - self._sent
            self._sent = end
        return chosen


@contextmanager
def serving(
    settings: EngineSettings, width: int, stream_interval: int
) -> Iterator[tuple[ApplicationContainer, TimedWorker, int]]:
    """A server in this process, its worker and its port. Raises ValueError where it cannot start."""
    configure_logging("warning")
    container = build(settings)
    listener = listen("127.0.0.1", 0)
    lifecycle = Lifecycle(container.startup(), container.engine)
    worker = TimedWorker(container.target.runner(), container.tokenizer().eos_token_ids, width)
    container.worker.override(providers.Object(worker))
    app = create_app(container, lifecycle, ServerSettings(stream_interval=stream_interval))
    server = Server(uvicorn.Config(app, lifespan="on", log_config=None, access_log=False), lifecycle, 0.0)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    try:
        while not lifecycle.ready:
            if lifecycle.error is not None or not thread.is_alive():
                raise ValueError(lifecycle.error or "the server ended")
            time.sleep(0.01)
        yield container, worker, listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


def read_here(
    container: ApplicationContainer, prompts: Sequence[list[int]], sampling: SamplingParams
) -> None:
    """Decode all prompts at once for nobody. Raises RuntimeError where one does not come to its end."""
    ends: SimpleQueue[OutputEvent] = SimpleQueue()

    def sink(event: OutputEvent) -> None:
        if event.finish_reason is not None:
            ends.put(event)

    container.engine().submit(
        *(Request(f"profile-{i}", prompt, sampling, sink) for i, prompt in enumerate(prompts))
    )
    for _ in prompts:
        if (end := ends.get()).finish_reason != "length":
            raise RuntimeError(f"a request ended with {end.finish_reason}: {end.error}")


def read_over_http(port: int, prompts: Sequence[list[int]], max_tokens: int) -> None:
    """Have a process of its own stream all prompts at once. Raises ValueError where it does not get them."""
    fixed = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    job = {"port": port, "bodies": [{"prompt": prompt, **fixed} for prompt in prompts]}
    done = subprocess.run(
        [sys.executable, str(READERS)], input=json.dumps(job), text=True, capture_output=True, check=False
    )
    if done.returncode != 0:
        raise ValueError(f"a reader got no whole answer: {done.stderr.strip()}")


def decode_profile(
    *,
    max_tokens: Annotated[int, Parameter(validator=Number(gte=2))] = 128,
    streams: Annotated[int, Parameter(validator=Number(gte=1))] = 1,
    repeats: Annotated[int, Parameter(validator=Number(gte=1))] = 5,
    stream_interval: Annotated[int, Parameter(validator=Number(gte=1))] = 1,
    options: Annotated[PromptOptions, Parameter(name="*")] = PromptOptions(),
    settings: Annotated[EngineSettings, Parameter(name="*")] = EngineSettings(),
) -> int:
    """Tell which part of a decode step costs what: the model's pass, building its batch, sampling, and the engine.

    Greedy, without drafts, each stream to exactly --max-tokens; in this process with nobody to read them, and over
    HTTP with a reader for each, in turns. Times are medians over all steps that have all streams.

    Parameters
    ----------
    max_tokens
        Tokens of every answer.
    streams
        Prompts that are decoded at once.
    repeats
        How many times the streams are decoded, both ways.
    stream_interval
        Tokens that the server sends together.
    """
    with serving(settings, streams, stream_interval) as (container, worker, port):
        prompts = fitting(container, options, max_tokens)
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        parts: dict[str, dict[str, list[float]]] = {where: {name: [] for name in _PARTS} for where in _PLACES}
        for turn in range(repeats):
            for at in range(0, len(prompts), streams):
                group = [prompts[(at + i) % len(prompts)] for i in range(streams)]
                for where in _PLACES[:: 1 if turn % 2 else -1]:
                    worker.clear()
                    if where == "in process":
                        read_here(container, group, sampling)
                    else:
                        read_over_http(port, group, max_tokens)
                    for name in _PARTS:
                        parts[where][name] += worker.parts[name]
    summary = summarise(parts)
    print_row(("ms a step", *_PARTS, "step", "over pass"), _WIDTHS)
    for where, found in summary["parts"].items():
        times = [f"{found[name]:.3f}" for name in (*_PARTS, "step")]
        print_row((where, *times, f"+{found['added']:.1%}"), _WIDTHS)
    if options.json:
        print(msgspec.json.encode(summary).decode())
    return 0


def fitting(container: ApplicationContainer, options: PromptOptions, max_tokens: int) -> list[list[int]]:
    """Token ids of the prompts that fit in the context. Raises ValueError where none does."""
    encode = InProcess(container.engine(), container.tokenizer(), container.max_context_len()).encode
    found = []
    for prompt in options.read():
        prompt_ids = encode(prompt.turns[:1])
        if len(prompt_ids) + max_tokens > container.max_context_len():
            print(f"prompt {prompt.id}: skipped, it does not fit in the context", flush=True)
            continue
        found.append(prompt_ids)
    if not found:
        raise ValueError("no prompt fits in the context")
    return found


def summarise(
    parts: Mapping[str, Mapping[str, Sequence[float]]],
) -> dict[str, dict[str, dict[str, float]]]:
    """Of each place: medians in milliseconds, their sum, and by how much that exceeds the pass in process.

    Raises ValueError where there was no step that has all streams.
    """
    if not all(parts[where][name] for where in parts for name in _PARTS):
        raise ValueError("no step had all streams (are there fewer places for running requests?)")
    times = {where: {name: 1000 * median(found[name]) for name in _PARTS} for where, found in parts.items()}
    alone = times["in process"]["pass"]
    return {
        "parts": {
            where: {**found, "step": sum(found.values()), "added": sum(found.values()) / alone - 1}
            for where, found in times.items()
        }
    }


if __name__ == "__main__":
    sys.exit(run(decode_profile, config=sources(os.environ)))
