"""A narrow KV cache changes logits by little, and what speculation, company and preemption give by nothing."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from backends.forward import ForwardBatch
from engine.graphs import NativeGraph, StepGraph, capture
from engine.options import CacheOptions, KVCacheDtype
from engine.request import Request, SamplingParams
from engine.runner import ModelRunner
from engine.tokenizer import Tokenizer, load_tokenizer
from engine.worker import SequenceStep
from kernels.cpu.step_plan import Chosen
from models.loader import inspect_model
from models.options import Dtype, ModelOptions
from tests.lossless import answer, load_runner, oracle, plain
from tests.models import deepseek_checkpoints
from tests.models.checkpoints import make_checkpoint
from tests.native import needs_native
from tests.tiny_model import save_tiny_model

DTYPES: list[KVCacheDtype] = ["bfloat16", "float16", "fp8", "int8"]
# Root mean square of the change of logits, in units of theirs.
BOUNDS = {"bfloat16": 0.01, "float16": 0.001, "fp8": 0.1, "int8": 0.02}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def models(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    latent, llama = tmp_path_factory.mktemp("latent"), tmp_path_factory.mktemp("llama")
    deepseek_checkpoints.make_checkpoint("v3", latent)
    make_checkpoint("llama", llama)
    return {"tiny": tiny, "llama": llama, "latent": latent}


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Tokenizer:
    return load_tokenizer(inspect_model(ModelOptions(model=str(tiny))))


def started(
    model: Path,
    kv_cache_dtype: KVCacheDtype,
    dtype: Dtype = "float32",
    capture_graph: Callable[..., StepGraph | None] = capture,
) -> ModelRunner:
    return load_runner(str(model), dtype, 900, capture_graph=capture_graph, kv_cache_dtype=kv_cache_dtype)


def logits(runner: ModelRunner, tokens: Sequence[int]) -> torch.Tensor:
    """Of a prompt's last token, and of the tokens of a block to verify after it."""
    request = Request("r", list(tokens[:-4]), SamplingParams(), lambda event: None, slots=list(range(64)))
    assert runner.slot_table is not None
    request.table_row = 0
    runner.slot_table.write(0, 0, request.slots)
    prompt = runner.forward(runner.batch([SequenceStep(request, len(request.prompt_ids), True)])).logits
    request.cached_len = len(request.prompt_ids)
    request.output_ids.append(tokens[-4])
    block = runner.forward(runner.batch([SequenceStep(request, 1, True, tuple(tokens[-3:]))])).logits
    return torch.cat([prompt, block])


def change(a: torch.Tensor, b: torch.Tensor) -> float:
    centred = [x - x.mean(-1, keepdim=True) for x in (a, b)]
    return float((centred[0] - centred[1]).norm() / centred[1].norm())


PROMPT = random.Random(0).choices(range(256), k=60)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", ["llama", "latent"])
def test_logits_change_by_little(models: dict[str, Path], model: str, dtype: KVCacheDtype) -> None:
    expected = logits(started(models[model], "float32"), PROMPT)
    assert 0 < change(logits(started(models[model], dtype), PROMPT), expected) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
@pytest.mark.parametrize("factor", [2.0**-16, 2.0**16])
def test_however_small_or_large_keys_and_values_are(
    models: dict[str, Path], tmp_path: Path, dtype: KVCacheDtype, factor: float
) -> None:
    """Values times `factor`, and keys by its root, divided out again by what reads them."""
    for file in models["llama"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    for name, by in {"k": factor**0.5, "q": factor**-0.5, "v": factor, "o": 1 / factor}.items():
        for layer in range(2):
            weights[f"model.layers.{layer}.self_attn.{name}_proj.weight"] *= by
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    expected = logits(started(models["llama"], "float32"), PROMPT)
    assert change(logits(started(tmp_path, "float32"), PROMPT), expected) < 1e-4
    assert change(logits(started(tmp_path, dtype), PROMPT), expected) < BOUNDS[dtype]


def requests() -> dict[str, tuple[Sequence[int], SamplingParams]]:
    """Beginnings that are shared, prompts of one block of keys and of two, greedy and at temperature."""
    draw = random.Random(1)
    common = [draw.randrange(256) for _ in range(90)]
    made: dict[str, tuple[Sequence[int], SamplingParams]] = {}
    for index in range(6):
        prompt = common[: 30 * (index % 3 + 1)] + [draw.randrange(256) for _ in range(5 + 11 * index)]
        sampling = SamplingParams(
            max_tokens=14, ignore_eos=True, temperature=0.0 if index % 2 else 1.0, seed=index
        )
        made[str(index)] = (prompt, sampling)
    return made


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", ["tiny", "latent"])
def test_speculation_company_and_preemption_change_nothing(
    models: dict[str, Path], tokenizer: Tokenizer, model: str, dtype: KVCacheDtype
) -> None:
    runner = started(models[model], dtype)
    expected, _, _ = answer(runner, tokenizer, plain, requests(), together=1, caching=False)
    known = {name: given.token_ids for name, given in expected.items()}
    answers, totals, stats = answer(runner, tokenizer, oracle(known, 0.7), requests(), slots=250)
    assert totals.accepted_tokens > 10 and stats.preemptions_total + stats.cached_tokens_total > 0
    assert answers == expected


class Captured:
    """Captures as start-up does, and counts the passes that the captured form ran."""

    def __init__(self) -> None:
        self.graph: StepGraph | None = None
        self.passes = 0

    def __call__(self, *parts: Any) -> StepGraph | None:
        self.graph = capture(*parts)
        return None if self.graph is None else self

    def fits(self, batch: ForwardBatch) -> bool:
        return self.graph is not None and self.graph.fits(batch)

    def run(self, batch: ForwardBatch) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        assert self.graph is not None
        self.passes += 1
        return self.graph.run(batch)

    def choose(self, batch: ForwardBatch, chances: bool) -> Chosen:
        assert self.graph is not None
        self.passes += 1
        return self.graph.choose(batch, chances)


@needs_native
@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_the_native_plan_runs_over_a_quantised_cache_and_speculation_changes_nothing(
    models: dict[str, Path], tokenizer: Tokenizer, dtype: KVCacheDtype
) -> None:
    captured = Captured()
    runner = started(models["tiny"], dtype, "auto", captured)
    assert isinstance(captured.graph, NativeGraph)
    layer_by_layer = logits(started(models["tiny"], dtype, "auto", lambda *parts: None), PROMPT)
    assert change(logits(runner, PROMPT), layer_by_layer) < 0.02
    assert captured.passes == 2
    expected, _, _ = answer(runner, tokenizer, plain, requests(), together=1, caching=False)
    known = {name: given.token_ids for name, given in expected.items()}
    before = captured.passes
    answers, totals, stats = answer(runner, tokenizer, oracle(known, 0.7), requests(), slots=250)
    assert totals.accepted_tokens > 10 and stats.preemptions_total + stats.cached_tokens_total > 0
    assert captured.passes > before
    assert answers == expected


@needs_native
def test_where_no_native_plan_takes_the_dtype_passes_run_layer_by_layer_and_the_log_says_so(
    tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "engine.graphs"):
        runner = started(tiny, "float16", dtype="auto")
    assert "no native step plan: it has no attention over a KV cache of float16" in caplog.text
    expected = logits(started(tiny, "float32", dtype="auto"), PROMPT)
    assert change(logits(runner, PROMPT), expected) < BOUNDS["float16"] + 0.02


def test_each_worker_has_the_dtype_that_was_asked_for_it(tiny: Path) -> None:
    asked = CacheOptions(kv_cache_dtype="int8", speculative_draft_kv_cache_dtype="bf16")
    assert (asked.dtype_of("target"), asked.dtype_of("draft")) == ("int8", "bf16")
    assert CacheOptions(kv_cache_dtype="fp8").dtype_of("draft") == "fp8"
    assert started(tiny, "fp8").describe()["kv_cache_dtype"] == "fp8_e4m3"
    assert started(tiny, "auto").describe()["kv_cache_dtype"] == "float32"
