"""The native kernels: families give transformers' logits through them, and a row's bits never depend on its company."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.tokenizer import load_tokenizer
from kernels.cpu.step_plan import StepPlan
from models.base import CausalLM
from models.decoder import Decoder
from models.default import default_model_path
from models.layers import DecoderLayer
from models.llama import LlamaForCausalLM
from models.loader import inspect_model, load_model
from models.options import ModelOptions
from models.rotary import Rotation
from models.source import SafetensorsSource
from models.step_plan import step_plan
from models.weights import Precision, Weights
from tests.models.checkpoints import make_checkpoint
from tests.models.harness import Sequences
from tests.native import needs_native

pytestmark = needs_native

CPU = torch.device("cpu")
FAMILIES = ["llama-biases", "llama-tied", "llama-yarn", "mistral", "qwen2-window", "qwen3", "gemma3"]


def load(path: str) -> CausalLM:
    files = inspect_model(ModelOptions(model=path))
    return load_model(files, CPU, Precision(torch.float32, native=True))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("captured", [True, False], ids=["step plan", "layer by layer"])
def test_float32_weights_give_the_logits_of_transformers(name: str, captured: bool, tmp_path: Path) -> None:
    reference = make_checkpoint(name, tmp_path)
    ids = torch.randint(3, 240, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.inference_mode():
        expected = reference(input_ids=torch.tensor([ids])).logits[0]
    sequences = Sequences(load(str(tmp_path)), captured=captured)

    parts = [sequences.extend({1: ids[::-1], 0: ids[:20]})[0]]
    for start, stop in ((20, 21), (21, 29), (29, 40)):
        parts.append(sequences.extend({0: ids[start:stop], 2: ids[: stop - start]})[0])

    torch.testing.assert_close(torch.cat(parts), expected, atol=1e-4, rtol=0)


class HalvedLayer(DecoderLayer):
    """Computes something else over the parts of a plain layer."""

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        return hidden + 0.5 * self.self_attn(self.input_layernorm(hidden), rotation)


class HalvedModel(LlamaForCausalLM):
    layer_class = HalvedLayer


class LouderModel(LlamaForCausalLM):
    def finish_logits(self, logits: torch.Tensor) -> torch.Tensor:
        return 2 * logits


@pytest.mark.parametrize("family", [HalvedModel, LouderModel])
def test_a_family_that_computes_something_else_gets_no_step_plan(
    family: type[Decoder], tmp_path: Path
) -> None:
    make_checkpoint("llama-tied", tmp_path)
    files = inspect_model(ModelOptions(model=str(tmp_path)))

    def built(family: type[Decoder]) -> StepPlan | str:
        weights = Weights(
            SafetensorsSource(files.weight_files), "here", CPU, Precision(torch.float32, native=True)
        )
        with torch.inference_mode():
            return step_plan(family(files.config, weights))

    assert isinstance(built(LlamaForCausalLM), StepPlan)
    assert isinstance(built(family), str)


@pytest.fixture(scope="module")
def default_model() -> CausalLM:
    return load(str(default_model_path()))


def test_a_quantised_model_has_one_arithmetic_for_prefill_chunk_decode_and_verify(
    default_model: CausalLM,
) -> None:
    ids = torch.randint(100, 40_000, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = Sequences(default_model, captured=True).extend({0: ids})[0]

    company = Sequences(default_model, captured=True)
    parts = [company.extend({1: ids[::-1], 0: ids[:20]})[0]]
    for start, stop in ((20, 21), (21, 23), (23, 31), (31, 47), (47, 70)):
        parts.append(company.extend({0: ids[start:stop], 2: ids[: stop - start], 3: ids[:3]})[0])

    assert torch.equal(torch.cat(parts), expected)


def test_quantised_logits_are_close_to_those_of_the_dequantised_weights(default_model: CausalLM) -> None:
    files = inspect_model(ModelOptions(model=str(default_model_path())))
    exact = load_model(files, CPU, Precision(torch.float32))
    text = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    ids = load_tokenizer(files).encode(text)[:160]
    native, reference = (
        sequences.extend({0: ids})[0][:-1].log_softmax(-1)
        for sequences in (Sequences(default_model, 1, 512, captured=True), Sequences(exact, 1, 512))
    )
    target = torch.tensor(ids[1:])[:, None]
    losses = [-logprobs.gather(1, target).mean().item() for logprobs in (native, reference)]
    divergence = (reference.exp() * (reference - native)).sum(-1).mean().item()

    assert abs(losses[0] - losses[1]) < 0.02, "perplexity within 2 %, on this little text"
    assert divergence < 0.01
