"""The model that ships answers as transformers does on the same weights, read from the same file by transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.request import SamplingParams
from engine.tokenizer import Tokenizer, load_tokenizer
from models.default import default_model_path
from models.loader import inspect_model
from models.options import ModelOptions
from tests.lossless import answer, load_runner, ngram

QUESTIONS = [
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain photosynthesis to a child.",
    "def fibonacci(n):",
]
LENGTH = 24


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(inspect_model(ModelOptions(model=str(default_model_path()))))


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> dict[str, list[int]]:
    return {
        question: tokenizer.encode(
            tokenizer.apply_chat_template([{"role": "user", "content": question}]), add_special_tokens=False
        )
        for question in QUESTIONS
    }


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    path = default_model_path()
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)


def test_greedy_text_equals_that_of_transformers(
    reference: PreTrainedModel, tokenizer: Tokenizer, prompts: dict[str, list[int]]
) -> None:
    runner = load_runner(str(default_model_path()), "float32", slots=600)
    params = SamplingParams(max_tokens=LENGTH, temperature=0)
    answers, _, _ = answer(runner, tokenizer, ngram, {name: (ids, params) for name, ids in prompts.items()})

    for name, ids in prompts.items():
        generated = reference.generate(
            torch.tensor([ids]),
            max_new_tokens=LENGTH,
            do_sample=False,
            eos_token_id=sorted(tokenizer.eos_token_ids),
        )
        expected = generated[0, len(ids) :].tolist()
        assert list(answers[name].token_ids) == expected
        assert answers[name].text == tokenizer.decode(expected)
