"""A checkpoint quantised as it is loaded: what is held, how near it stays, and where it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.cpu import library
from models.base import ModelError
from models.layers import Linear
from models.loader import ModelFiles, inspect_model, load_model, resolve_precision
from models.moe import Router
from models.options import ModelOptions, Quantization
from models.weights import Precision
from tests.models.checkpoints import make_checkpoint
from tests.models.harness import Sequences
from tests.models.hybrid_checkpoints import CHECKPOINTS as HYBRID
from tests.models.hybrid_checkpoints import make_checkpoint as make_hybrid

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not library.available(), reason=str(library.reason()))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    folder = tmp_path_factory.mktemp("made") / "tiny-llama"
    make_checkpoint("llama", folder)
    return inspect_model(ModelOptions(model=str(folder)))


def logits(files: ModelFiles, precision: Precision) -> torch.Tensor:
    return Sequences(load_model(files, CPU, precision)).extend({0: list(range(3, 40))})[0]


@pytest.mark.parametrize(("quantization", "error"), (("int8", 0.05), ("int4", 0.4)))
def test_logits_stay_near_those_of_the_checkpoint(
    files: ModelFiles, quantization: Quantization, error: float
) -> None:
    exact = logits(files, Precision(torch.float32))
    found = logits(files, resolve_precision(files, "auto", CPU, True, quantization))
    difference = ((found - exact).norm() / exact.norm()).item()
    assert 0 < difference < error


def test_four_bits_hold_the_layers_and_eight_the_ends(files: ModelFiles) -> None:
    model = load_model(files, CPU, resolve_precision(files, "auto", CPU, True, "int4"))
    linears = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
    formats = {name: {weight.format for weight in linear.weights} for name, linear in linears.items()}
    assert formats.pop("lm_head") == {"Q8_0/native"}
    assert len(formats) > 4
    assert all(held == {"Q4_1/native"} for held in formats.values())


@pytest.mark.parametrize(
    "family", ["qwen3-moe", "qwen3-next", "granite-hybrid-experts", "nemotron-h-experts"]
)
def test_what_decides_among_experts_is_left_as_it_is(family: str, tmp_path: Path) -> None:
    (make_hybrid if family in HYBRID else make_checkpoint)(family, tmp_path)
    files = inspect_model(ModelOptions(model=str(tmp_path)))
    model = load_model(files, CPU, resolve_precision(files, "auto", CPU, True, "int4"))
    routers = [module for module in model.modules() if isinstance(module, Router)]
    assert routers
    assert {router.weight.format.removesuffix("/native") for router in routers} == {"F32"}


def test_it_is_refused_by_name_where_it_cannot_be_had(files: ModelFiles, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"quantization 'int8'.*native"):
        resolve_precision(files, "auto", CPU, False, "int8")
    with pytest.raises(ModelError, match="quantization 'int4'"):
        resolve_precision(files, "bfloat16", CPU, True, "int4")
    with pytest.raises(ModelError, match="quantization 'int8'"):
        resolve_precision(files, "auto", torch.device("cuda"), True, "int8")
    gguf = ModelFiles("gguf", tmp_path / "m.gguf", (), 0, files.config, "m")
    with pytest.raises(ModelError, match=r"m\.gguf.*GGUF"):
        resolve_precision(gguf, "auto", CPU, True, "int8")
