"""What a request to a model with recurrent state gets does not depend on drafts, company, earlier prompts or preemption."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from engine.request import SamplingParams
from engine.runner import ModelRunner
from engine.worker import GenerationWorker
from speculative.worker import SpeculativeWorker
from tests.engine.fakes import LetterTokenizer
from tests.lossless import Answer, WorkerMaker, answer, load_runner, ngram, oracle, plain
from tests.models.hybrid_checkpoints import make_checkpoint

FAMILIES = [
    "qwen3-next",
    "qwen3-5",
    "lfm2",
    "mamba2",
    "nemotron-h",
    "granite-hybrid",
]
VARIATIONS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 0.9, "seed": 1, "top_p": 0.9, "logprobs": 1},
    {"temperature": 1.2, "seed": 2, "stop_token_ids": tuple(range(40))},
]
Requests = dict[str, tuple[Sequence[int], SamplingParams]]


def make_requests() -> Requests:
    """Prompts of 1 to 60 tokens, of which each second one begins like that before it."""
    rng = random.Random(0)
    made: Requests = {}
    prompt: list[int] = []
    for index, length in enumerate((1, 17, 40, 60, 15, 32, 33, 5)):
        shared = prompt[: length // 2] if index % 2 else []
        prompt = shared + [rng.randrange(3, 240) for _ in range(length - len(shared))]
        variation = VARIATIONS[index % len(VARIATIONS)]
        made[str(index)] = prompt, SamplingParams(max_tokens=12 + 3 * index, ignore_eos=True, **variation)
    return made


REQUESTS = make_requests()


@pytest.fixture(scope="module", params=FAMILIES)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder: Path = tmp_path_factory.mktemp(request.param)
    make_checkpoint(request.param, folder)
    return load_runner(str(folder), "float32", slots=800)


@pytest.fixture(scope="module")
def expected(runner: ModelRunner) -> dict[str, Answer]:
    """Plain decoding, one request at a time."""
    answers, _, _ = answer(runner, LetterTokenizer(), plain, REQUESTS, together=1, caching=False)
    assert len({a.token_ids for a in answers.values()}) == len(REQUESTS)
    return answers


def detecting(make: WorkerMaker) -> WorkerMaker:
    """Workers that have gone through their start-up hook."""

    def made(runner: ModelRunner, eos: frozenset[int]) -> GenerationWorker:
        worker = make(runner, eos)
        assert isinstance(worker, SpeculativeWorker)
        worker.detect_mamba_commit()
        assert worker.need_mamba_verify_commit
        return worker

    return made


def known(expected: Mapping[str, Answer]) -> dict[str, tuple[int, ...]]:
    return {name: a.token_ids for name, a in expected.items()}


@pytest.mark.parametrize("rate", [1.0, 0.8, 0.0])
def test_no_drafter_changes_anything(runner: ModelRunner, expected: dict[str, Answer], rate: float) -> None:
    make = detecting(oracle(known(expected), rate))
    answers, totals, _ = answer(runner, LetterTokenizer(), make, REQUESTS)
    assert totals.drafted_tokens > 100
    assert (totals.accepted_tokens > 50) == (rate > 0)
    assert answers == expected


def test_ngram_speculation_changes_nothing(runner: ModelRunner, expected: dict[str, Answer]) -> None:
    answers, totals, _ = answer(runner, LetterTokenizer(), detecting(ngram), REQUESTS)
    assert totals.drafted_tokens > 0
    assert answers == expected


def test_preemption_and_earlier_prompts_change_nothing(
    runner: ModelRunner, expected: dict[str, Answer]
) -> None:
    make = detecting(oracle(known(expected), 0.8))
    answers, _, stats = answer(runner, LetterTokenizer(), make, REQUESTS, slots=90)
    assert stats.preemptions_total > 0
    assert stats.cached_tokens_total > 0
    assert answers == expected
