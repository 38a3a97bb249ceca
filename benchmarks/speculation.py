"""What speculation gains, by algorithm and kind of prompt, and that it changes no token."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
from command import print_row, run
from cyclopts import Parameter
from cyclopts.validators import Number
from dependency_injector import providers
from in_process import Answer, InProcess, same_tokens, sources, tandem
from prompts import Prompt, PromptOptions
from timing import total

from app.application import build
from app.settings import EngineSettings
from containers.application import ApplicationContainer
from engine.errors import InvalidRequest
from engine.request import SamplingParams
from speculative.adaptive import Choice, PayoffController, Prospect

BASELINE = "none"
_WIDTHS = (20, 10, 8, 14, 10, 8)


@dataclass(frozen=True)
class Row:
    """One turn of one prompt, answered with each algorithm."""

    category: str
    answers: Mapping[str, Answer]

    @property
    def identical(self) -> bool:
        """Whether all algorithms gave the same token ids."""
        return len({answer.token_ids for answer in self.answers.values()}) == 1


class Everything(PayoffController):
    """Has everything drafted and verified, whether or not it pays."""

    def choose(self, prospects: Sequence[Prospect], rows: int, pass_rows: int = 1) -> Choice:
        return Choice([i for i, prospect in enumerate(prospects) if prospect.worth is not None], True)

    def plan(self, drafts: Sequence[Sequence[float]], rows: int, drafting: int = 0) -> list[int]:
        return [len(draft) for draft in drafts]


def without_control(settings: EngineSettings) -> ApplicationContainer:
    """The application, but that all drafts are made and verified."""
    container = build(settings)
    container.controller.override(providers.Singleton(Everything))
    return container


def speculation(
    *,
    max_tokens: Annotated[int, Parameter(validator=Number(gte=2))] = 256,
    temperature: Annotated[float, Parameter(validator=Number(gte=0))] = 0.0,
    always: Annotated[bool, Parameter(negative=())] = False,
    only: str | None = None,
    options: Annotated[PromptOptions, Parameter(name="*")] = PromptOptions(),
    settings: Annotated[EngineSettings, Parameter(name="*")] = EngineSettings(),
) -> int:
    """Answer each prompt with every algorithm in turn, one at a time, and compare speed and token ids.

    The algorithms are those that the engine offers to a request: none and that of --speculative-algorithm, and with
    auto each of those that it chooses from.
    Exits with 1 if any answer differs.

    Parameters
    ----------
    max_tokens
        Longest answer.
    temperature
        Of sampling, with a seed by prompt. 0: greedy.
    only
        Compare this algorithm alone with none. Then it may draft from its answers to earlier prompts as well, as
        --speculative-ngram-history says. Several algorithms may not: each would find the answer that another has just
        given.
    always
        Make and verify all drafts, whether or not they pay: accept lengths are then those of the drafter by itself.
    """
    if only == BASELINE:
        raise ValueError(f"--only {BASELINE}: that is what the others are compared with")
    prompts = options.read()
    rows: list[Row] = []
    skipped: list[str] = []
    if only is None:
        settings = replace(settings, speculative_ngram_history=0)
    with tandem(settings, without_control if always else build) as engine:
        algorithms = engine.algorithms if only is None else (BASELINE, only)
        if only is not None and only not in engine.algorithms:
            raise ValueError(f"--only {only}: the engine offers {', '.join(engine.algorithms)}")
        # The first steps of a shape are slow.
        for algorithm in algorithms:
            engine.generate(engine.encode(["Count to ten."]), SamplingParams(max_tokens=16), algorithm)
        for number, prompt in enumerate(prompts):
            sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=number)
            # Who goes first changes: no algorithm always meets the warm cache, or the busier moment.
            first = number % len(algorithms)
            order = [*algorithms[first:], *algorithms[:first]]
            try:
                for row in converse(engine, prompt, sampling, order):
                    rows.append(row)
                    if not row.identical:
                        print(f"prompt {prompt.id}: {_difference(row)}", flush=True)
            except InvalidRequest as error:
                skipped.append(prompt.id)
                print(f"prompt {prompt.id}: skipped from here on ({error})", flush=True)
    if not rows:
        raise ValueError(f"{options.prompts}: no prompt fits in the context")
    return report(rows, algorithms, skipped, options.json)


def converse(
    engine: InProcess, prompt: Prompt, sampling: SamplingParams, algorithms: Sequence[str]
) -> list[Row]:
    """All turns of a prompt; the history holds the baseline's answers, so that all algorithms see the same."""
    rows = []
    history: list[str] = []
    for turn in prompt.turns:
        history.append(turn)
        prompt_ids = engine.encode(history)
        answers = {name: engine.generate(prompt_ids, sampling, name) for name in algorithms}
        rows.append(Row(prompt.category, answers))
        history.append(answers[BASELINE].text)
    return rows


def summarise(rows: Sequence[Row], algorithms: Sequence[str]) -> dict[str, Any]:
    """Per algorithm, over all rows and by category."""
    categories = {row.category: [other for other in rows if other.category == row.category] for row in rows}
    return {
        "identical": all(row.identical for row in rows),
        "rows": len(rows),
        "different_rows": sum(not row.identical for row in rows),
        **{name: _measures(rows, name) for name in algorithms},
        "categories": {
            category: {name: _measures(own, name) for name in algorithms}
            for category, own in categories.items()
        },
    }


def report(rows: Sequence[Row], algorithms: Sequence[str], skipped: Sequence[str], as_json: bool) -> int:
    """Print the measures; the exit code is 1 if any row differs."""
    summary = summarise(rows, algorithms)
    print_row(("category", "algorithm", "accept", "verified share", "tokens/s", "speed-up"), _WIDTHS)
    for category, measures in [*summary["categories"].items(), ("all", summary)]:
        for name in algorithms:
            row = measures[name]
            cells = (row["accept_length"], row["verified_share"], row["tokens_per_s"], row["speedup"])
            print_row((category, name, *cells), _WIDTHS)
    same = summary["rows"] - summary["different_rows"]
    print(f"{same} of {summary['rows']} rows are identical with every algorithm")
    if as_json:
        print(msgspec.json.encode({**summary, "skipped": skipped}).decode())
    return 0 if summary["identical"] else 1


def _measures(rows: Sequence[Row], name: str) -> dict[str, float]:
    """Accept length, decoded tokens a second, and that over the baseline's."""
    answers = [row.answers[name] for row in rows]
    steps = sum(answer.speculation.verify_steps for answer in answers)
    emitted = sum(answer.speculation.verify_emitted_tokens for answer in answers)
    speed = total(answer.timing for answer in answers).tokens_per_s
    baseline = total(row.answers[BASELINE].timing for row in rows).tokens_per_s
    tokens = sum(len(answer.token_ids) for answer in answers)
    return {
        "accept_length": emitted / steps if steps else 1.0,  # a plain step emits one token
        "tokens_per_s": speed,
        "speedup": speed / baseline if baseline else 1.0,
        "verified_share": emitted / tokens if tokens else 0.0,  # of all tokens, from steps with drafts
    }


def _difference(row: Row) -> str:
    expected = row.answers[BASELINE].token_ids
    return ", ".join(
        f"{name} differs from {BASELINE} at token {same_tokens(expected, answer.token_ids)}"
        for name, answer in row.answers.items()
        if answer.token_ids != expected
    )


if __name__ == "__main__":
    sys.exit(run(speculation, config=sources(os.environ)))
