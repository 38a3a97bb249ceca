"""An MLA model through the engine and the command line: speculation, company and prefix hits change no text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.request import SamplingParams
from engine.runner import ModelRunner
from engine.tokenizer import Tokenizer, load_tokenizer
from tests.lossless import Answer, answer, load_runner, ngram, oracle, plain
from tests.models.deepseek_checkpoints import make_checkpoint
from tests.tiny_model import save_tiny_model

Requests = dict[str, tuple[Sequence[int], SamplingParams]]

TEXTS = ["tick tock tick tock tick", "tick tock tick tock tick tack", "a b c a b c a b", "Once upon a time"]
VARIATIONS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.2, "logprobs": 1},
    {"temperature": 0.4, "seed": 1},
    {"temperature": 0.9, "seed": 2, "top_k": 20},
]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder: Path = save_tiny_model(tmp_path_factory.mktemp("deepseek"))
    make_checkpoint("v3-for-bytes", folder)
    return load_runner(str(folder), "float32", slots=1500)


@pytest.fixture(scope="module")
def tokenizer(runner: ModelRunner) -> Tokenizer:
    return load_tokenizer(runner.files)


@pytest.fixture(scope="module")
def requests(tokenizer: Tokenizer) -> Requests:
    return {
        f"{t}.{v}": (
            tokenizer.encode(text),
            SamplingParams(max_tokens=20 + 3 * v, ignore_eos=True, **variation),
        )
        for t, text in enumerate(TEXTS)
        for v, variation in enumerate(VARIATIONS)
    }


@pytest.fixture(scope="module")
def expected(runner: ModelRunner, tokenizer: Tokenizer, requests: Requests) -> dict[str, Answer]:
    """Plain decoding, one request at a time, nothing cached."""
    answers, _, _ = answer(runner, tokenizer, plain, requests, together=1, caching=False)
    return answers


def texts(answers: dict[str, Answer]) -> dict[str, tuple[int, ...]]:
    return {name: got.token_ids for name, got in answers.items()}


def test_company_and_cache_hits_change_nothing(
    runner: ModelRunner, tokenizer: Tokenizer, requests: Requests, expected: dict[str, Answer]
) -> None:
    answers, _, stats = answer(runner, tokenizer, plain, requests)
    assert stats.cached_tokens_total > 0
    assert texts(answers) == texts(expected)


def test_how_prompts_are_cut_into_chunks_changes_nothing(runner: ModelRunner, tokenizer: Tokenizer) -> None:
    sampling = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0, logprobs=1)
    requests = {str(n): (tokenizer.encode(("tick tock " * 9)[:n]), sampling) for n in (70, 31, 62, 40)}
    alone, _, _ = answer(runner, tokenizer, plain, requests, together=1, caching=False)
    beside, _, _ = answer(runner, tokenizer, plain, requests, caching=False)
    assert beside == alone, "logprobs too: a prompt is computed by one method"


def test_ngram_speculation_changes_nothing(
    runner: ModelRunner, tokenizer: Tokenizer, requests: Requests, expected: dict[str, Answer]
) -> None:
    answers, totals, _ = answer(runner, tokenizer, ngram, requests, together=1, caching=False)
    assert totals.drafted_tokens > 0
    assert answers == expected, "logprobs too: decode and verify are one method"


def test_right_and_wrong_drafts_and_preemption_change_nothing(
    runner: ModelRunner, tokenizer: Tokenizer, requests: Requests, expected: dict[str, Answer]
) -> None:
    known = texts(expected)
    answers, totals, stats = answer(runner, tokenizer, oracle(known, 0.7), requests, slots=110)
    assert totals.accepted_tokens > 50 and stats.preemptions_total > 0
    assert texts(answers) == known
