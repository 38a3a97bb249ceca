"""docs/add-a-backend.md, followed: a backend of this file serves a model by an override, and as an installed package."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from dependency_injector import providers
from transformers import LlamaForCausalLM

from app.settings import EngineSettings
from backends.base import AttentionBackend, AttentionLayer
from backends.forward import ForwardBatch
from backends.handlers import always_absorbed
from backends.options import AttentionOptions
from backends.registry import BackendSpec
from backends.setup import AttentionBackends, build_attention_backends
from containers.application import ApplicationContainer
from tests.app.test_server_process import FLAGS, serving
from tests.containers.test_application import complete
from tests.tiny_model import save_tiny_model

PROMPT = "tick tock tick tock tick"
COUNT = 12


class DenseBackend(AttentionBackend):
    """Gathers a sequence's whole context, and attends to it one query at a time, in float64."""

    name = "mine"

    def plan(self, batch: ForwardBatch) -> list[torch.Tensor]:
        contexts = zip(batch.table_rows, batch.context_lens, strict=True)
        return [batch.slot_table[row, :length].long() for row, length in contexts]

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        plan: object,
    ) -> torch.Tensor:
        assert isinstance(plan, list)
        batch.kv_pool.write(layer.layer_id, batch.out_slots, key, value)
        group = layer.num_heads // layer.num_kv_heads
        out = []
        for rows, slots in zip(query.double().split(batch.query_lens), plan, strict=True):
            keys, values = (
                entries.double().repeat_interleave(group, 1)
                for entries in batch.kv_pool.gather(layer.layer_id, slots)
            )
            for position, row in enumerate(rows, start=len(slots) - len(rows)):
                first = 0 if layer.sliding_window is None else max(0, position + 1 - layer.sliding_window)
                seen = slice(first, position + 1 if batch.causal else len(slots))
                scores = torch.einsum("hd,khd->hk", row, keys[seen]) * layer.scale
                if layer.logit_softcap is not None:
                    scores = layer.logit_softcap * torch.tanh(scores / layer.logit_softcap)
                out.append(torch.einsum("hk,khd->hd", scores.softmax(-1), values[seen]))
        return torch.stack(out).to(query.dtype)


SPEC = BackendSpec(
    make=lambda args: DenseBackend(), unusable=lambda device, layout: None, handler=always_absorbed
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    """What transformers says after PROMPT, whose tokens are its bytes."""
    prompt = ApplicationContainer(settings=EngineSettings(model=str(model))).tokenizer().encode(PROMPT)
    ids = (
        LlamaForCausalLM.from_pretrained(model)
        .eval()
        .generate(torch.tensor([prompt]), max_new_tokens=COUNT, do_sample=False)
    )
    return ids[0, len(prompt) :].tolist()


def test_by_an_override(model: Path, expected: list[int]) -> None:
    built: list[AttentionBackends] = []

    def build(*, options: AttentionOptions, **worker: Any) -> AttentionBackends:
        mine = AttentionOptions(attention_backend="mine")
        built.append(build_attention_backends(options=mine, specs={"mine": SPEC}, **worker))
        return built[-1]

    container = ApplicationContainer(
        settings=EngineSettings(model=str(model), dtype="float32", device="cpu", max_total_tokens=512)
    )
    container.target.attention_backends.override(providers.Singleton(build))
    answer = complete(container, PROMPT, max_tokens=COUNT, temperature=0.0, ignore_eos=True)
    assert answer.token_ids == expected
    [backends] = built
    assert isinstance(backends.attn_backend, DenseBackend)
    assert backends.attn_backend.prefill_attention_backend_str == "mine"


def test_by_an_entry_point_of_an_installed_package(model: Path, expected: list[int], tmp_path: Path) -> None:
    package = tmp_path / "my_package-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(
        "[tandem.attention_backends]\nmine = tests.backends.test_add_a_backend:SPEC\n"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    flags = [*FLAGS, "--attention-backend", "mine", "--model", str(model)]
    with serving(*flags, PYTHONPATH=path) as server:
        server.wait_until(200)
        client: httpx.Client = server.client
        target = client.get("/server_info").json()["workers"]["target"]
        assert target["prefill_attention_backend"] == target["decode_attention_backend"] == "mine"
        body = {"prompt": PROMPT, "max_tokens": COUNT, "temperature": 0, "ignore_eos": True}
        text = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        assert text == client.post("/detokenize", json={"tokens": expected}).json()["prompt"]
