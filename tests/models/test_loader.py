"""Finding and loading a model: what is accepted, what is refused and with what words, and in which dtype it runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from models.base import ModelError
from models.loader import ModelFiles, inspect_model, load_model, resolve_device, resolve_precision
from models.options import ModelOptions
from models.weights import Precision
from tests.models.checkpoints import make_checkpoint
from tests.models.harness import Sequences

CPU = torch.device("cpu")
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "tiny-llama"
    make_checkpoint("llama", folder)
    make_checkpoint("llama", folder / "sharded", max_shard_size="100KB")
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(made, tmp_path / "tiny-llama"))


def inspect(path: Path) -> ModelFiles:
    return inspect_model(ModelOptions(model=str(path)))


def logits(files: ModelFiles, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return Sequences(load_model(files, CPU, Precision(dtype))).extend({0: list(range(3, 20))})[0]


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **{name.replace("__", "."): tensor for name, tensor in changes.items()}}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def test_a_folder_is_described_without_loading_it(made: Path) -> None:
    files = inspect(made)
    assert (files.kind, files.path, files.name) == ("hf", made, "tiny-llama")
    assert files.weight_files == (made / "model.safetensors",)
    assert files.weight_bytes == (made / "model.safetensors").stat().st_size
    assert files.config.architecture == "LlamaForCausalLM"


def test_shards_give_the_same_model_as_one_file(made: Path) -> None:
    sharded = inspect(made / "sharded")
    assert len(sharded.weight_files) > 1
    assert torch.equal(logits(sharded), logits(inspect(made)))


def test_a_multimodal_checkpoint_may_name_its_text_model_either_way(tmp_path: Path) -> None:
    make_checkpoint("gemma3-multimodal", tmp_path)
    nested = logits(inspect(tmp_path))
    path = tmp_path / "model.safetensors"
    renamed = {
        re.sub(r"^language_model\.model\.", "model.language_model.", name): tensor
        for name, tensor in load_file(path).items()
    }
    assert any(name.startswith("model.language_model.") for name in renamed)
    save_file(renamed, path)
    assert torch.equal(logits(inspect(tmp_path)), nested)


def test_matrices_are_held_in_the_dtype_asked_for(made: Path) -> None:
    exact = logits(inspect(made))
    for dtype in (torch.bfloat16, torch.float16):
        model = load_model(inspect(made), CPU, Precision(dtype))
        assert model.weight_format == {torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]
        rounded = Sequences(model).extend({0: list(range(3, 20))})[0]
        assert rounded.dtype == torch.float32
        assert not torch.equal(rounded, exact)
        torch.testing.assert_close(rounded, exact, atol=0.2, rtol=0)


def test_auto_keeps_float32_and_never_runs_float16_on_a_cpu(made: Path) -> None:
    files = inspect(made)
    assert resolve_precision(files, "auto", CPU, native=False) == Precision(torch.float32)
    assert resolve_precision(files, "float16", CPU, native=False) == Precision(torch.float16)
    for checkpoint in ("float16", "bfloat16", None):
        narrow = msgspec.structs.replace(files.config, dtype=checkpoint)
        half = ModelFiles(files.kind, files.path, files.weight_files, files.weight_bytes, narrow, files.name)
        on_cpu = resolve_precision(half, "auto", CPU, native=False)
        assert on_cpu in (Precision(torch.bfloat16), Precision(torch.float32))
        on_gpu = Precision(torch.float16 if checkpoint == "float16" else torch.bfloat16)
        assert resolve_precision(half, "auto", torch.device("cuda"), native=True) == on_gpu


def test_auto_leaves_weights_as_they_are_where_there_are_native_kernels(made: Path) -> None:
    files = inspect(made)
    assert resolve_precision(files, "auto", CPU, native=True) == Precision(torch.float32, native=True)
    assert resolve_precision(files, "bfloat16", CPU, native=True) == Precision(torch.bfloat16)


def test_the_held_weights_do_not_depend_on_the_file(folder: Path) -> None:
    files = inspect(folder)
    model = load_model(files, CPU, Precision(torch.float32))
    before = Sequences(model).extend({0: [3, 4, 5]})[0]
    weights = folder / "model.safetensors"
    weights.write_bytes(bytes(weights.stat().st_size))
    assert torch.equal(Sequences(model).extend({0: [3, 4, 5]})[0], before)


def test_a_hub_id_is_downloaded_once_it_is_no_local_path(made: Path) -> None:
    asked: list[str] = []

    def download(repo_id: str) -> Path:
        asked.append(repo_id)
        return made

    assert inspect_model(ModelOptions(model="some-org/tiny-llama"), download).name == "some-org/tiny-llama"
    assert asked == ["some-org/tiny-llama"]
    inspect_model(ModelOptions(model=str(made)), download)
    assert asked == ["some-org/tiny-llama"]


@pytest.mark.parametrize("model", ["nowhere", "./org/name", "/no/such/model.gguf", "a/b/c"])
def test_a_path_that_does_not_exist_is_never_asked_of_the_hub(model: str) -> None:
    def download(repo_id: str) -> Path:
        raise AssertionError(repo_id)

    with pytest.raises(ModelError, match="no such file or folder"):
        inspect_model(ModelOptions(model=model), download)


def test_a_hub_that_cannot_be_reached_is_said_so(tmp_path: Path) -> None:
    program = (
        "from models.loader import ModelError, hub_snapshot\n"
        "try: hub_snapshot('some-org/some-model')\n"
        "except ModelError as error: print(error)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-c", program]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "some-org/some-model: not a local path" in said.stdout
    assert "cannot be reached: check the network (HF_ENDPOINT" in said.stdout
    assert "give its folder" in said.stdout


def test_a_folder_without_configuration_or_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="neither model.safetensors nor"):
        inspect(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match="config.json: no such file"):
        inspect(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", '"llama"', "\xff"])
def test_a_corrupt_configuration_is_named(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=r"config\.json: not"):
        inspect(folder)


def test_an_unknown_architecture_is_answered_with_those_that_are_known(folder: Path) -> None:
    edit_config(folder, architectures=["LlamaForSequenceClassification"])
    with pytest.raises(ModelError, match="LlamaForSequenceClassification.*not supported.*Qwen3ForCausalLM"):
        inspect(folder)


@pytest.mark.parametrize("keep", [0, 4, 8, 200, -1])
def test_a_truncated_weight_file_is_named_before_anything_is_loaded(folder: Path, keep: int) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors: truncated or corrupt"):
        inspect(folder)


def test_a_missing_shard_is_named(folder: Path) -> None:
    shard = inspect(folder / "sharded").weight_files[1]
    shard.unlink()
    with pytest.raises(ModelError, match=f"{shard.name}: missing"):
        inspect(folder / "sharded")


@pytest.mark.parametrize("text", ["", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', "[]"])
def test_a_corrupt_index_is_named(folder: Path, text: str) -> None:
    (folder / "sharded" / INDEX).write_text(text)
    with pytest.raises(ModelError, match="not a safetensors index"):
        inspect(folder / "sharded")


def test_a_missing_tensor_is_named(folder: Path) -> None:
    edit_tensors(folder, lm_head__weight=None)
    with pytest.raises(ModelError, match="no tensor 'lm_head.weight'"):
        load_model(inspect(folder), CPU, Precision(torch.float32))


@pytest.mark.parametrize(
    ("tensor", "shape"),
    [("lm_head__weight", (256, 32)), ("model__norm__weight", (63,)), ("lm_head__weight", (9,))],
)
def test_a_tensor_of_the_wrong_shape_is_named(folder: Path, tensor: str, shape: tuple[int, ...]) -> None:
    edit_tensors(folder, **{tensor: torch.zeros(shape)})
    with pytest.raises(ModelError, match=tensor.replace("__", r"\.")):
        load_model(inspect(folder), CPU, Precision(torch.float32))


def test_tensors_that_the_model_does_not_use_are_reported(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit_tensors(folder, model__layers__0__self_attn__q_proj__bias=torch.zeros(64))
    load_model(inspect(folder), CPU, Precision(torch.float32))
    assert "1 tensors are not used: model.layers.0.self_attn.q_proj.bias" in caplog.text


@pytest.mark.parametrize("device", ["cuda", "abacus", "cpu:x", "meta", "mps"])
def test_a_device_that_is_not_there_is_named(device: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(ModelError, match=device):
        resolve_device(device)
