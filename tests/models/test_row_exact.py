"""A position's logits have the same bits however it is computed: whole, in chunks, one by one, in any company."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from models.loader import inspect_model, load_model
from models.options import ModelOptions
from models.weights import Precision
from tests.models.checkpoints import make_checkpoint
from tests.models.harness import Sequences


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama-biases", "qwen2-window", "qwen3-moe", "gemma3"])
def test_logits_do_not_depend_on_how_tokens_are_fed(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    make_checkpoint(name, tmp_path)
    model = load_model(
        inspect_model(ModelOptions(model=str(tmp_path))), torch.device("cpu"), Precision(dtype)
    )
    ids = torch.randint(3, 240, (38,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = Sequences(model).extend({0: ids})[0]

    chunked = Sequences(model)
    assert torch.equal(torch.cat([chunked.extend({0: chunk})[0] for chunk in (ids[:17], ids[17:])]), expected)

    # Decode, and blocks as they are verified, beside another sequence's prompt.
    company = Sequences(model)
    parts = [company.extend({1: ids[::-1], 0: ids[:20]})[0]]
    for start, stop in ((20, 21), (21, 22), (22, 30), (30, 32), (32, 38)):
        parts.append(company.extend({0: ids[start:stop], 2: ids[: stop - start]})[0])
    assert torch.equal(torch.cat(parts), expected)
