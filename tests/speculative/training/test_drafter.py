"""The drafter that is trained is the one that serves: equal logits, in the published format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from engine.runner import ModelRunner
from models.base import ModelError
from models.dflash import DFlashDrafter
from models.loader import inspect_model, load_drafter
from models.options import ModelOptions
from models.weights import Precision
from speculative.pairing import check_pairing
from speculative.training.checkpoint import export
from speculative.training.data import Example
from speculative.training.model import Drafter
from speculative.training.options import TrainingOptions
from speculative.training.start import (
    decoder,
    default_layer_ids,
    dense,
    initial_drafter,
    shape_for,
    unused_token,
)
from speculative.training.states import TargetStates
from tests.models.dflash_reference import ReferenceDrafter

OPTIONS = TrainingOptions(block_size=6, target_layer_ids=(0, 3, 2))
DRAFT_TOKENS = torch.arange(3, 203)


@pytest.fixture(scope="module")
def states(
    runner: ModelRunner, examples: list[Example], tmp_path_factory: pytest.TempPathFactory
) -> TargetStates:
    return TargetStates(
        runner, OPTIONS.target_layer_ids, examples, tmp_path_factory.mktemp("cache") / "s", 1 << 30
    )


@pytest.fixture(scope="module")
def drafter(runner: ModelRunner, states: TargetStates) -> Drafter:
    """As training begins with, in weights that the exported format holds exactly."""
    target = decoder(runner.model)
    drafter = initial_drafter(target, shape_for(target, OPTIONS, 256), states.padded([0, 1]).flatten(0, 1), 0)
    with torch.no_grad():
        drafter.successor.weight.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
        for parameter in drafter.parameters():
            parameter.copy_(parameter.bfloat16())
    return drafter


@pytest.fixture(scope="module")
def folder(drafter: Drafter, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafter")
    export(folder, drafter, DRAFT_TOKENS, "bfloat16", {"accept_length": 2.5})
    return folder


@pytest.mark.parametrize("block", [6, 3])
def test_blocks_of_several_texts_at_once_have_the_logits_of_the_reference(
    block: int,
    drafter: Drafter,
    folder: Path,
    reference: LlamaForCausalLM,
    examples: list[Example],
) -> None:
    members, anchors = [0, 1], torch.tensor([[9, 29, 14], [10, 20, 28]])
    ids = [torch.tensor(examples[member].ids, dtype=torch.int64) for member in members]
    features = torch.zeros(2, max(map(len, ids)), 3 * 64)
    with torch.no_grad():
        hidden = [reference(row[None], output_hidden_states=True).hidden_states for row in ids]
    for index, layers in enumerate(hidden):
        features[index, : layers[0].shape[1]] = torch.cat(
            [layers[layer + 1][0] for layer in OPTIONS.target_layer_ids], -1
        )
    tokens = torch.full((2, 3, block), 256)
    tokens[:, :, 0] = torch.stack([row[at] for row, at in zip(ids, anchors, strict=True)])
    before = torch.randint(256, (2, 3, block - 1), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        embed = reference.get_input_embeddings()
        out = drafter(features, embed(tokens), embed(before), anchors)
        logits = out @ reference.get_output_embeddings().weight[DRAFT_TOKENS].T

    for index in range(6):
        text, block_number = divmod(index, 3)
        anchor = int(anchors[text, block_number])
        other = ReferenceDrafter(folder)
        other.config["block_size"] = block
        with torch.no_grad():
            other.learn([state[0, :anchor] for state in hidden[text]], 0)
            expected = other.draft(reference, int(ids[text][anchor]))[1:] + torch.stack(
                [other.after(reference, int(token)) for token in before[text, block_number]]
            )
        torch.testing.assert_close(logits[text, block_number], expected, rtol=1e-4, atol=1e-4)


def test_states_are_those_of_the_layers_that_are_named(
    states: TargetStates, reference: LlamaForCausalLM, examples: list[Example]
) -> None:
    padded = states.padded([2, 5])
    for row, member in zip(padded, [2, 5], strict=True):
        ids = torch.tensor(examples[member].ids, dtype=torch.int64)
        with torch.no_grad():
            hidden = reference(ids[None], output_hidden_states=True).hidden_states
        # The last of transformers' states is normed; layer 3 here is the last one.
        last = reference.model.norm(row[: len(ids), 64:128].float()).detach()
        expected = torch.cat([hidden[1][0], hidden[3][0]], -1)
        found = torch.cat([row[: len(ids), :64], row[: len(ids), 128:]], -1).float()
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=2e-2)
        torch.testing.assert_close(last, hidden[4][0], rtol=2e-2, atol=5e-2)
        assert not row[len(ids) :].any()


def test_states_survive_in_their_file_and_are_computed_anew_for_another_text(
    runner: ModelRunner, examples: list[Example], tmp_path: Path
) -> None:
    def states(texts: list[Example], cache_bytes: int = 1 << 30) -> TargetStates:
        return TargetStates(runner, (1, 2), texts, tmp_path / "s", cache_bytes)

    first = states(examples[:3])
    expected = first.padded([0, 1, 2])
    assert first.passes == 1
    again = states(examples[:4])
    assert torch.equal(again.padded([0, 1, 2]), expected)
    assert again.passes == 0
    other = states(
        [examples[1], *examples[1:3]]
    )  # the second text is where it was only if the first is as long
    found, lengths = other.padded([0, 1, 2]), [len(examples[member].ids) for member in (1, 1, 2)]
    for row, member, length in zip(found, (1, 1, 2), lengths, strict=True):
        assert torch.equal(row[:length], expected[member][:length])
    assert other.passes == 1
    back = states(examples[:3])
    assert torch.equal(back.padded([0, 1, 2]), expected)
    uncached = states(examples[:3], cache_bytes=0)
    assert torch.equal(uncached.padded([0, 1, 2]), expected)
    assert uncached.passes == 1


def test_the_exported_folder_loads_beside_its_target(
    folder: Path, target_folder: Path, runner: ModelRunner, drafter: Drafter
) -> None:
    files = inspect_model(ModelOptions(model=str(folder)), drafter=True)
    check_pairing(files, runner.files)
    assert files.dflash is not None and files.dflash.accept_length == 2.5
    loaded = load_drafter(files, torch.device("cpu"), Precision(torch.float32), runner.model)
    assert isinstance(loaded, DFlashDrafter)
    assert (loaded.block_size, loaded.mask_token_id, loaded.target_layer_ids) == (6, 256, (0, 3, 2))
    assert torch.equal(loaded.draft_token_ids, DRAFT_TOKENS)
    tensors = load_file(folder / "model.safetensors")
    assert {t.dtype for name, t in tensors.items() if name != "draft_token_ids"} == {torch.bfloat16}
    assert set(tensors) == {*drafter.state_dict(), "draft_token_ids"}
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["DFlashDraftModel"]


def test_it_starts_as_the_targets_last_layers(drafter: Drafter, reference: LlamaForCausalLM) -> None:
    for own, theirs in zip(drafter.layers, reference.model.layers[-2:], strict=True):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"):
            torch.testing.assert_close(
                own.get_parameter(f"{name}.weight"),
                theirs.get_parameter(f"{name}.weight"),
                rtol=1e-2,
                atol=1e-3,
            )
        for name in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
            torch.testing.assert_close(
                own.get_parameter(f"{name}.weight"),
                theirs.get_parameter(f"{name}.weight"),
                rtol=1e-2,
                atol=1e-3,
            )


def test_layers_that_the_target_lacks_are_named(runner: ModelRunner) -> None:
    with pytest.raises(ModelError, match=r"\[9\]"):
        shape_for(decoder(runner.model), TrainingOptions(target_layer_ids=(1, 9)), 256)


def test_default_layers_are_spread_and_within_any_target() -> None:
    assert default_layer_ids(30) == (14, 21, 28)
    for layers in range(1, 40):
        assert all(0 <= layer < layers for layer in default_layer_ids(layers))


def test_the_mask_is_a_special_token_that_no_text_has(examples: list[Example]) -> None:
    assert unused_token([256, 300], examples, 257) == 256
    assert unused_token([int(examples[0].ids[0])], examples, 257) == 256


def test_an_int8_export_is_within_half_a_step_of_what_was_trained(
    tmp_path: Path, runner: ModelRunner, drafter: Drafter
) -> None:
    export(tmp_path, drafter, DRAFT_TOKENS, "int8", {})
    files = inspect_model(ModelOptions(model=str(tmp_path)), drafter=True)
    loaded = load_drafter(files, torch.device("cpu"), Precision(torch.float32), runner.model)
    assert isinstance(loaded, DFlashDrafter)
    trained, found = drafter.fc.weight.detach().float(), dense(loaded.fc)
    steps = trained.unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True) / 127
    # The scale itself is a half: 11 bits, or steps of 6e-8 where it is tiny.
    assert ((found - trained).unflatten(1, (-1, 32)).abs() <= 0.57 * steps + 127 * 6e-8).all()
    assert not torch.equal(found, trained)
