"""What a request gets does not depend on speculation, on its company, on the cache or on preemption.

The real SmolLM2, sixty-four requests that differ in everything that ends, constrains or samples a text.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.request import SamplingParams
from engine.runner import ModelRunner
from engine.tokenizer import Tokenizer, load_tokenizer
from models.default import default_model_path
from tests.lossless import Answer, answer, load_runner, ngram, oracle, plain

Requests = dict[str, tuple[Sequence[int], SamplingParams]]

QUESTIONS = [
    "Repeat after me, three times: the cat sat on the mat.",
    "Count from 1 to 20, one number in a line.",
    "Write a haiku about rain.",
    "List five fruits, separated by commas.",
    "Say hello in French, Spanish and 日本語.",
    "What is 12 * 12?",
    "Write a Python function that adds two numbers.",
    "Summarise: The quick brown fox jumps over the lazy dog. The quick brown fox runs. The lazy dog sleeps.",
]
VARIATIONS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 2},
    {"temperature": 0.0, "frequency_penalty": 0.7, "presence_penalty": 0.4, "min_tokens": 6},
    {"temperature": 0.8, "seed": 1, "top_p": 0.9},
    {"temperature": 1.0, "seed": 2, "logprobs": 0},
    {"temperature": 1.3, "seed": 3, "top_k": 20, "min_p": 0.02, "repetition_penalty": 1.1},
    {"temperature": 0.7, "seed": 4, "stop": ("the", "\n"), "logit_bias": {28: 3.0}},
    {"temperature": 0.0, "stop": ("a ",), "stop_token_ids": (30,), "ignore_eos": True, "logprobs": 1},
]


@pytest.fixture(scope="module")
def tokenizer(default_runner: ModelRunner) -> Tokenizer:
    return load_tokenizer(default_runner.files)


@pytest.fixture(scope="module")
def default_runner() -> ModelRunner:
    return load_runner(str(default_model_path()), "auto", slots=1500)


@pytest.fixture(scope="module")
def requests(tokenizer: Tokenizer) -> Requests:
    made: Requests = {}
    for q, question in enumerate(QUESTIONS):
        text = tokenizer.apply_chat_template([{"role": "user", "content": question}])
        prompt = tokenizer.encode(text, add_special_tokens=False)
        for v, variation in enumerate(VARIATIONS):
            made[f"{q}.{v}"] = (prompt, SamplingParams(max_tokens=6 + (5 * q + 3 * v) % 19, **variation))
    return made


@pytest.fixture(scope="module")
def expected(default_runner: ModelRunner, tokenizer: Tokenizer, requests: Requests) -> dict[str, Answer]:
    """Plain decoding, one request at a time, nothing cached."""
    answers, _, _ = answer(default_runner, tokenizer, plain, requests, together=1, caching=False)
    return answers


def test_the_requests_are_varied(expected: dict[str, Answer]) -> None:
    endings = {(a.finish_reason, isinstance(a.stop_reason, str)) for a in expected.values()}
    assert len(expected) >= 60
    assert endings >= {("length", False), ("stop", True)}
    assert len({a.token_ids for a in expected.values()}) > 40


def test_company_and_cache_hits_change_nothing(
    default_runner: ModelRunner, tokenizer: Tokenizer, requests: Requests, expected: dict[str, Answer]
) -> None:
    answers, _, stats = answer(default_runner, tokenizer, plain, requests)
    assert stats.cached_tokens_total > 0
    assert answers == expected


def test_ngram_speculation_changes_nothing(
    default_runner: ModelRunner, tokenizer: Tokenizer, requests: Requests, expected: dict[str, Answer]
) -> None:
    answers, totals, _ = answer(default_runner, tokenizer, ngram, requests)
    assert totals.accepted_tokens > 20 and totals.drafted_tokens > totals.accepted_tokens
    assert answers == expected


@pytest.mark.parametrize("rate", [1.0, 0.7])
def test_no_drafter_changes_anything(
    default_runner: ModelRunner,
    tokenizer: Tokenizer,
    requests: Requests,
    expected: dict[str, Answer],
    rate: float,
) -> None:
    known = {name: a.token_ids for name, a in expected.items()}
    answers, totals, _ = answer(default_runner, tokenizer, oracle(known, rate), requests)
    assert totals.accepted_tokens > 200
    assert answers == expected


def test_preemption_and_recompute_change_nothing(
    tokenizer: Tokenizer, requests: Requests, expected: dict[str, Answer], default_runner: ModelRunner
) -> None:
    known = {name: a.token_ids for name, a in expected.items()}
    answers, _, stats = answer(default_runner, tokenizer, oracle(known, 0.7), requests, slots=110)
    assert stats.preemptions_total > 0
    assert answers == expected
