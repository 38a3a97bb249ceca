"""Configurations of the families whose layers keep recurrent state: their keys, and what they add to ModelConfig."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import Any, Literal

import msgspec

LayerType = Literal["full_attention", "sliding_attention", "linear_attention", "conv", "mlp", "moe"]

MAX_LAYERS = 10_000  # what a corrupt file says must not make lists without end

_STATEFUL = frozenset[LayerType](("linear_attention", "conv"))
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
    layers = config.get("num_hidden_layers")
    if isinstance(layers, int) and layers > MAX_LAYERS:
        raise ValueError(f"num_hidden_layers {layers} is more than any model has")
    for key in ("hidden_act", "mamba_hidden_act"):  # of the convolution, too
        if (config.get(key) or "silu") not in ("silu", "swish"):
            raise ValueError(f"{key} {config[key]!r} is not supported (silu is)")
    return {**config, **_FAMILIES[model_type].values(config)}


def fields(model_type: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ModelConfig that only these families have, of a config.json as `values` returns it."""
    named = [_OLD_NAMES.get(kind, kind) for kind in config["layer_types"]]
    kinds = msgspec.convert(named, tuple[LayerType, ...])
    if len(kinds) != config["num_hidden_layers"]:
        raise ValueError(f"{len(kinds)} layer types for {config['num_hidden_layers']} layers")
    found = {**_FAMILIES[model_type].fields(config), "layer_types": kinds}
    if _STATEFUL.isdisjoint(kinds):  # such as the smaller ones of Granite 4
        return found | {"state": None}
    return found | {"has_mamba_layers": True}


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


class _MambaKeys(msgspec.Struct, kw_only=True):
    num_heads: int
    head_dim: int
    state_size: int
    n_groups: int
    conv_kernel: int = 4
    use_bias: bool = False
    use_conv_bias: bool = True
    limit: tuple[float, float] = (0.0, inf)

    def state(self) -> StateConfig:
        width = self.num_heads * self.head_dim
        if width % self.n_groups:
            raise ValueError(f"{self.n_groups} groups do not divide {width} columns")
        return StateConfig(
            conv_taps=self.conv_kernel,
            conv_channels=width + 2 * self.n_groups * self.state_size,
            conv_bias=self.use_conv_bias,
            projection_bias=self.use_bias,
            num_heads=self.num_heads,
            num_key_heads=self.n_groups,
            key_dim=self.state_size,
            value_dim=self.head_dim,
            time_step_limit=self.limit,
        )


def _mamba_fields(config: Mapping[str, Any], names: Mapping[str, str], **changes: Any) -> dict[str, Any]:
    """`names` are the family's own, by those of _MambaKeys."""
    found = {key: config[own] for key, own in names.items() if config.get(own) is not None}
    return {"state": msgspec.convert({**found, **changes}, _MambaKeys).state()}


def _limit(config: Mapping[str, Any]) -> tuple[float, float]:
    """JSON has no infinity, so it is written in several ways."""
    low, high = (
        float(bound["__float__"] if isinstance(bound, Mapping) else bound)
        for bound in config.get("time_step_limit") or (0.0, inf)
    )
    return low, high


_NO_ATTENTION = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 1, "intermediate_size": 1}


def _mamba2_values(config: Mapping[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    return {
        "mamba_head_dim": config["head_dim"],
        **_NO_ATTENTION,
        "layer_types": ["linear_attention"] * layers,
        "partial_rotary_factor": 0.0,
        "rms_norm_eps": config["layer_norm_epsilon"],
    }


def _mamba2_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    names = ("num_heads", "state_size", "n_groups", "conv_kernel", "use_bias", "use_conv_bias")
    own = {name: name for name in names} | {"head_dim": "mamba_head_dim"}
    return _mamba_fields(config, own, limit=_limit(config))


_NEMOTRON_OLD_NAMES = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_min": "time_step_min",
}


def _nemotron_values(config: Mapping[str, Any]) -> dict[str, Any]:
    if config["mlp_hidden_act"] != "relu2":
        raise ValueError(f"mlp_hidden_act {config['mlp_hidden_act']!r} is not supported (relu2 is)")
    kinds = config.get("layers_block_type") or [
        _PATTERN[letter] for letter in config["hybrid_override_pattern"]
    ]
    return {
        **{own: config[old] for old, own in _NEMOTRON_OLD_NAMES.items() if old in config},
        "layer_types": kinds,
        "num_hidden_layers": len(kinds),
        "partial_rotary_factor": 0.0,
        "rms_norm_eps": config["layer_norm_epsilon"],
        # transformers' class heeds neither.
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


def _nemotron_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    own = {
        "num_heads": "mamba_num_heads",
        "head_dim": "mamba_head_dim",
        "state_size": "ssm_state_size",
        "n_groups": "n_groups",
        "conv_kernel": "conv_kernel",
        "use_bias": "use_bias",
        "use_conv_bias": "use_conv_bias",
    }
    fields = _mamba_fields(config, own, limit=(config["time_step_min"], inf))
    if "moe" not in config["layer_types"]:
        return fields
    return fields | {
        "num_experts": config["n_routed_experts"],
        "num_experts_per_tok": config["num_experts_per_tok"],
        "moe_intermediate_size": config["moe_intermediate_size"],
        "moe_latent_size": config.get("moe_latent_size") or 0,
        "shared_expert_size": config["moe_shared_expert_intermediate_size"],
        "norm_topk_prob": config["norm_topk_prob"],
        "router_scoring": "sigmoid",
        "num_expert_groups": config["n_group"],
        "num_groups_per_tok": config["topk_group"],
        "routed_scaling_factor": float(config["routed_scaling_factor"]),
    }


def _granite_values(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "layer_types": config.get("layer_types") or ["linear_attention"] * config["num_hidden_layers"],
        "partial_rotary_factor": 1.0 if config.get("position_embedding_type") == "rope" else 0.0,
        "query_pre_attn_scalar": config["attention_multiplier"] ** -2,
    }


def _granite_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    own = {
        "num_heads": "mamba_n_heads",
        "state_size": "mamba_d_state",
        "n_groups": "mamba_n_groups",
        "conv_kernel": "mamba_d_conv",
        "use_bias": "mamba_proj_bias",
        "use_conv_bias": "mamba_conv_bias",
    }
    head_dim = config["mamba_expand"] * config["hidden_size"] // config["mamba_n_heads"]
    fields = _mamba_fields(config, own, head_dim=head_dim, limit=_limit(config)) | {
        "embedding_scale": float(config["embedding_multiplier"]),
        "residual_scale": float(config["residual_multiplier"]),
        "logits_divisor": float(config["logits_scaling"]),
        "shared_expert_size": config["shared_intermediate_size"],
    }
    if not config["num_local_experts"]:
        return fields
    return fields | {
        "num_experts": config["num_local_experts"],
        "num_experts_per_tok": config["num_experts_per_tok"],
        "moe_intermediate_size": config["intermediate_size"],
        "norm_topk_prob": True,
    }


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
    "qwen3_5_text": _Family(
        "Qwen3_5ForCausalLM", {**_QWEN, "num_key_value_heads": 4}, _qwen_values, _qwen_fields
    ),
    "qwen3_5_moe_text": _Family(
        "Qwen3_5MoeForCausalLM",
        {**_QWEN_MOE, "num_experts": 256, "num_experts_per_tok": 8},
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
    "mamba2": _Family(
        "Mamba2ForCausalLM",
        {
            "max_position_embeddings": 131_072,  # it has no limit of its own
            "layer_norm_epsilon": 1e-5,
            "num_heads": 128,
            "head_dim": 64,
            "state_size": 128,
            "n_groups": 8,
            "bos_token_id": 0,
            "eos_token_id": 2,
        },
        _mamba2_values,
        _mamba2_fields,
    ),
    "nemotron_h": _Family(
        "NemotronHForCausalLM",
        {
            "max_position_embeddings": 4096,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "layer_norm_epsilon": 1e-5,
            "mlp_hidden_act": "relu2",
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 8,
            "time_step_min": 0.001,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        _nemotron_values,
        _nemotron_fields,
    ),
    "granitemoehybrid": _Family(
        "GraniteMoeHybridForCausalLM",
        {
            "max_position_embeddings": 2048,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "logits_scaling": 1.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 1024,
            "mamba_n_heads": 128,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_expand": 2,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        _granite_values,
        _granite_fields,
    ),
}

DEFAULTS = {model_type: family.defaults for model_type, family in _FAMILIES.items()}
# Multimodal models that are served as the text model in their text_config, and its model_type.
TEXT_MODELS = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
ARCHITECTURES = {
    **{model_type: family.architecture for model_type, family in _FAMILIES.items()},
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
}
