"""GGUF files as a source of weights: Hugging Face names over the file's own bytes, and the model's configuration.

Families know Hugging Face names and layouts only. What a GGUF converter does to a checkpoint is undone here: tensor
names, the row order of llama's q and k projections, and the 1 that is added to Gemma's norm weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from kernels.dequantize import dequantize
from kernels.packed import PackedWeight
from models.base import ModelError
from models.config import ModelConfig
from models.gguf_reader import BLOCKS, GGUFHeader, TensorInfo, read_header
from models.hf_config import read_config

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EXPERT_NAMES = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
# Constants that the configuration speaks of; no weights.
_CONSTANTS = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd")


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one `general.architecture` relates to the checkpoint that it was converted from."""

    model_type: str
    layer_names: Mapping[str, str] = field(default_factory=lambda: _LAYER_NAMES)
    interleaved_rope: bool = False  # rows of q and k are ordered for rotation of neighbours, not of halves
    norm_offset: float = 0.0  # what the converter added to each norm weight


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", interleaved_rope=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture("qwen3_moe", layer_names=_LAYER_NAMES | {"ffn_gate_inp": "mlp.gate"}),
    "gemma3": Architecture(
        "gemma3_text",
        layer_names=_LAYER_NAMES
        | {
            "ffn_norm": "pre_feedforward_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        norm_offset=1.0,
    ),
}


def gguf_architecture(header: GGUFHeader) -> Architecture:
    """ModelError if the file's architecture is not supported."""
    architecture = ARCHITECTURES.get(header.architecture)
    if architecture is None:
        raise ModelError(
            f"{header.path}: architecture {header.architecture!r} is not supported in GGUF files; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    return architecture


@dataclass(frozen=True, slots=True)
class _Entry:
    """One Hugging Face tensor: a tensor of the file, or the part of it that belongs to one expert."""

    info: TensorInfo
    expert: int | None = None


class GGUFSource:
    """The weights of a GGUF file by their Hugging Face names, over mapped memory.

    `packed` copies nothing, except where rows must be put back in order. ModelError, naming the file, for whatever
    is wrong with it and for a tensor that it does not hold.
    """

    def __init__(self, path: Path) -> None:
        self._header = read_header(path)
        self._architecture = gguf_architecture(self._header)
        self._entries = _entries(self._header, self._architecture)
        self._memory = torch.from_file(
            str(path), shared=False, size=self._header.file_size, dtype=torch.uint8
        )

    def names(self) -> set[str]:
        """All tensors, as a Hugging Face checkpoint of the same model would name them."""
        return set(self._entries)

    def packed(self, name: str) -> PackedWeight:
        """The matrix `name` [rows, columns] in the file's own format."""
        entry = self._entry(name)
        shape = entry.info.shape if entry.expert is None else entry.info.shape[1:]
        if len(shape) != 2:
            raise ModelError(f"{self._header.path}: {entry.info.name} of shape {list(shape)} is not a matrix")
        data = self._data(entry)
        order = self._row_order(name, shape[0])
        return PackedWeight(entry.info.format, data if order is None else data[order], *shape)

    def tensor(self, name: str) -> torch.Tensor:
        """`name` as float32, in its own shape."""
        entry = self._entry(name)
        if len(entry.info.shape) != 1:
            return dequantize(self.packed(name))
        (length,) = entry.info.shape
        values = dequantize(PackedWeight(entry.info.format, self._data(entry), 1, length)).view(length)
        order = self._row_order(name, length)
        if order is not None:
            values = values[order]
        if name.endswith("norm.weight"):
            values = values - self._architecture.norm_offset
        return values

    def _entry(self, name: str) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            raise ModelError(f"{self._header.path}: the file holds no tensor for {name}")
        return entry

    def _data(self, entry: _Entry) -> torch.Tensor:
        """The bytes of a tensor as rows: float formats in their own dtype, others as uint8."""
        info = entry.info
        columns = info.shape[-1]
        start, nbytes = info.offset, info.nbytes
        if entry.expert is not None:
            nbytes //= info.shape[0]
            start += entry.expert * nbytes
        data = self._memory[start : start + nbytes]
        if info.format in _FLOATS:
            return data.view(_FLOATS[info.format]).view(-1, columns)
        values, size = BLOCKS[info.format]
        return data.view(-1, columns // values * size)

    def _row_order(self, name: str, rows: int) -> torch.Tensor | None:
        """Where each row of a Hugging Face q or k projection lies in the file; None: in its place."""
        if not self._architecture.interleaved_rope:
            return None
        part = re.search(r"self_attn\.([qk])_proj\.", name)
        if part is None:
            return None
        heads = head_counts(self._header)["qk".index(part[1])]
        if rows % (2 * heads):
            raise ModelError(f"{self._header.path}: {rows} rows of {name} do not make {heads} heads")
        return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).reshape(-1)


def head_counts(header: GGUFHeader) -> tuple[int, int]:
    """Heads of queries, and of keys and values."""
    prefix = f"{header.architecture}.attention"
    heads = positive(header, f"{prefix}.head_count")
    return heads, positive(header, f"{prefix}.head_count_kv", heads)


def positive(header: GGUFHeader, key: str, default: int | None = None) -> int:
    """The integer `key`, at least 1. ModelError if it is not, or is absent and has no default."""
    value = header.require(key, int) if default is None else header.get(key, int, default)
    if value < 1:
        raise ModelError(f"{header.path}: metadata {key!r} is {value}")
    return value


def _entries(header: GGUFHeader, architecture: Architecture) -> dict[str, _Entry]:
    entries: dict[str, _Entry] = {}
    for name, info in header.tensors.items():
        if _CONSTANTS.fullmatch(name):
            continue
        stem, _, kind = name.rpartition(".")
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        part = layer[2] if layer else stem
        prefix = f"model.layers.{layer[1]}." if layer else ""
        names = architecture.layer_names if layer else _GLOBAL_NAMES
        if kind in ("weight", "bias") and part in names:
            entries[f"{prefix}{names[part]}.{kind}"] = _Entry(info)
        elif header.architecture == "qwen3moe" and layer and kind == "weight" and part in _EXPERT_NAMES:
            experts = positive(header, f"{header.architecture}.expert_count")
            if len(info.shape) != 3 or info.shape[0] != experts:
                raise ModelError(
                    f"{header.path}: {name} of shape {list(info.shape)} does not hold {experts} experts"
                )
            for expert in range(experts):
                entries[f"{prefix}{_EXPERT_NAMES[part].format(expert)}.{kind}"] = _Entry(info, expert)
        else:
            raise ModelError(f"{header.path}: tensor {name!r} is not part of a {header.architecture} model")
    return entries


def gguf_config(path: Path) -> ModelConfig:
    """The configuration that the metadata of the GGUF file at `path` describes. ModelError if it cannot be used."""
    header = read_header(path)
    architecture = gguf_architecture(header)
    _entries(
        header, architecture
    )  # a tensor that nothing would use means that the model is another than it seems
    config = read_config(_hf_config(header, architecture), where=str(path))
    factors = header.tensors.get("rope_freqs.weight")
    return msgspec.structs.replace(
        config,
        attention_output_bias="blk.0.attn_output.bias" in header.tensors,
        rope=msgspec.structs.replace(
            config.rope, frequency_factors=_rope_factors(header, factors, config.head_dim)
        )
        if factors
        else config.rope,
    )


def _hf_config(header: GGUFHeader, architecture: Architecture) -> dict[str, Any]:
    """What the checkpoint's config.json would say."""
    name = header.architecture
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{header.path}: the file holds no token_embd.weight matrix")
    heads, kv_heads = head_counts(header)
    hidden = positive(header, f"{name}.embedding_length")
    if embedding.shape[1] != hidden:
        raise ModelError(
            f"{header.path}: token_embd.weight is {list(embedding.shape)}, the embedding length {hidden}"
        )
    head_dim = positive(header, f"{name}.attention.key_length", max(hidden // heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if header.get(f"{name}.{key}", int, head_dim) != head_dim:
            raise ModelError(f"{header.path}: {name}.{key} other than the head's {head_dim} is not supported")

    layers = positive(header, f"{name}.block_count")
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": positive(header, f"{name}.context_length"),
        "rms_norm_eps": header.require(f"{name}.attention.layer_norm_rms_epsilon", float),
        "rope_theta": header.get(f"{name}.rope.freq_base", float, 10_000.0),
        "rope_scaling": _rope_scaling(header),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
        "sliding_window": header.get(f"{name}.attention.sliding_window", int),
        "bos_token_id": header.get("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": header.get("tokenizer.ggml.eos_token_id", int),
    }
    if name == "qwen3moe":
        experts = positive(header, f"{name}.expert_feed_forward_length")
        config |= {
            "num_experts": positive(header, f"{name}.expert_count"),
            "num_experts_per_tok": positive(header, f"{name}.expert_used_count"),
            "moe_intermediate_size": experts,
            "intermediate_size": positive(header, f"{name}.feed_forward_length", experts),
            "norm_topk_prob": True,  # no key says so; files of this architecture are run that way
        }
        return config
    config["intermediate_size"] = positive(header, f"{name}.feed_forward_length")
    if name == "llama" and config["sliding_window"] is not None:
        config["model_type"] = "mistral"
    if name == "gemma3":
        config |= {
            "rope_local_base_freq": header.get(f"{name}.rope.freq_base_swa", float, 10_000.0),
            "sliding_window_pattern": positive(header, f"{name}.attention.sliding_window_pattern", 6),
            "final_logit_softcapping": header.get(f"{name}.final_logit_softcapping", float),
            # The 27B model alone scales by hidden size over heads; no key tells, its 62 layers do.
            "query_pre_attn_scalar": hidden // heads if layers == 62 else head_dim,
        }
    return config


def _rope_scaling(header: GGUFHeader) -> dict[str, Any] | None:
    prefix = f"{header.architecture}.rope.scaling"
    # The second key is that of older files.
    factor = header.get(f"{prefix}.factor", float) or header.get(
        f"{header.architecture}.rope.scale_linear", float
    )
    kind = header.get(f"{prefix}.type", str, "linear" if factor not in (None, 0.0, 1.0) else "none")
    if kind == "none":
        return None
    keys = {
        "original_max_position_embeddings": ("original_context_length", int),
        "beta_fast": ("yarn_beta_fast", float),
        "beta_slow": ("yarn_beta_slow", float),
    }
    for key in (
        "attn_factor",
        "yarn_attn_factor",
        "yarn_ext_factor",
    ):  # what they change is not computed here
        if header.get(f"{prefix}.{key}", float, 1.0) != 1.0:
            raise ModelError(f"{header.path}: {prefix}.{key} other than 1 is not supported")
    values = {name: header.get(f"{prefix}.{key}", of) for name, (key, of) in keys.items()}
    return {"rope_type": kind} | {
        name: value for name, value in {"factor": factor, **values}.items() if value is not None
    }


def _rope_factors(header: GGUFHeader, info: TensorInfo, head_dim: int) -> tuple[float, ...]:
    """llama3's scaling, worked out by the converter: what each inverse frequency is divided by."""
    if info.format != "F32" or info.shape != (head_dim // 2,):
        raise ModelError(
            f"{header.path}: {info.name} is {info.format} {list(info.shape)}, not F32 [{head_dim // 2}]"
        )
    factors = np.fromfile(header.path, "<f4", head_dim // 2, offset=info.offset)
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise ModelError(f"{header.path}: {info.name} holds factors that are not positive numbers")
    return tuple(factors.tolist())
