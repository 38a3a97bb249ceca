"""Tiny GGUF files, written with the `gguf` package as the published converters write them.

Tensor names come from that package's own table, so nothing here shares a mistake with the reader under test.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import load_file

Tokenizer = Callable[[gguf.GGUFWriter], None]

_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}


def checkpoint_tensors(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a saved float32 checkpoint, by their Hugging Face names."""
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def convert(folder: Path, path: Path, weights: Type = Type.F32, tokenizer: Tokenizer | None = None) -> Path:
    """Write the Hugging Face checkpoint in `folder` to the GGUF file `path`, matrices in format `weights`."""
    config = json.loads((folder / "config.json").read_text())
    architecture = _ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _write_config(writer, config)
    if tokenizer:
        tokenizer(writer)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, values in _converted(checkpoint_tensors(folder), config).items():
        kind = Type.F32 if values.ndim == 1 else weights
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        writer.add_tensor(target, gguf.quants.quantize(values, kind), raw_dtype=kind)
    parameters = config["rope_parameters"]
    if parameters.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(parameters, config["head_dim"]))
    return finish(writer, path)


def finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    """Write header, metadata and tensors, and close."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    parameters = config["rope_parameters"]
    if config["model_type"] == "gemma3_text":
        pattern = config["layer_types"].index("full_attention") + 1
        writer.add_uint32("gemma3.attention.sliding_window_pattern", pattern)
        writer.add_rope_freq_base_swa(parameters["sliding_attention"]["rope_theta"])
        parameters = parameters["full_attention"]
        if config.get("final_logit_softcapping"):
            writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config["model_type"] in ("gemma3_text", "mistral") and config["sliding_window"]:
        writer.add_sliding_window(config["sliding_window"])
    writer.add_rope_freq_base(parameters["rope_theta"])
    if parameters["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(parameters["rope_type"]))
        writer.add_rope_scaling_factor(parameters["factor"])
    if parameters["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(parameters["original_max_position_embeddings"])
    if config["model_type"] == "qwen3_moe":
        writer.add_expert_count(config.get("num_experts") or config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _converted(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> dict[str, np.ndarray]:
    """What a converter does to values: llama's rotation order, Gemma's norm offset, experts in one tensor."""
    converted: dict[str, np.ndarray] = {}
    experts: dict[str, list[np.ndarray]] = {}
    for name, values in tensors.items():
        if config["model_type"] in ("llama", "mistral") and "q_proj" in name:
            values = _interleaved(values, config["num_attention_heads"])
        elif config["model_type"] in ("llama", "mistral") and "k_proj" in name:
            values = _interleaved(values, config["num_key_value_heads"])
        elif config["model_type"] == "gemma3_text" and name.endswith("norm.weight"):
            values = values + 1
        if ".experts." in name:
            layer, _, rest = name.partition(".experts.")
            experts.setdefault(f"{layer}.experts.{rest.partition('.')[2]}", []).append(
                (int(rest.split(".")[0]), values)
            )
        else:
            converted[name] = values
    stacked = {
        name: np.stack([values for _, values in sorted(parts, key=lambda part: part[0])])
        for name, parts in experts.items()
    }
    return converted | stacked


def _interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from (first halves, second halves) to (pairs)."""
    rows, *rest = values.shape
    return values.reshape(heads, 2, rows // heads // 2, *rest).swapaxes(1, 2).reshape(values.shape).copy()


def _llama3_factors(parameters: dict[str, Any], head_dim: int) -> np.ndarray:
    factor, low, high = (parameters[key] for key in ("factor", "low_freq_factor", "high_freq_factor"))
    trained = parameters["original_max_position_embeddings"]
    factors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * parameters["rope_theta"] ** (index / head_dim)
        if wavelength < trained / high:
            factors.append(1.0)
        elif wavelength > trained / low:
            factors.append(factor)
        else:
            smooth = (trained / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)
