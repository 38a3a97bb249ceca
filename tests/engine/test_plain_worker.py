"""A step whose requests all take the best token leaves its logits in the native pass; what others see is the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from backends.forward import ForwardBatch
from engine.graphs import StepGraph, capture
from engine.plain_worker import PlainWorker
from engine.request import Request, SamplingParams
from engine.tokenizer import load_tokenizer
from engine.worker import SequenceStep
from kernels.cpu.step_plan import Chosen
from models.loader import inspect_model
from models.options import ModelOptions
from tests.lossless import Answer, answer, load_runner, ngram, plain
from tests.native import needs_native
from tests.tiny_model import save_tiny_model

pytestmark = needs_native

PROMPT = list(range(40, 70))


@dataclass
class Noting:
    """A graph that notes what it was asked for."""

    graph: StepGraph
    asked: set[str] = field(default_factory=set)

    def fits(self, batch: ForwardBatch) -> bool:
        return self.graph.fits(batch)

    def run(self, batch: ForwardBatch) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        self.asked.add("logits")
        return self.graph.run(batch)

    def choose(self, batch: ForwardBatch, chances: bool) -> Chosen:
        self.asked.add("tokens")
        return self.graph.choose(batch, chances)


class Unsound(Noting):
    """One whose model overflows."""

    def choose(self, batch: ForwardBatch, chances: bool) -> Chosen:
        return Chosen([-1] * len(batch.logits_rows), [], {})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


def captured(*parts: Any) -> StepGraph:
    graph = capture(*parts)
    assert graph is not None
    return graph


def ask(
    model: Path,
    make_graph: Callable[[StepGraph], StepGraph | None],
    *params: SamplingParams,
    drafts: bool = False,
) -> list[Answer]:
    runner = load_runner(str(model), "auto", 900, capture_graph=lambda *parts: make_graph(captured(*parts)))
    tokenizer = load_tokenizer(inspect_model(ModelOptions(model=str(model))))
    requests = {str(number): (PROMPT[number:], wanted) for number, wanted in enumerate(params)}
    answers, _, _ = answer(runner, tokenizer, ngram if drafts else plain, requests)
    return list(answers.values())


def greedy(**params: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 20, "ignore_eos": True, **params})


@pytest.mark.parametrize("drafts", [False, True])
def test_greedy_requests_need_no_logits(model: Path, drafts: bool) -> None:
    noting: list[Noting] = []

    def note(graph: StepGraph) -> StepGraph:
        noting.append(Noting(graph))
        return noting[-1]

    found = ask(model, note, greedy(), greedy(stop=("x",)), drafts=drafts)
    assert noting[0].asked == {"tokens"}
    assert found == ask(model, lambda graph: None, greedy(), greedy(stop=("x",)))


@pytest.mark.parametrize(
    "other",
    [
        {"temperature": 0.7, "seed": 1},
        {"logprobs": 0},
        {"prompt_logprobs": 0},
        {"logit_bias": {50: 5.0}},
        {"repetition_penalty": 1.5},
        {"min_tokens": 20},
    ],
    ids=lambda other: next(iter(other)),
)
def test_one_that_wants_more_has_its_step_give_logits(model: Path, other: dict[str, Any]) -> None:
    noting: list[Noting] = []

    def note(graph: StepGraph) -> StepGraph:
        noting.append(Noting(graph))
        return noting[-1]

    both = ask(model, note, greedy(max_tokens=30), greedy(**other))
    assert noting[0].asked == {"tokens", "logits"}, "and behind its end, tokens again"
    assert both == ask(model, lambda graph: None, greedy(max_tokens=30), greedy(**other))


def test_logits_that_are_not_finite_end_the_request(model: Path) -> None:
    runner = load_runner(str(model), "auto", 900, capture_graph=lambda *parts: Unsound(captured(*parts)))
    worker = PlainWorker(runner, frozenset())
    request = Request("r", PROMPT, greedy(), lambda event: None, slots=list(range(40)))
    request.table_row = 0
    (output,) = worker.forward([SequenceStep(request, len(PROMPT), samples=True)])
    assert output.error == f"the model's logits for position {len(PROMPT)} are not finite"
