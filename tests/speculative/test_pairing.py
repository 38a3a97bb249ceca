"""The pairing check: a drafter that does not belong to its target is refused before anything is loaded."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file

from models.base import ModelError
from models.loader import ModelFiles, inspect_model
from models.options import ModelOptions
from speculative.pairing import inspect_drafter, scratch_slots, target_digest, target_layer_ids
from tests.models.checkpoints import make_checkpoint
from tests.models.dflash_reference import make_drafter
from tests.models.gguf_files import convert


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """Four layers, 64 wide, 256 tokens, rope_theta 10,000."""
    folder = tmp_path_factory.mktemp("target")
    make_checkpoint("llama-four-layers", folder)
    return inspect_model(ModelOptions(model=str(folder)))


def inspect(drafter: Path, target: ModelFiles) -> ModelFiles:
    return inspect_drafter(ModelOptions(model=str(drafter)), target)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_drafter_that_fits_is_described(target: ModelFiles, tmp_path: Path) -> None:
    make_drafter(tmp_path)
    files = inspect(tmp_path, target)
    assert files.dflash is not None and files.dflash.block_size == 6
    assert target_layer_ids(files) == (0, 2, 1)
    assert scratch_slots(files, num_draft_tokens=4, max_running_requests=3) == 18


OWN = {"mask_token_id": 250, "target_layer_ids": [0, 2, 1]}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden_size": 96}, "hidden_size is 96, that of the target 64"),
        ({"vocab_size": 300}, "vocab_size is 300, that of the target 256"),
        ({"num_target_layers": 36}, "num_target_layers is 36, that of the target 4"),
        ({"dflash_config": {**OWN, "target_layer_ids": [1, 4]}}, r"target_layer_ids has \[4\]"),
        ({"dflash_config": {**OWN, "mask_token_id": 256}}, "mask_token_id 256"),
        ({"dflash_config": {**OWN, "draft_vocab_size": 257}}, "draft_vocab_size 257"),
        ({"block_size": 1}, "block_size"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused_by_the_field(
    target: ModelFiles, tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    make_drafter(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=text) as caught:
        inspect(tmp_path, target)
    assert str(tmp_path / "config.json") in str(caught.value)
    if "target" in text:
        assert str(target.path / "config.json") in str(caught.value)


def test_another_rope_and_another_target_are_warnings_that_say_what_they_cost(
    target: ModelFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_drafter(tmp_path, rope_theta=1e6, dflash_config={"target_digest": "0" * 64})
    with caplog.at_level(logging.WARNING):
        inspect(tmp_path, target)
    rope, digest = caplog.messages
    assert "rope_theta is 1e+06, that of the target 10000" in rope
    assert "target_digest" in digest and "fewer drafted tokens are accepted" in digest
    assert str(tmp_path) in digest and str(target.path) in digest


def test_the_recorded_target_is_no_warning(
    target: ModelFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_drafter(tmp_path, dflash_config={"target_digest": target_digest(target)})
    with caplog.at_level(logging.WARNING):
        inspect(tmp_path, target)
    assert not caplog.messages


def test_a_model_by_itself_shares_the_vocabulary_alone(target: ModelFiles, tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path)
    files = inspect(tmp_path, target)
    assert files.dflash is None and target_layer_ids(files) == ()
    assert scratch_slots(files, num_draft_tokens=4, max_running_requests=3) == 12
    edit_config(tmp_path, vocab_size=255)
    with pytest.raises(ModelError, match="vocab_size is 255, that of the target 256"):
        inspect(tmp_path, target)


def digest_of(folder: Path) -> str:
    return target_digest(inspect_model(ModelOptions(model=str(folder))))


def test_a_digest_does_not_depend_on_sharding_or_place(target: ModelFiles, tmp_path: Path) -> None:
    make_checkpoint("llama-four-layers", tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert digest_of(tmp_path) == target_digest(target)


@pytest.mark.parametrize("change", ["a value", "a name", "a shape", "a dtype"])
def test_a_digest_tells_models_apart(target: ModelFiles, tmp_path: Path, change: str) -> None:
    tensors = load_file(target.weight_files[0])
    name = "model.layers.3.mlp.up_proj.weight"
    tensor = tensors.pop(name)
    if change == "a value":
        tensor[-1, -1] += 1
    tensors[name + "s" if change == "a name" else name] = {
        "a shape": lambda: tensor.view(64, 96),
        "a dtype": lambda: tensor.view(torch.int32),
    }.get(change, lambda: tensor)()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((target.path / "config.json").read_text())
    assert digest_of(tmp_path) != target_digest(target)


def test_a_gguf_file_has_a_digest_too_and_another_one_for_another_quantisation(
    target: ModelFiles, tmp_path: Path
) -> None:
    digests = {target_digest(target)}
    for kind in (Type.F32, Type.Q8_0):
        path = convert(target.path, tmp_path / f"{kind.name}.gguf", kind)
        files = inspect_model(ModelOptions(model=str(path)))
        assert target_digest(files) == target_digest(files)
        digests.add(target_digest(files))
    assert len(digests) == 3
