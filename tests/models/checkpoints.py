"""Tiny random checkpoints, made and saved by transformers' own classes: the reference that families are held to.

Every parameter is random, biases and norms too, and large enough that each one moves the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SiglipVisionConfig,
)

VOCAB_SIZE = 256

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "attn_implementation": "eager",
}


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **parameters}}


def _llama(**changes: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**{**_SHAPE, **changes}))


def _mistral(**changes: Any) -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**{**_SHAPE, **changes}))


def _qwen2(**changes: Any) -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**{**_SHAPE, **changes}))


def _qwen3(**changes: Any) -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**{**_SHAPE, "head_dim": 32, **changes}))


def _qwen3_moe(**changes: Any) -> PreTrainedModel:
    shape = {
        **_SHAPE,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**shape, **changes}))


_GEMMA3_SHAPE = {
    **_SHAPE,
    "head_dim": 32,
    "num_hidden_layers": 4,
    "sliding_window": 8,
    "query_pre_attn_scalar": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "pad_token_id": 0,
}


def _gemma3(**changes: Any) -> PreTrainedModel:
    return Gemma3ForCausalLM(Gemma3TextConfig(**{**_GEMMA3_SHAPE, **changes}))


def _gemma3_multimodal() -> PreTrainedModel:
    vision = SiglipVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    )
    config = Gemma3Config(
        text_config=Gemma3TextConfig(**_GEMMA3_SHAPE),
        vision_config=vision,
        mm_tokens_per_image=4,
        boi_token_index=250,
        eoi_token_index=251,
        image_token_index=252,
        attn_implementation="eager",
    )
    return Gemma3ForConditionalGeneration(config)


CHECKPOINTS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": _llama,
    "llama-four-layers": lambda: _llama(num_hidden_layers=4),
    "llama-tied": lambda: _llama(tie_word_embeddings=True),
    "llama-biases": lambda: _llama(attention_bias=True, mlp_bias=True),
    "llama-wide-heads": lambda: _llama(head_dim=24, num_key_value_heads=4),
    "llama-linear": lambda: _llama(**_rope("linear", factor=2.5)),
    "llama-dynamic": lambda: _llama(**_rope("dynamic", factor=4.0)),
    "llama-llama3": lambda: _llama(
        **_rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        )
    ),
    "llama-yarn": lambda: _llama(**_rope("yarn", factor=4.0, original_max_position_embeddings=16)),
    "llama-yarn-tuned": lambda: _llama(
        **_rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=16,
            beta_fast=8.0,
            beta_slow=0.5,
            mscale=0.7,
            mscale_all_dim=0.4,
            truncate=False,
        )
    ),
    "llama-yarn-attention-factor": lambda: _llama(
        **_rope("yarn", factor=4.0, original_max_position_embeddings=16, attention_factor=1.3)
    ),
    "mistral": lambda: _mistral(sliding_window=None),
    "mistral-window": lambda: _mistral(sliding_window=8),
    "ministral": lambda: MinistralForCausalLM(
        MinistralConfig(
            **{**_SHAPE, "num_hidden_layers": 3, "head_dim": 16},
            sliding_window=8,
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        )
    ),
    "qwen2": _qwen2,
    "qwen2-window": lambda: _qwen2(
        num_hidden_layers=3, use_sliding_window=True, sliding_window=8, max_window_layers=1
    ),
    "qwen3": _qwen3,
    "qwen3-biases-tied": lambda: _qwen3(attention_bias=True, tie_word_embeddings=True),
    "qwen3-moe": lambda: _qwen3_moe(norm_topk_prob=True),
    "qwen3-moe-unnormalised": lambda: _qwen3_moe(norm_topk_prob=False, num_experts_per_tok=3),
    "qwen3-moe-dense-layers": lambda: _qwen3_moe(
        num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[1], norm_topk_prob=True
    ),
    "gemma3": _gemma3,
    "gemma3-scaled-softcapped": lambda: _gemma3(
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        final_logit_softcapping=5.0,
    ),
    "gemma3-multimodal": _gemma3_multimodal,
}


def make_checkpoint(name: str, folder: Path, **save: Any) -> PreTrainedModel:
    """Save checkpoint `name` into `folder`, and return the transformers model, float32, that it was saved from."""
    torch.manual_seed(0)
    model = CHECKPOINTS[name]().float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "norm" in parameter_name:
                parameter.normal_(0.0 if "gemma3" in name else 1.0, 0.3)
            else:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.5)
    model.save_pretrained(folder, **save)
    return model
