"""`--attention-backend triton` serves a model on a CPU, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from transformers import LlamaForCausalLM

from tests.app.test_server_process import FLAGS, serving
from tests.tiny_model import save_tiny_model

PROMPT = "tick tock tick tock tick"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def client(model: Path) -> Iterator[httpx.Client]:
    """Of a server that is ready."""
    flags = [*FLAGS, "--attention-backend", "triton", "--model", str(model)]
    with serving(*flags, TRITON_INTERPRET="1") as server:
        server.wait_until(200)
        yield server.client


def test_both_names_of_the_target_are_the_one_that_was_asked_for(client: httpx.Client) -> None:
    target = client.get("/server_info").json()["workers"]["target"]
    assert target["prefill_attention_backend"] == target["decode_attention_backend"] == "triton"


@pytest.mark.parametrize("algorithm", ["none", "ngram"])
def test_its_greedy_text_is_that_of_transformers(client: httpx.Client, model: Path, algorithm: str) -> None:
    """A prompt, decodes and verified blocks; the second time round, a prefix hit."""
    answer = client.post(
        "/v1/completions",
        json={
            "prompt": PROMPT,
            "max_tokens": 16,
            "temperature": 0,
            "ignore_eos": True,
            "speculation": {"algorithm": algorithm},
        },
    ).json()
    assert answer["usage"]["speculation"]["verify_steps"] == 0 or algorithm == "ngram"
    reference = LlamaForCausalLM.from_pretrained(model).eval()
    ids = client.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    continued = reference.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)[0, len(ids) :]
    expected = client.post("/detokenize", json={"tokens": continued.tolist()}).json()["prompt"]
    assert answer["choices"][0]["text"] == expected
