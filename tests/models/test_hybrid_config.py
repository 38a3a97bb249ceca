"""Configurations of families with recurrent state, as they are published: old spellings, and what is left out."""

from __future__ import annotations

import json
from math import inf
from typing import Any

import pytest

from models.base import ModelError
from models.hf_config import read_config

QWEN3_NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "rope_theta": 10_000_000,
    "full_attention_interval": 4,
}
NEMOTRON_H: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "vocab_size": 131072,
    "hidden_size": 4480,
    "intermediate_size": 15680,
    "num_hidden_layers": 6,
    "num_attention_heads": 40,
    "mamba_num_heads": 128,
    "mamba_head_dim": 80,
    "attention_bias": True,
    "hybrid_override_pattern": "M-M*-M",
}
MAMBA2: dict[str, Any] = {
    "architectures": ["Mamba2ForCausalLM"],
    "model_type": "mamba2",
    "vocab_size": 32768,
    "hidden_size": 4096,
    "num_hidden_layers": 3,
}


def test_qwen3_next_as_published() -> None:
    config = read_config(QWEN3_NEXT)
    assert config.attention_layers == (3, 7)
    assert config.state_layers == (0, 1, 2, 4, 5, 6)
    assert config.has_mamba_layers
    assert (config.head_dim, config.num_kv_heads, config.rotary_dim) == (256, 2, 64)
    assert (config.num_experts, config.num_experts_per_tok, config.shared_expert_size) == (512, 10, 512)
    state = config.state
    assert state is not None and state.delta_rule
    assert (state.num_heads, state.num_key_heads, state.key_dim, state.value_dim) == (32, 16, 128, 128)
    assert (state.conv_taps, state.conv_channels) == (4, 2 * 2048 + 4096)


def test_qwen3_next_stretched_as_its_card_says() -> None:
    stretch = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262144}
    config = read_config({**QWEN3_NEXT, "max_position_embeddings": 262144, "rope_scaling": stretch})
    assert (config.rope.type, config.rope.factor, config.rope.theta) == ("yarn", 4.0, 10_000_000)
    assert (config.rotary_dim, config.context_length) == (64, 4 * 262144)


def test_qwen3_5_is_the_text_part_of_a_multimodal_file() -> None:
    text = {**QWEN3_NEXT, "model_type": "qwen3_5_text", "rope_parameters": {"partial_rotary_factor": 0.5}}
    del text["architectures"]
    config = read_config(
        {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "text_config": text,
            "vision_config": {},
        }
    )
    assert config.architecture == "Qwen3_5ForConditionalGeneration"
    assert (config.num_experts, config.rotary_dim, config.num_kv_heads) == (0, 128, 4)


def test_nemotron_h_by_its_pattern() -> None:
    config = read_config(NEMOTRON_H)
    assert config.attention_layers == (3,)
    assert config.state_layers == (0, 2, 5)
    assert config.layer_types[1] == "mlp"
    assert (config.rotary_dim, config.attention_bias) == (0, False)
    assert config.state is not None and config.state.time_step_limit == (0.001, inf)


def test_nemotron_h_under_its_older_names() -> None:
    older = {"mamba_n_groups": 4, "mamba_d_conv": 3, "mamba_conv_bias": False, "mamba_dt_min": 0.25}
    own = {"n_groups": 4, "conv_kernel": 3, "use_conv_bias": False, "time_step_min": 0.25}
    assert read_config({**NEMOTRON_H, **older}) == read_config({**NEMOTRON_H, **own})
    assert read_config({**NEMOTRON_H, **older}) != read_config(NEMOTRON_H)


def test_mamba2_has_no_attention() -> None:
    config = read_config(MAMBA2)
    assert config.attention_layers == ()
    assert config.state_layers == (0, 1, 2)
    state = config.state
    assert state is not None
    assert (state.num_heads, state.value_dim, state.key_dim, state.num_key_heads) == (128, 64, 128, 8)
    assert state.conv_channels == 128 * 64 + 2 * 8 * 128


@pytest.mark.parametrize("high", ["Infinity", '{"__float__": "Infinity"}'])
def test_an_infinite_limit_in_either_spelling(high: str) -> None:
    limits = json.loads(f'{{"time_step_limit": [0.25, {high}]}}')
    state = read_config({**MAMBA2, **limits}).state
    assert state is not None and state.time_step_limit == (0.25, inf)


GRANITE = {
    "model_type": "granitemoehybrid",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "mamba_n_heads": 8,
    "num_local_experts": 0,
}


def test_old_names_of_layer_types() -> None:
    config = read_config(
        {
            **GRANITE,
            "num_hidden_layers": 3,
            "layer_types": ["mamba", "attention", "mamba"],
            "position_embedding_type": "nope",
        }
    )
    assert config.architecture == "GraniteMoeHybridForCausalLM"
    assert config.layer_types == ("linear_attention", "full_attention", "linear_attention")
    assert (config.attention_layers, config.rotary_dim, config.num_experts) == ((1,), 0, 0)
    assert config.state is not None and config.state.value_dim == 16


def test_granite_of_attention_alone_keeps_no_state() -> None:
    config = read_config(
        {
            **GRANITE,
            "num_hidden_layers": 2,
            "layer_types": ["attention", "attention"],
            "position_embedding_type": "rope",
        }
    )
    assert (config.attention_layers, config.state_layers) == ((0, 1), ())
    assert (config.has_mamba_layers, config.state) == (False, None)


def test_lfm2_adjusts_the_width_of_its_mlp() -> None:
    lfm2 = {
        "model_type": "lfm2",
        "vocab_size": 65536,
        "hidden_size": 1024,
        "block_ff_dim": 6656,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "full_attn_idxs": [2],
    }
    config = read_config(lfm2)
    assert config.intermediate_size == 4608
    assert (config.attention_layers, config.state_layers) == ((2,), (0, 1, 3))
    assert config.tie_word_embeddings
    assert read_config({**lfm2, "block_auto_adjust_ff_dim": False}).intermediate_size == 6656


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({**QWEN3_NEXT, "linear_num_key_heads": 5}, "32 heads cannot share 5 keys"),
        ({**QWEN3_NEXT, "linear_key_head_dim": "wide"}, "linear_key_head_dim"),
        ({**QWEN3_NEXT, "layer_types": ["full_attention"]}, "1 layer types for 8 layers"),
        ({**MAMBA2, "num_hidden_layers": 10**12}, "more than any model has"),
        ({**QWEN3_NEXT, "layer_types": ["rnn"] * 8}, "rnn"),
        ({**QWEN3_NEXT, "linear_conv_kernel_dim": 1}, "keeps no state"),
        ({**NEMOTRON_H, "hybrid_override_pattern": "M?"}, r"\?"),
        ({**NEMOTRON_H, "mlp_hidden_act": "gelu"}, "relu2"),
        ({**NEMOTRON_H, "mamba_hidden_act": "gelu"}, "mamba_hidden_act 'gelu' is not supported"),
        ({**QWEN3_NEXT, "hidden_act": "gelu_pytorch_tanh"}, "hidden_act 'gelu_pytorch_tanh'"),
        ({**MAMBA2, "hidden_act": "relu"}, "hidden_act 'relu'"),
        ({**MAMBA2, "n_groups": 7}, "groups"),
    ],
)
def test_what_cannot_be_used_is_named(config: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint) as caught:
        read_config(config, "somewhere/config.json")
    assert str(caught.value).startswith("somewhere/config.json: ")
