"""Which part of a decode step costs what: greedy streams, one at a time and without drafts, through the engine."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Annotated

import msgspec
from command import print_row, run
from cyclopts import Parameter
from cyclopts.validators import Number
from dependency_injector import providers
from in_process import sources, tandem
from prompts import PromptOptions

from app.application import build
from app.settings import EngineSettings
from containers.application import ApplicationContainer
from engine.plain_worker import PlainWorker, Rows
from engine.request import Request, SamplingParams, TokenLogprob
from engine.runner import ModelRunner
from engine.worker import SequenceStep

_WIDTHS = (10, 9, 7)


class TimedWorker(PlainWorker):
    """Plain decoding that notes how long the parts of each decode step took, in seconds."""

    def __init__(self, runner: ModelRunner, eos_token_ids: frozenset[int]) -> None:
        super().__init__(runner, eos_token_ids)
        self._decoding = False
        self._sent: float | None = None  # when the request's last token went out
        self.parts: dict[str, list[float]] = {"engine": [], "batch": [], "pass": [], "sampling": []}

    def run_pass(self, steps: Sequence[SequenceStep]) -> Rows:
        start = time.perf_counter()
        batch = self.runner.batch(steps)
        built = time.perf_counter()
        rows, _ = self.run_batch(steps, batch)
        self._decoding = self._sent is not None
        if self._sent is not None:
            self.parts["engine"].append(start - self._sent)
            self.parts["batch"].append(built - start)
            self.parts["pass"].append(time.perf_counter() - built)
        return rows

    def choose(self, step: SequenceStep, rows: Rows) -> list[tuple[int, TokenLogprob | None]]:
        start = time.perf_counter()
        chosen = super().choose(step, rows)
        self._sent = time.perf_counter()
        if self._decoding:
            self.parts["sampling"].append(self._sent - start)
        return chosen

    def release(self, request: Request) -> None:
        super().release(request)
        self._sent = None


def decode_profile(
    *,
    max_tokens: Annotated[int, Parameter(validator=Number(gte=2))] = 128,
    options: Annotated[PromptOptions, Parameter(name="*")] = PromptOptions(),
    settings: Annotated[EngineSettings, Parameter(name="*")] = EngineSettings(),
) -> int:
    """Tell which part of a decode step costs what: the model's pass, building its batch, sampling, and the engine.

    One request at a time, greedy, each to exactly --max-tokens. Times are medians over all steps.

    Parameters
    ----------
    max_tokens
        Tokens of every answer.
    """
    prompts = options.read()
    timed: list[TimedWorker] = []

    def wire(settings: EngineSettings) -> ApplicationContainer:
        container = build(settings)
        timed.append(TimedWorker(container.target.runner(), container.tokenizer().eos_token_ids))
        container.worker.override(providers.Object(timed[0]))
        return container

    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    with tandem(settings, wire) as engine:
        for prompt in prompts:
            prompt_ids = engine.encode(prompt.turns[:1])
            if len(prompt_ids) + max_tokens > engine.max_context_len:
                print(f"prompt {prompt.id}: skipped, it does not fit in the context", flush=True)
                continue
            engine.generate(prompt_ids, sampling)
    summary = summarise(timed[0].parts)
    print_row(("part", "ms", "share"), _WIDTHS)
    for name, part in summary["parts"].items():
        print_row((name, f"{part['ms']:.3f}", f"{part['share']:.1%}"), _WIDTHS)
    if options.json:
        print(msgspec.json.encode(summary).decode())
    return 0


def summarise(parts: Mapping[str, Sequence[float]]) -> dict[str, dict[str, dict[str, float]]]:
    """Medians in milliseconds, and their shares of a step."""
    if not all(parts.values()):
        raise ValueError("no prompt fits in the context")
    times = {name: 1000 * median(seconds) for name, seconds in parts.items()}
    whole = sum(times.values())
    return {"parts": {name: {"ms": ms, "share": ms / whole} for name, ms in times.items()}}


if __name__ == "__main__":
    sys.exit(run(decode_profile, config=sources(os.environ)))
