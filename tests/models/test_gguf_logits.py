"""A model run from a GGUF file gives the logits of the checkpoint that the file was converted from."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoModelForCausalLM

from models.gguf import GGUFSource
from models.loader import inspect_model, load_model
from models.options import ModelOptions
from models.weights import Precision
from tests.models.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.models.gguf_files import convert
from tests.models.harness import Sequences

PROMPT = torch.randint(VOCAB_SIZE, (1, 40), generator=torch.Generator().manual_seed(1))


def logits(path: Path, query_pre_attn_scalar: float | None) -> torch.Tensor:
    files = inspect_model(ModelOptions(model=str(path)))
    if query_pre_attn_scalar is not None:  # GGUF cannot say it: the real files' sizes imply it
        config = msgspec.structs.replace(files.config, query_pre_attn_scalar=query_pre_attn_scalar)
        files = dataclasses.replace(files, config=config)
    model = load_model(files, torch.device("cpu"), Precision(torch.float32))
    return Sequences(model).extend({0: PROMPT[0].tolist()})[0]


@pytest.mark.parametrize(
    "name",
    ["llama", "llama-llama3", "llama-yarn", "mistral-window", "qwen2", "qwen3", "qwen3-moe", "gemma3"],
)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    reference = make_checkpoint(name, tmp_path)
    with torch.inference_mode():
        expected = reference(PROMPT).logits[0]
    scalar = reference.config.query_pre_attn_scalar if name == "gemma3" else None
    found = logits(convert(tmp_path, tmp_path / "model.gguf"), scalar)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_quantised_weights_give_the_logits_of_their_values(tmp_path: Path) -> None:
    make_checkpoint("llama-biases", tmp_path)
    path = convert(tmp_path, tmp_path / "model.gguf", Type.Q8_0)
    source = GGUFSource(path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").float()
    reference.load_state_dict({name: source.tensor(name) for name in source.names()})
    with torch.inference_mode():
        expected = reference(PROMPT).logits[0]
    torch.testing.assert_close(logits(path, None), expected, rtol=0, atol=1e-4)
