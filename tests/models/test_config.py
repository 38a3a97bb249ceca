"""Configurations: both spellings of config.json, the families' defaults, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.base import ModelError
from models.config import ModelConfig
from models.hf_config import read_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}


def config(**changes: Any) -> ModelConfig:
    return read_config({**LLAMA, **changes})


def test_old_and_new_spellings_of_rope_mean_the_same() -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 2.0,
        "high_freq_factor": 3.0,
        "original_max_position_embeddings": 512,
    }
    old = config(rope_theta=500_000.0, rope_scaling={"type": "llama3", **scaling})
    new = config(rope_parameters={"rope_type": "llama3", "rope_theta": 500_000.0, **scaling})
    assert old == new
    assert old.rope.type == "llama3"
    assert old.rope.theta == 500_000.0
    assert (old.rope.factor, old.rope.low_freq_factor, old.rope.high_freq_factor) == (8.0, 2.0, 3.0)
    assert old.rope.original_max_position_embeddings == 512


def test_a_trained_length_beside_rope_scaling_counts_as_the_original_one() -> None:
    rope = config(
        original_max_position_embeddings=256, rope_scaling={"rope_type": "yarn", "factor": 8.0}
    ).rope
    assert rope.original_max_position_embeddings == 256


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_type": "default"}, 2048),
        ({"rope_type": "linear", "factor": 4.0}, 8192),
        ({"rope_type": "dynamic", "factor": 2.0}, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512}, 2048),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256,
            },
            2048,
        ),
    ],
)
def test_context_length_includes_the_stretch_of_rope_scaling(rope: dict[str, Any], length: int) -> None:
    assert config(rope_scaling=rope).context_length == length


def test_yarn_without_a_factor_takes_the_ratio_of_the_two_lengths() -> None:
    rope = config(rope_parameters={"rope_type": "yarn", "original_max_position_embeddings": 512}).rope
    assert rope.factor == 4.0


def test_one_and_several_end_of_sequence_tokens() -> None:
    assert config(eos_token_id=7).eos_token_ids == (7,)
    assert config(eos_token_id=[7, 9]).eos_token_ids == (7, 9)
    assert config().eos_token_ids == ()


def test_heads_default_as_in_transformers() -> None:
    plain = config(num_key_value_heads=None)
    assert plain.num_kv_heads == 8
    assert plain.head_dim == 8
    assert config(head_dim=32).head_dim == 32


def test_qwen2_slides_only_when_told_to() -> None:
    qwen2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 16}
    idle = config(**qwen2, use_sliding_window=False, max_window_layers=2)
    assert [idle.window(layer) for layer in range(4)] == [None] * 4
    used = config(**qwen2, use_sliding_window=True, max_window_layers=2)
    assert [used.window(layer) for layer in range(4)] == [None, None, 16, 16]
    assert used.attention_bias
    assert not used.attention_output_bias


def test_mistral_slides_in_every_layer_or_none() -> None:
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    assert config(**mistral, sliding_window=16).window(3) == 16
    assert config(**mistral, sliding_window=None).window(3) is None


def test_layers_of_a_mistral_may_be_named_one_by_one() -> None:
    named = ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"]
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 16}
    found = config(**mistral, layer_types=named)
    assert [found.window(layer) for layer in range(4)] == [None, 16, 16, 16]


def test_rope_scaling_that_was_added_to_a_newer_file_counts() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    plain = {"rope_type": "default", "rope_theta": 1e6}
    older = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    for added in (scaling, older):
        found = config(rope_parameters=plain, rope_scaling=added)
        assert found.rope == config(rope_theta=1e6, rope_scaling=scaling).rope

    stretched = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0, "attention_factor": 2.0}
    found = config(rope_parameters=stretched, rope_scaling=scaling)
    assert found.rope == config(rope_theta=1e6, rope_scaling=scaling).rope, "but for theta"

    nested = {"full_attention": plain, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    gemma = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "rope_parameters": nested}
    found = config(**gemma, rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert (found.rope.type, found.rope.factor, found.rope.theta) == ("linear", 8.0, 1e6)
    assert found.local_rope is not None and found.local_rope.type == "default"


def test_a_quantised_multimodal_checkpoint_is_refused_by_its_outer_key() -> None:
    quantised = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {**LLAMA, "model_type": "gemma3_text"},
        "quantization_config": {"quant_method": "fp8"},
    }
    with pytest.raises(ModelError, match="quantization_config"):
        read_config(quantised)


def test_gemma3_as_published_with_most_keys_left_out() -> None:
    gemma = read_config(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "eos_token_id": [1, 106],
            "torch_dtype": "bfloat16",
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
            "vision_config": {"hidden_size": 1152},
        }
    )
    assert (gemma.vocab_size, gemma.num_heads, gemma.num_kv_heads, gemma.head_dim) == (262208, 8, 4, 256)
    assert [layer for layer in range(13) if not gemma.is_sliding(layer)] == [5, 11]
    assert (gemma.window(0), gemma.window(5)) == (1024, None)
    assert (gemma.rope.theta, gemma.rope.type, gemma.rope.factor) == (1_000_000.0, "linear", 8.0)
    assert gemma.local_rope is not None
    assert (gemma.local_rope.theta, gemma.local_rope.type) == (10_000.0, "default")
    assert gemma.attention_scale == 256**-0.5
    assert gemma.tie_word_embeddings
    assert gemma.eos_token_ids == (1, 106)
    assert gemma.dtype == "bfloat16"
    assert gemma.context_length == 131072


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"hidden_size": None}, "no 'hidden_size'"),
        ({"vocab_size": "many"}, "'vocab_size' is 'many'"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' is 0"),
        ({"num_hidden_layers": 10**12}, "more than any model has"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"hidden_act": "relu6"}, "'relu6'"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "'spiral' is not supported"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "big"}}, "rope parameters"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"eos_token_id": "</s>"}, "'eos_token_id' is '</s>'"),
        ({"rope_scaling": "linear"}, "not the configuration"),
        ({"architectures": 7}, "'architectures' is 7, not a list"),
        ({"architectures": "LlamaForCausalLM"}, "'architectures' is 'LlamaForCausalLM', not a list"),
        ({"tie_word_embeddings": "false"}, "'tie_word_embeddings' is 'false'"),
        ({"attention_bias": "no"}, "'attention_bias' is 'no'"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"rope_scaling": {"type": "linear"}}, "'linear' needs a 'factor'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 0}}, "'dynamic' needs a 'factor'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'low_freq_factor'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM'"),
    ],
)
def test_what_cannot_be_used_is_named(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint) as caught:
        read_config({**LLAMA, **changes}, "somewhere/config.json")
    assert str(caught.value).startswith("somewhere/config.json: ")


def test_a_config_that_is_no_object_is_refused() -> None:
    with pytest.raises(ModelError, match="not a JSON object"):
        read_config([1, 2], "config.json")  # type: ignore[arg-type]


@given(
    st.dictionaries(
        st.sampled_from(
            [*LLAMA, "rope_scaling", "rope_parameters", "layer_types", "text_config", "sliding_window"]
        ),
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers()
            | st.floats()
            | st.sampled_from(["qwen2", "gemma3", "yarn"]),
            lambda inner: (
                st.lists(inner, max_size=2)
                | st.dictionaries(st.sampled_from(["rope_type", "factor", "type", "full_attention"]), inner)
            ),
            max_leaves=4,
        ),
    )
)
def test_any_json_object_is_read_or_refused_and_never_crashes(changes: dict[str, Any]) -> None:
    try:
        read = read_config({**LLAMA, **changes})
    except ModelError:
        return
    assert read.num_heads % read.num_kv_heads == 0
    assert len(read.layer_types) == read.num_layers
