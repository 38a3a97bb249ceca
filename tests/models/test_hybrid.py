"""Families with recurrent state give the logits that transformers gives, however the tokens are fed, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from kernels.cpu.library import available as native_kernels_available
from models.base import CausalLM
from models.loader import inspect_model, load_model
from models.options import ModelOptions
from models.weights import Precision
from tests.models.harness import Sequences
from tests.models.hybrid_checkpoints import CHECKPOINTS, make_checkpoint
from tests.models.test_equals_transformers import (
    assert_close,
    assert_unequal_batch_equals,
    prompt,
    reference_logits,
)

Pair = tuple[PreTrainedModel, CausalLM]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """Checkpoint by name: transformers' model, and Tandem's loaded from the file that it saved."""
    made: dict[str, Pair] = {}

    def get(name: str) -> Pair:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            reference = make_checkpoint(name, folder)
            files = inspect_model(ModelOptions(model=str(folder)))
            made[name] = reference, load_model(files, torch.device("cpu"), Precision(torch.float32))
        return made[name]

    return get


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_prompt_equals_transformers(pair: Callable[[str], Pair], name: str) -> None:
    reference, model = pair(name)
    ids = prompt(70)
    assert_close(Sequences(model).extend({0: ids})[0], reference_logits(reference, ids))


@pytest.mark.parametrize("name", ["qwen3-5-multimodal", "qwen3-5-experts-multimodal"])
def test_of_a_multimodal_checkpoint_all_but_vision_is_read(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_checkpoint(name, tmp_path)
    load_model(
        inspect_model(ModelOptions(model=str(tmp_path))), torch.device("cpu"), Precision(torch.float32)
    )
    assert not caplog.messages


# transformers' step of Mamba-2 does not heed the limits of a time step, as its prefill does.
LIMITED = ("nemotron-h-biases", "mamba2-limited", "granite-hybrid-limited")
STEPPED = [name for name in CHECKPOINTS if name not in LIMITED]


@pytest.mark.parametrize("name", STEPPED)
def test_decoding_equals_transformers_decoding(pair: Callable[[str], Pair], name: str) -> None:
    reference, model = pair(name)
    ids = prompt(40)
    sequences = Sequences(model)
    actual, expected = [], []
    handed_on = "cache_params" if name.startswith("mamba2") else "past_key_values"
    with torch.inference_mode():
        cache = None
        for chunk in (ids[:21], *([token] for token in ids[21:])):
            output = reference(input_ids=torch.tensor([chunk]), use_cache=True, **{handed_on: cache})
            cache = output[handed_on]
            expected.append(output.logits[0])
            actual.append(sequences.extend({1: chunk})[1])
    assert_close(torch.cat(actual), torch.cat(expected))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_do_not_depend_on_how_tokens_are_fed(pair: Callable[[str], Pair], name: str) -> None:
    _, model = pair(name)
    ids = prompt(70)
    expected = Sequences(model).extend({0: ids})[0]

    chunked = Sequences(model)
    chunks = [chunked.extend({2: ids[start:stop]})[2] for start, stop in ((0, 7), (7, 8), (8, 29), (29, 70))]
    assert torch.equal(torch.cat(chunks), expected)

    # Decode, and blocks as they are verified, beside other sequences of other lengths.
    company = Sequences(model)
    parts = [company.extend({1: ids[::-1], 0: ids[:20]})[0]]
    for start, stop in ((20, 21), (21, 22), (22, 30), (30, 32), (32, 33), (33, 68), (68, 70)):
        parts.append(
            company.extend({2: ids[: stop - start], 0: ids[start:stop], 3: ids[start : start + 3]})[0]
        )
    assert torch.equal(torch.cat(parts), expected)


@pytest.mark.parametrize("precision", [Precision(torch.bfloat16), Precision(torch.float32, native=True)])
@pytest.mark.parametrize("name", ["qwen3-next", "nemotron-h-experts", "lfm2-biases"])
def test_nor_do_they_in_other_precisions(name: str, precision: Precision, tmp_path: Path) -> None:
    if precision.native and not native_kernels_available():
        pytest.skip("the native kernels are not built")
    reference = make_checkpoint(name, tmp_path)
    files = inspect_model(ModelOptions(model=str(tmp_path)))
    model = load_model(files, torch.device("cpu"), precision)
    ids = prompt(40)
    expected = Sequences(model).extend({0: ids})[0]
    # Of the float32 logits: near a tie, rounding takes a token to another expert.
    wanted = reference_logits(reference, ids)
    assert (expected - wanted).abs().mean() < 0.15 * wanted.abs().mean()
    fed = Sequences(model)
    parts = [fed.extend({1: ids[::-1], 0: ids[:19]})[0]]
    for start, stop in ((19, 20), (20, 21), (21, 35), (35, 40)):
        parts.append(fed.extend({0: ids[start:stop], 2: ids[: stop - start]})[0])
    assert torch.equal(torch.cat(parts), expected)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_batch_of_unequal_lengths_equals_each_sequence_alone(
    pair: Callable[[str], Pair], name: str
) -> None:
    assert_unequal_batch_equals(*pair(name))
