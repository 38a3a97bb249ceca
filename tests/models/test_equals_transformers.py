"""Every family gives the logits that transformers gives on the same checkpoint, however the tokens are fed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from models.base import CausalLM
from models.loader import inspect_model, load_model
from models.options import ModelOptions
from models.weights import Precision
from tests.models.checkpoints import CHECKPOINTS, VOCAB_SIZE, make_checkpoint
from tests.models.harness import Sequences

CPU = torch.device("cpu")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Pair = tuple[PreTrainedModel, CausalLM]


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """Checkpoint by name: transformers' model, and Tandem's loaded from the file that it saved."""
    made: dict[str, Pair] = {}

    def get(name: str) -> Pair:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            reference = make_checkpoint(name, folder)
            files = inspect_model(ModelOptions(model=str(folder)))
            made[name] = reference, load_model(files, CPU, Precision(torch.float32))
        return made[name]

    return get


@pytest.mark.parametrize("other", [True, False], ids=["another matrix", "the embedding"])
def test_a_head_that_the_file_has_beside_a_tied_embedding_counts_if_it_is_another(
    tmp_path: Path, other: bool
) -> None:
    make_checkpoint("llama-tied", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[HEAD] = tensors[EMBEDDING].flip(0).contiguous() if other else tensors[EMBEDDING].clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    model = load_model(inspect_model(ModelOptions(model=str(tmp_path))), CPU, Precision(torch.float32))
    ids = prompt(12)
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(Sequences(model).extend({0: ids})[0], expected, atol=1e-4, rtol=0)


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE - 8, (length,), generator=generator).tolist()


def reference_logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids])).logits[0]


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.abs().max() > 0.5, "a reference this flat would prove nothing"
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def assert_unequal_batch_equals(reference: PreTrainedModel, model: CausalLM) -> None:
    """Sequences of unequal lengths, at unequal stages, give in one batch the logits that each has alone."""
    prompts = {row: prompt(length, seed=row) for row, length in ((0, 33), (3, 5), (1, 18))}
    sequences = Sequences(model)
    first = sequences.extend({row: ids[:-2] for row, ids in prompts.items()})
    # Prefill of a newcomer beside decode of one sequence and two tokens of another, in one pass.
    prompts[2] = prompt(14, seed=9)
    second = sequences.extend({2: prompts[2], 0: prompts[0][-2:-1], 1: prompts[1][-2:], 3: prompts[3][-2:]})
    third = sequences.extend({0: prompts[0][-1:]})
    for row, ids in prompts.items():
        parts = [step[row] for step in (first, second, third) if row in step]
        assert_close(torch.cat(parts), reference_logits(reference, ids))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_prefill_chunks_and_decode_equal_transformers(pair: Callable[[str], Pair], name: str) -> None:
    reference, model = pair(name)
    ids = prompt(40)
    expected = reference_logits(reference, ids)

    assert_close(Sequences(model).extend({0: ids})[0], expected)

    chunked = Sequences(model)
    chunks = [chunked.extend({2: ids[start:stop]})[2] for start, stop in ((0, 7), (7, 8), (8, 29), (29, 40))]
    assert_close(torch.cat(chunks), expected)

    decoded = Sequences(model)
    steps = [decoded.extend({1: ids[:25]})[1]]
    steps += [decoded.extend({1: [token]})[1] for token in ids[25:]]
    assert_close(torch.cat(steps), expected)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_batch_of_unequal_lengths_equals_each_sequence_alone(
    pair: Callable[[str], Pair], name: str
) -> None:
    assert_unequal_batch_equals(*pair(name))


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen3-moe", "gemma3"])
def test_captured_states_are_the_outputs_of_the_layers_asked_for(
    pair: Callable[[str], Pair], name: str
) -> None:
    reference, model = pair(name)
    ids = prompt(20)
    with torch.inference_mode():
        expected = reference(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
    last = model.config.num_layers - 1
    hidden = Sequences(model).forward({0: ids}, capture_layers=(0, last))
    assert set(hidden.captured) == {0, last}
    assert_close(hidden.captured[0], expected[1][0])
    # transformers gives its last entry after the final norm: Tandem gives the layer's output, and the norm apart.
    assert_close(hidden.last, expected[-1][0])
    assert_close(model.norm(hidden.captured[last]), expected[-1][0])


def test_dynamic_rope_beyond_the_trained_length_equals_transformers_decoding(
    pair: Callable[[str], Pair],
) -> None:
    reference, model = pair("llama-dynamic")
    trained = model.config.max_position_embeddings
    ids = prompt(trained + 12)
    cache, expected = None, []
    with torch.inference_mode():
        for chunk in (ids[:trained], *([token] for token in ids[trained:])):
            output = reference(input_ids=torch.tensor([chunk]), past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            expected.append(output.logits[0])
    assert_close(Sequences(model).extend({0: ids})[0], torch.cat(expected))
