"""A tiny target with its runner, as start-up leaves it, and texts that it wrote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from backends.options import AttentionOptions
from engine.options import CacheOptions
from engine.runner import ModelRunner
from models.loader import inspect_model
from models.options import ModelOptions
from speculative.training.data import Example
from tests.tiny_model import save_tiny_model

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # what it writes is to depend on what it has read
}


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Products this small gain nothing from a second thread, and wait for it on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="package")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("target"), **SHAPE)


@pytest.fixture(scope="package")
def reference(target_folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(target_folder)


@pytest.fixture(scope="package")
def runner(target_folder: Path) -> ModelRunner:
    options = ModelOptions(model=str(target_folder), dtype="float32", device="cpu")
    runner = ModelRunner(
        "target", inspect_model(options), options, CacheOptions(max_total_tokens=512), AttentionOptions(), 4
    )
    runner.load()
    runner.init_attention_backends()
    return runner


@pytest.fixture(scope="package")
def examples() -> list[Example]:
    """Texts of several lengths, each token of which follows from the one before."""
    return [
        make_example(first=number, length=30 + number % 9, answer=7 + number % 3) for number in range(300)
    ]


def make_example(first: int, length: int, answer: int) -> Example:
    """`length` tokens of which those from number `answer` on are the target's."""
    ids = [first % 61]
    while len(ids) < length:
        ids.append((5 * ids[-1] + 7) % 61)
    ends = np.where(np.arange(length) < answer, 0, length)
    return Example(np.asarray(ids, np.int32), ends.astype(np.int32))
