"""What a model is, in one frozen record, whatever file it came from."""

from __future__ import annotations

from typing import Literal

import msgspec

from models.hybrid_config import LayerType, StateConfig

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]
Activation = Literal["silu", "gelu_tanh"]
RouterScoring = Literal["softmax", "sigmoid"]


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding. Fields that a `type` does not use keep their defaults.

    `frequency_factors`: divisors of the head_dim / 2 inverse frequencies, as GGUF files carry them in place of
    llama3's parameters; empty: none.
    """

    theta: float = 10_000.0
    type: RopeType = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    frequency_factors: tuple[float, ...] = ()


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Shape and arithmetic of a decoder-only model."""

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    activation: Activation = "silu"

    rope: RopeConfig = RopeConfig()
    local_rope: RopeConfig | None = None  # of sliding layers, where theirs differs (Gemma 3)
    sliding_window: int | None = None  # tokens a sliding layer's query sees, itself included
    layer_types: tuple[LayerType, ...] = ()  # one a layer; empty: all full

    tie_word_embeddings: bool = False
    attention_bias: bool = False  # on the q, k and v projections
    attention_output_bias: bool = False  # on the o projection
    mlp_bias: bool = False
    qk_norm: bool = False
    query_pre_attn_scalar: float | None = None  # attention scale is its -1/2 power; None: head_dim's
    attn_logit_softcap: float | None = None
    final_logit_softcap: float | None = None
    embedding_scale: float = 1.0

    # Latent attention (MLA). Keys of head_dim are qk_nope_head_dim columns that are not rotated, then those that are.
    kv_lora_rank: int = 0  # 0: no latent attention
    q_lora_rank: int = 0  # 0: queries are projected in one step
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    rope_interleaved: bool = False  # neighbours are rotated together, not halves

    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    sparse_layers: tuple[int, ...] = ()  # layers whose MLP is a mixture of experts
    num_shared_experts: int = 0  # that every token takes
    router_scoring: RouterScoring = "softmax"  # sigmoid: a bias corrects the choice, not the weights
    num_expert_groups: int = 1
    num_groups_per_tok: int = 1  # groups that a token's experts are chosen from
    routed_scaling_factor: float = 1.0
    moe_latent_size: int = 0  # of what routed experts see; 0: the hidden size

    has_mamba_layers: bool = False  # that keep recurrent state
    state: StateConfig | None = None
    partial_rotary_factor: float = 1.0  # of a head's columns, which are rotated; 0: positions are not encoded
    residual_scale: float = 1.0  # of what a layer adds
    logits_divisor: float = 1.0
    shared_expert_size: int = 0  # of an MLP that every token takes, by a gate of its own

    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str | None = None  # of the checkpoint: "float32", "bfloat16", "float16"

    def window(self, layer_id: int) -> int | None:
        """Tokens that a query of this layer sees, itself included; None: all."""
        return self.sliding_window if self.is_sliding(layer_id) else None

    def is_sliding(self, layer_id: int) -> bool:
        return bool(self.layer_types) and self.layer_types[layer_id] == "sliding_attention"

    @property
    def context_length(self) -> int:
        """Tokens a sequence may span, with the stretch that RoPE scaling gives where the file counts without it."""
        trained, rope = self.max_position_embeddings, self.rope
        if self.local_rope is not None or rope.type not in ("linear", "dynamic", "yarn"):
            return trained
        scaled = rope.original_max_position_embeddings if rope.type == "yarn" else trained
        return max(trained, int(scaled * rope.factor))

    @property
    def rotary_dim(self) -> int:
        """Columns of a head that are rotated."""
        return self.qk_rope_head_dim or int(self.head_dim * self.partial_rotary_factor)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Ids of the layers that attend."""
        types = self.layer_types or ("full_attention",) * self.num_layers
        return tuple(i for i, kind in enumerate(types) if kind in ("full_attention", "sliding_attention"))

    @property
    def state_layers(self) -> tuple[int, ...]:
        """Ids of the layers that keep recurrent state."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind in ("linear_attention", "conv"))

    @property
    def attention_scale(self) -> float:
        return (self.query_pre_attn_scalar or self.head_dim) ** -0.5
