"""Reads a Hugging Face `config.json` into a `ModelConfig`.

It may be in the spelling of transformers 5 (`rope_parameters`, `layer_types`) or in the older one (`rope_theta`,
`rope_scaling`, `sliding_window_pattern`). Keys that a published config leaves out take the defaults of that family's
transformers class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import msgspec

from models import hybrid_config as hybrid
from models.base import ModelError
from models.config import Activation, ModelConfig, RopeConfig, RopeType
from models.hybrid_config import LayerType

_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

# By model_type, what its transformers class takes for a key that config.json leaves out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "qwen3_moe": {
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
    "deepseek_v2": {
        "max_position_embeddings": 2048,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "topk_method": "greedy",
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.0,
    },
    "deepseek_v3": {
        "max_position_embeddings": 4096,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "rope_interleave": True,
    },
    "gemma3_text": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    **hybrid.DEFAULTS,
}
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "kimi_k25": "KimiK25ForConditionalGeneration",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    **hybrid.ARCHITECTURES,
}


# Names under which a family's configuration is published besides its own.
_SAME_AS = {"kimi_k2": "deepseek_v3", "ministral": "mistral"}

# Multimodal models that are served as the text model in their text_config, and its model_type.
_TEXT_MODELS = {"gemma3": "gemma3_text", "kimi_k25": "deepseek_v3", **hybrid.TEXT_MODELS}


def read_config(config: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """Read the dict of a config.json. Raises ModelError, which starts with `where`, for one that cannot be used."""
    try:
        return _Reader(config, where).read()
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise ModelError(f"{where}: not the configuration of a language model ({error!r})") from error


def _with_scaling(parameters: Mapping[str, Any], scaling: Mapping[str, Any]) -> Mapping[str, Any]:
    """`rope_parameters` where there may also be `rope_scaling`, which counts: but for what it cannot say."""
    kept = {key: parameters[key] for key in ("rope_theta", "partial_rotary_factor") if key in parameters}
    return {**kept, **scaling} if scaling else parameters


class _Reader:
    """One config.json on its way to a ModelConfig: typed look-ups that name the key at fault."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.where = where
        if not isinstance(config, Mapping):
            raise ModelError(f"{where}: not a JSON object")
        outer = config
        text = config.get("text_config")
        nested = _TEXT_MODELS.get(str(config.get("model_type")))
        if nested is not None and isinstance(text, Mapping):
            config = {"model_type": nested, **text}
            if "tie_word_embeddings" in outer:  # the head is the whole model's
                config["tie_word_embeddings"] = outer["tie_word_embeddings"]
        self.model_type = self._model_type(outer, config)
        # Token ids, dtype and quantisation stand beside text_config in a nested file.
        shared = {
            key: outer[key]
            for key in ("eos_token_id", "bos_token_id", "torch_dtype", "dtype", "quantization_config")
            if key in outer
        }
        self.values: dict[str, Any] = {**_DEFAULTS.get(self.model_type, {}), **shared, **config}
        names = outer.get("architectures") or [_ARCHITECTURES.get(str(outer.get("model_type")), "")]
        if not isinstance(names, list):
            raise self._error(f"'architectures' is {names!r}, not a list")
        self.architecture = str(names[0])
        if self.model_type in hybrid.DEFAULTS:
            self.values = hybrid.values(self.model_type, self.values)
        if self.model_type not in _DEFAULTS:
            raise self._error(
                f"architecture {self.architecture!r} (model_type {self.model_type!r}) is not supported "
                f"({', '.join(_ARCHITECTURES.values())} are)"
            )

    def read(self) -> ModelConfig:
        if self.values.get("quantization_config"):
            raise self._error(
                "checkpoints with a quantization_config are not supported; use safetensors in float or GGUF"
            )
        if self.values.get("use_bidirectional_attention"):
            raise self._error("use_bidirectional_attention is not supported")
        gemma = self.model_type == "gemma3_text"
        hidden, heads, layers = (
            self._int(key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers")
        )
        latent = self._latent()
        kv_heads = heads if latent else self._int("num_key_value_heads", heads)
        if layers > hybrid.MAX_LAYERS:
            raise self._error(f"num_hidden_layers {layers} is more than any model has")
        if heads % kv_heads:
            raise self._error(
                f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            )
        rope, local_rope = self._ropes()
        window = self._window()
        activation = str(self.values.get("hidden_activation" if gemma else "hidden_act") or "silu")
        if activation not in _ACTIVATIONS:
            raise self._error(f"activation {activation!r} is not supported ({', '.join(_ACTIVATIONS)} are)")
        bias = self._flag("attention_bias")
        head_dim = latent["qk_nope_head_dim"] + latent["qk_rope_head_dim"] if latent else None
        head_dim = head_dim or self._int("head_dim", hidden // heads)
        if head_dim % 2 and self.model_type not in hybrid.DEFAULTS:  # which need not encode positions
            raise self._error(f"head_dim {head_dim} is odd: positions are encoded in pairs")
        softcap = "{}_logit_softcapping"
        read = ModelConfig(
            architecture=self.architecture,
            model_type=self.model_type,
            vocab_size=self._int("vocab_size"),
            hidden_size=hidden,
            intermediate_size=self._int("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=self._int("max_position_embeddings", 32768),
            rms_norm_eps=self._float("rms_norm_eps", 1e-6),
            activation=_ACTIVATIONS[activation],
            rope=rope,
            partial_rotary_factor=self._float("partial_rotary_factor", 1.0),
            local_rope=local_rope,
            sliding_window=window,
            layer_types=self._layer_types(layers, window),
            tie_word_embeddings=self._flag("tie_word_embeddings"),
            attention_bias=bias or self.model_type == "qwen2",
            attention_output_bias=bias and self.model_type != "qwen2",
            mlp_bias=self._flag("mlp_bias"),
            qk_norm=self.model_type in ("qwen3", "qwen3_moe", "gemma3_text"),
            query_pre_attn_scalar=self._float("query_pre_attn_scalar", 0.0) or None,
            attn_logit_softcap=self._float(softcap.format("attn"), 0.0) or None,
            final_logit_softcap=self._float(softcap.format("final"), 0.0) or None,
            embedding_scale=hidden**0.5 if gemma else 1.0,
            **self._experts(layers),
            **latent,
            bos_token_id=next(iter(self._ids("bos_token_id")), None),
            eos_token_ids=self._ids("eos_token_id"),
            dtype=self._dtype(),
        )
        if self.model_type not in hybrid.DEFAULTS:
            return read
        return msgspec.structs.replace(read, **hybrid.fields(self.model_type, self.values))

    def _model_type(self, outer: Mapping[str, Any], config: Mapping[str, Any]) -> str:
        model_type = config.get("model_type")
        if model_type:
            return _SAME_AS.get(str(model_type), str(model_type))
        architectures = outer.get("architectures") or [""]
        by_architecture = {name: key for key, name in _ARCHITECTURES.items()}
        return by_architecture.get(str(architectures[0]), "")

    def _layer_types(self, layers: int, window: int | None) -> tuple[LayerType, ...]:
        """Which layers slide, by the rule of each family."""
        named = self.values.get("layer_types")
        if named is not None and self.model_type in ("mistral", "qwen2", "qwen3", "gemma3_text"):
            return self._named_layer_types(named, layers)
        if self.model_type == "gemma3_text":
            every = self._int("sliding_window_pattern", 6)
            slides = [bool((layer + 1) % every) for layer in range(layers)]
        else:
            first = self.values["max_window_layers"] if self.model_type in ("qwen2", "qwen3") else 0
            slides = [window is not None and layer >= first for layer in range(layers)]
        return tuple("sliding_attention" if slide else "full_attention" for slide in slides)

    def _named_layer_types(self, named: Any, layers: int) -> tuple[LayerType, ...]:
        try:
            types = msgspec.convert(named, tuple[LayerType, ...])
        except msgspec.ValidationError as error:
            raise self._error(f"layer_types: {error}") from error
        if len(types) != layers:
            raise self._error(f"layer_types has {len(types)} entries for {layers} layers")
        return types

    def _window(self) -> int | None:
        slides = self.model_type in ("mistral", "gemma3_text")
        slides |= self.model_type.startswith("qwen") and self._flag("use_sliding_window")
        if not slides or self.values["sliding_window"] is None:
            return None
        return self._int("sliding_window")

    def _latent(self) -> dict[str, Any]:
        """Fields of latent attention; none for the families without."""
        if not self.model_type.startswith("deepseek"):
            return {}
        sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        return {
            **{key: self._int(key) for key in sizes},
            "q_lora_rank": self._count("q_lora_rank"),
            "rope_interleaved": self.model_type == "deepseek_v2" or self._flag("rope_interleave"),
        }

    def _experts(self, layers: int) -> dict[str, Any]:
        """Fields of mixtures of experts; none for the families without."""
        if self.model_type in ("qwen3_moe", "qwen3_next", "qwen3_5_moe_text"):
            return {
                "num_experts": self._int("num_local_experts", self._int("num_experts")),
                "num_experts_per_tok": self._int("num_experts_per_tok"),
                "moe_intermediate_size": self._int("moe_intermediate_size"),
                # Qwen3.5 has no such key, and its model always does.
                "norm_topk_prob": self.model_type == "qwen3_5_moe_text" or self._flag("norm_topk_prob"),
                "sparse_layers": self._sparse_layers(layers),
            }
        if not self.model_type.startswith("deepseek"):
            return {}
        experts, per_token = self._int("n_routed_experts"), self._int("num_experts_per_tok")
        sigmoid = self.model_type == "deepseek_v3"
        grouped = sigmoid or self.values["topk_method"] == "group_limited_greedy"
        if not grouped and self.values["topk_method"] != "greedy":
            raise self._error(f"topk_method {self.values['topk_method']!r} is not supported")
        groups, chosen = (self._int(key, 1) if grouped else 1 for key in ("n_group", "topk_group"))
        if experts % groups or chosen > groups or per_token > experts // groups * chosen:
            raise self._error(
                f"{per_token} of {experts} experts cannot be chosen from {chosen} of {groups} groups"
            )
        return {
            "num_experts": experts,
            "num_experts_per_tok": per_token,
            "moe_intermediate_size": self._int("moe_intermediate_size"),
            # The second version's configuration has the key, and its model does not heed it.
            "norm_topk_prob": sigmoid and self._flag("norm_topk_prob"),
            "sparse_layers": tuple(range(self._count("first_k_dense_replace"), layers)),
            "num_shared_experts": self._count("n_shared_experts"),
            "router_scoring": "sigmoid" if sigmoid else "softmax",
            "num_expert_groups": groups,
            "num_groups_per_tok": chosen,
            "routed_scaling_factor": self._float("routed_scaling_factor", 1.0),
        }

    def _sparse_layers(self, layers: int) -> tuple[int, ...]:
        dense = set(self.values.get("mlp_only_layers") or ())
        step = self._int("decoder_sparse_step", 1)
        return tuple(layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0)

    def _ropes(self) -> tuple[RopeConfig, RopeConfig | None]:
        """The rope of all layers, and the sliding layers' own where they have one."""
        theta = self.values.get("rope_theta") or 10_000.0
        # People add the older key to files that have the newer one: it is what they want changed.
        parameters, scaling = (self.values.get(key) or {} for key in ("rope_parameters", "rope_scaling"))
        if self.model_type != "gemma3_text":
            return self._rope(_with_scaling(parameters, scaling), theta), None
        nested = parameters if set(get_args(LayerType)) & set(parameters) else {"full_attention": parameters}
        return (
            self._rope(_with_scaling(nested.get("full_attention") or {}, scaling), theta),
            self._rope(nested.get("sliding_attention") or {}, self.values["rope_local_base_freq"]),
        )

    def _rope(self, parameters: Mapping[str, Any], theta: float) -> RopeConfig:
        kind = parameters.get("rope_type") or parameters.get("type") or "default"
        if kind not in get_args(RopeType):
            raise self._error(f"rope type {kind!r} is not supported ({', '.join(get_args(RopeType))} are)")
        partial = parameters.get("partial_rotary_factor") or self.values.get("partial_rotary_factor") or 1.0
        if partial != 1.0 and self.model_type not in hybrid.DEFAULTS:
            raise self._error("partial_rotary_factor is not supported")
        trained = self.values.get("original_max_position_embeddings") or parameters.get(
            "original_max_position_embeddings"
        )
        values = {
            key: parameters[key]
            for key in msgspec.structs.asdict(RopeConfig())
            if key not in ("type", "theta") and parameters.get(key) is not None
        }
        values["original_max_position_embeddings"] = trained or self._int("max_position_embeddings", 32768)
        values["theta"] = parameters.get("rope_theta") or theta
        if kind == "yarn" and parameters.get("factor") is None:
            values["factor"] = (
                self._int("max_position_embeddings", 32768) / values["original_max_position_embeddings"]
            )
        if kind != "default" and not values.get("factor"):
            raise self._error(f"rope type {kind!r} needs a 'factor' that is not 0")
        if kind == "llama3" and not {"low_freq_factor", "high_freq_factor"} <= set(values):
            raise self._error("rope type 'llama3' needs a 'low_freq_factor' and a 'high_freq_factor'")
        try:
            return msgspec.convert({**values, "type": kind}, RopeConfig)
        except msgspec.ValidationError as error:
            raise self._error(f"rope parameters: {error}") from error

    def _int(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self._error(f"no {key!r}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._error(f"{key!r} is {value!r}, not a positive integer")
        return value

    def _count(self, key: str) -> int:
        """An integer that may be 0, as it is where the key is null."""
        return self._int(key) if self.values.get(key) else 0

    def _float(self, key: str, default: float) -> float:
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._error(f"{key!r} is {value!r}, not a number")
        return float(value)

    def _flag(self, key: str) -> bool:
        """False where the key is null or not there."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self._error(f"{key!r} is {value!r}, neither true nor false")
        return bool(value)

    def _ids(self, key: str) -> tuple[int, ...]:
        value = self.values.get(key)
        ids = value if isinstance(value, list | tuple) else () if value is None else (value,)
        if not all(isinstance(item, int) for item in ids):
            raise self._error(f"{key!r} is {value!r}, not token ids")
        return tuple(ids)

    def _dtype(self) -> str | None:
        value = self.values.get("dtype") or self.values.get("torch_dtype")
        return None if value is None else str(value).removeprefix("torch.")

    def _error(self, text: str) -> ModelError:
        return ModelError(f"{self.where}: {text}")
