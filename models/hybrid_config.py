"""Configurations of the families whose layers keep recurrent state: their keys, and what they add to ModelConfig."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import Any, Literal

import msgspec

LayerType = Literal["full_attention", "sliding_attention", "linear_attention", "conv", "mlp", "moe"]

_OLD_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}
_PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


class StateConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The recurrent part of a layer that has one. A short convolution alone has no heads.

    `num_heads` states [key_dim, value_dim], of which num_heads / num_key_heads share keys and queries (Mamba-2: B, C).
    """

    conv_taps: int
    conv_channels: int
    conv_bias: bool = False
    projection_bias: bool = False
    num_heads: int = 0
    num_key_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    delta_rule: bool = False
    time_step_limit: tuple[float, float] = (0.0, inf)  # Mamba-2: what a step is clamped to

    def __post_init__(self) -> None:
        if self.conv_taps < 2:
            raise ValueError(f"a convolution over {self.conv_taps} positions keeps no state")
        if self.num_heads and self.num_heads % self.num_key_heads:
            raise ValueError(f"{self.num_heads} heads cannot share {self.num_key_heads} keys")


def values(model_type: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with the keys that other families have as well under their names."""
    return {**config, **_FAMILIES[model_type].values(config)}


def fields(model_type: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ModelConfig that only these families have, of a config.json as `values` returns it."""
    named = [_OLD_NAMES.get(kind, kind) for kind in config["layer_types"]]
    kinds = msgspec.convert(named, tuple[LayerType, ...])
    if len(kinds) != config["num_hidden_layers"]:
        raise ValueError(f"{len(kinds)} layer types for {config['num_hidden_layers']} layers")
    return {**_FAMILIES[model_type].fields(config), "layer_types": kinds, "has_mamba_layers": True}


class _DeltaKeys(msgspec.Struct):
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    shared_expert_intermediate_size: int = 0


def _qwen_values(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    layers, every = config["num_hidden_layers"], config.get("full_attention_interval") or 4
    return {
        "layer_types": config.get("layer_types")
        or ["full_attention" if (layer + 1) % every == 0 else "linear_attention" for layer in range(layers)],
        "partial_rotary_factor": rope.get("partial_rotary_factor")
        or config.get("partial_rotary_factor")
        or 0.25,
        "intermediate_size": config.get("intermediate_size") or config.get("moe_intermediate_size"),
    }


def _qwen_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    keys = msgspec.convert(config, _DeltaKeys)
    key_width = keys.linear_num_key_heads * keys.linear_key_head_dim
    state = StateConfig(
        conv_taps=keys.linear_conv_kernel_dim,
        conv_channels=2 * key_width + keys.linear_num_value_heads * keys.linear_value_head_dim,
        num_heads=keys.linear_num_value_heads,
        num_key_heads=keys.linear_num_key_heads,
        key_dim=keys.linear_key_head_dim,
        value_dim=keys.linear_value_head_dim,
        delta_rule=True,
    )
    return {"state": state, "qk_norm": True, "shared_expert_size": keys.shared_expert_intermediate_size}


class _ConvKeys(msgspec.Struct):
    hidden_size: int
    conv_L_cache: int = 3
    conv_bias: bool = False


def _lfm2_values(config: Mapping[str, Any]) -> dict[str, Any]:
    layers, attending = config["num_hidden_layers"], config.get("full_attn_idxs")
    size = config.get("block_ff_dim") or config["intermediate_size"]
    if config["block_auto_adjust_ff_dim"]:
        size, multiple = int(2 * size / 3), config["block_multiple_of"]
        if config["block_ffn_dim_multiplier"] is not None:
            size = -(-int(config["block_ffn_dim_multiplier"] * size) // multiple) * multiple
    return {
        "layer_types": config.get("layer_types")
        or ["full_attention" if attending is None or i in attending else "conv" for i in range(layers)],
        "intermediate_size": size,
        "rms_norm_eps": config["norm_eps"],
        "tie_word_embeddings": config.get("tie_embedding", config["tie_word_embeddings"]),
    }


def _lfm2_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    keys = msgspec.convert(config, _ConvKeys)
    state = StateConfig(
        conv_taps=keys.conv_L_cache,
        conv_channels=keys.hidden_size,
        conv_bias=keys.conv_bias,
        projection_bias=keys.conv_bias,
    )
    return {"state": state, "qk_norm": True}


class _Family(msgspec.Struct, frozen=True):
    """How a family's keys are read, its defaults as transformers has them, and its architecture's name."""

    architecture: str
    defaults: dict[str, Any]
    values: Callable[[Mapping[str, Any]], dict[str, Any]]
    fields: Callable[[Mapping[str, Any]], dict[str, Any]]


_QWEN = {"head_dim": 256, "max_position_embeddings": 32768}
_QWEN_MOE = {
    **_QWEN,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
}

_FAMILIES = {
    "qwen3_next": _Family(
        "Qwen3NextForCausalLM",
        {**_QWEN_MOE, "num_experts": 512, "num_experts_per_tok": 10},
        _qwen_values,
        _qwen_fields,
    ),
    "lfm2": _Family(
        "Lfm2ForCausalLM",
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 128_000,
            "rope_theta": 1_000_000.0,
            "norm_eps": 1e-5,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "tie_word_embeddings": True,
            "block_auto_adjust_ff_dim": True,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 256,
        },
        _lfm2_values,
        _lfm2_fields,
    ),
}

DEFAULTS = {model_type: family.defaults for model_type, family in _FAMILIES.items()}
ARCHITECTURES = {model_type: family.architecture for model_type, family in _FAMILIES.items()}
