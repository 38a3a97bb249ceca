"""Tiny random checkpoints of every shape that DeepSeek's models and their kin come in, by transformers' own classes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    PreTrainedModel,
)

_SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "attn_implementation": "eager",
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}


def _v2(**changes: Any) -> PreTrainedModel:
    return DeepseekV2ForCausalLM(DeepseekV2Config(**{**_SHAPE, **changes}))


def _v3(**changes: Any) -> PreTrainedModel:
    shape = {**_SHAPE, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**{**shape, **changes}))


CHECKPOINTS: dict[str, Callable[[], PreTrainedModel]] = {
    "v2-lite": lambda: _v2(q_lora_rank=None, topk_method="greedy"),
    "v2": lambda: _v2(
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=16.0,
        rope_parameters={**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    "v2-biases-wide-values": lambda: _v2(
        attention_bias=True, v_head_dim=32, rope_parameters={**_YARN, "mscale": 1.0, "mscale_all_dim": 0.5}
    ),
    "v3": lambda: _v3(rope_parameters={**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}),
    "v3-biases": lambda: _v3(attention_bias=True, rope_parameters=_YARN),
    "v3-dense": lambda: _v3(first_k_dense_replace=2),
    "v3-halves": lambda: _v3(rope_interleave=False, norm_topk_prob=False, tie_word_embeddings=True),
    "v3-one-group": lambda: _v3(q_lora_rank=None, n_group=1, topk_group=1, num_experts_per_tok=6),
    "v3-for-bytes": lambda: _v3(vocab_size=257, bos_token_id=None, eos_token_id=256),
}


def make_checkpoint(name: str, folder: Path) -> PreTrainedModel:
    """Save checkpoint `name` into `folder`, and return the transformers model, float32, that it was saved from."""
    torch.manual_seed(0)
    model = CHECKPOINTS[name]().float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "norm" in parameter_name:
                parameter.normal_(1.0, 0.3)
            else:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.5)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    return model
