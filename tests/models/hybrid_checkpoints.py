"""Tiny random checkpoints of the families with recurrent state, made and saved by transformers' own classes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from tests.models.checkpoints import VOCAB_SIZE

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "attn_implementation": "eager",
}
_ATTENTION = {
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_DELTA = {
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 40,
}


def _qwen3_next(**changes: Any) -> PreTrainedModel:
    return Qwen3NextForCausalLM(Qwen3NextConfig(**{**_SHAPE, **_ATTENTION, **_DELTA, **_EXPERTS, **changes}))


def _qwen3_5(**changes: Any) -> PreTrainedModel:
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**_SHAPE, **_ATTENTION, **_DELTA, **changes}))


_WITHOUT_MLP = {key: value for key, value in _ATTENTION.items() if key != "intermediate_size"}


def _qwen3_5_moe(**changes: Any) -> PreTrainedModel:
    config = Qwen3_5MoeTextConfig(**{**_SHAPE, **_WITHOUT_MLP, **_DELTA, **_EXPERTS, **changes})
    return Qwen3_5MoeForCausalLM(config)


_NESTED: dict[str, Any] = {
    "vision_config": {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "patch_size": 4,
        "temporal_patch_size": 1,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
    },
    "attn_implementation": "eager",
}
_TEXT = {key: value for key, value in _SHAPE.items() if key != "attn_implementation"}


def _qwen3_5_multimodal(**changes: Any) -> PreTrainedModel:
    text = {**_TEXT, **_ATTENTION, **_DELTA}
    return Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, **_NESTED, **changes))


def _qwen3_5_moe_multimodal() -> PreTrainedModel:
    text = {**_TEXT, **_WITHOUT_MLP, **_DELTA, **_EXPERTS}
    return Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(text_config=text, **_NESTED))


def _lfm2(**changes: Any) -> PreTrainedModel:
    shape = {"block_multiple_of": 16, "full_attn_idxs": [1, 3]}
    return Lfm2ForCausalLM(Lfm2Config(**{**_SHAPE, **_ATTENTION, **shape, **changes}))


def _mamba2(**changes: Any) -> PreTrainedModel:
    shape = {"num_hidden_layers": 3, "num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 24}
    return Mamba2ForCausalLM(Mamba2Config(**{**_SHAPE, **shape, **changes}))


def _nemotron_h(**changes: Any) -> PreTrainedModel:
    shape = {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
        "head_dim": 24,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 24,
        "n_routed_experts": 8,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 40,
    }
    attention = {key: value for key, value in _ATTENTION.items() if key != "num_hidden_layers"}
    return NemotronHForCausalLM(NemotronHConfig(**{**_SHAPE, **attention, **shape, **changes}))


def _granite(**changes: Any) -> PreTrainedModel:
    shape = {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "mamba_n_heads": 8,
        "mamba_d_state": 24,
        "shared_intermediate_size": 40,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 1.5,
    }
    return GraniteMoeHybridForCausalLM(GraniteMoeHybridConfig(**{**_SHAPE, **_ATTENTION, **shape, **changes}))


CHECKPOINTS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3-next": _qwen3_next,
    "qwen3-next-dense-layers": lambda: _qwen3_next(
        decoder_sparse_step=2,
        mlp_only_layers=[1],
        norm_topk_prob=False,
        layer_types=["full_attention", "linear_attention"] * 2,
        linear_conv_kernel_dim=3,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    ),
    "qwen3-next-equal-heads": lambda: _qwen3_next(
        linear_num_key_heads=4, linear_value_head_dim=16, attention_bias=True, tie_word_embeddings=True
    ),
    "qwen3-next-yarn": lambda: _qwen3_next(
        rms_norm_eps=0.02,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "partial_rotary_factor": 0.25,
        },
    ),
    "qwen3-5": _qwen3_5,
    "qwen3-5-tied": lambda: _qwen3_5(
        tie_word_embeddings=True, layer_types=["linear_attention"] * 3 + ["full_attention"]
    ),
    "qwen3-5-biases": lambda: _qwen3_5(
        attention_bias=True,
        linear_conv_kernel_dim=2,
        linear_num_key_heads=1,
        rope_parameters={  # as published: a text's positions are the same in all sections
            "rope_type": "default",
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.5,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
    ),
    "qwen3-5-multimodal": _qwen3_5_multimodal,
    "qwen3-5-multimodal-tied": lambda: _qwen3_5_multimodal(tie_word_embeddings=True),
    "qwen3-5-experts": _qwen3_5_moe,
    "qwen3-5-experts-always-normalised": lambda: _qwen3_5_moe(norm_topk_prob=False, num_experts_per_tok=3),
    "qwen3-5-experts-multimodal": _qwen3_5_moe_multimodal,
    "lfm2": _lfm2,
    "lfm2-biases": lambda: _lfm2(
        conv_bias=True, conv_L_cache=4, block_auto_adjust_ff_dim=False, tie_word_embeddings=False
    ),
    "lfm2-layer-types": lambda: _lfm2(
        full_attn_idxs=None,
        layer_types=["conv", "conv", "full_attention", "conv"],
        norm_eps=0.02,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "mamba2": _mamba2,
    "mamba2-biases": lambda: _mamba2(
        use_bias=True, use_conv_bias=False, conv_kernel=3, n_groups=1, tie_word_embeddings=True
    ),
    "mamba2-limited": lambda: _mamba2(time_step_limit=(0.1, 0.9)),
    "mamba2-narrow": lambda: _mamba2(expand=1, num_heads=4, layer_norm_epsilon=0.02),
    "nemotron-h": _nemotron_h,
    "nemotron-h-biases": lambda: _nemotron_h(use_bias=True, mlp_bias=True, n_groups=4, time_step_min=0.5),
    "nemotron-h-without-conv-bias": lambda: _nemotron_h(
        use_conv_bias=False,
        conv_kernel=3,
        num_key_value_heads=4,
        layer_norm_epsilon=0.02,
        tie_word_embeddings=True,  # which its class does not heed
    ),
    "nemotron-h-experts": lambda: _nemotron_h(
        layers_block_type=["linear_attention", "moe", "full_attention", "moe"],
        num_experts_per_tok=3,
        routed_scaling_factor=2.5,
    ),
    "nemotron-h-latent-experts": lambda: _nemotron_h(
        layers_block_type=["full_attention", "moe", "linear_attention", "mlp"],
        moe_latent_size=24,
        mlp_bias=True,
        n_group=4,
        topk_group=2,
        norm_topk_prob=False,
    ),
    "granite-hybrid": lambda: _granite(num_local_experts=0),
    "granite-hybrid-experts": lambda: _granite(
        num_local_experts=4, num_experts_per_tok=3, mamba_n_groups=2, attention_bias=True
    ),
    "granite-hybrid-rope": lambda: _granite(
        num_local_experts=0, position_embedding_type="rope", mamba_proj_bias=True, tie_word_embeddings=True
    ),
    "granite-hybrid-limited": lambda: _granite(
        num_local_experts=0,
        mamba_conv_bias=False,
        mamba_d_conv=3,
        mamba_expand=3,
        mamba_d_head=24,
        time_step_limit=(0.1, 0.6),
        rms_norm_eps=0.02,
    ),
    "granite-attention": lambda: _granite(
        num_local_experts=0, layer_types=["full_attention"] * 4, position_embedding_type="rope"
    ),
    "lfm2-multiplied": lambda: _lfm2(block_ffn_dim_multiplier=1.3, full_attn_idxs=[0]),
}


def make_checkpoint(name: str, folder: Path) -> PreTrainedModel:
    """Save checkpoint `name` into `folder`, and return the transformers model, float32, that it was saved from.

    Every parameter is random, and large enough to move the logits. States decay slowly enough to be remembered.
    """
    torch.manual_seed(0)
    model = CHECKPOINTS[name]().float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("A_log"):
                parameter.normal_(-2.0, 1.0)
            elif parameter.ndim == 1 and "norm" in parameter_name:
                plus_one = "qwen" in name and "linear_attn" not in parameter_name
                parameter.normal_(0.0 if plus_one else 1.0, 0.3)
            else:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.5)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    return model
