"""Qwen3-Next: gated delta nets, every few layers gated attention, and experts beside one that all tokens take."""

from __future__ import annotations

from typing import ClassVar

import torch

from kernels.rowwise import rowwise
from models.config import ModelConfig
from models.decoder import Decoder
from models.gemma3 import GemmaRMSNorm
from models.hybrid import HybridDecoderLayer
from models.layers import Attention, GatedMLP, Linear
from models.linear_attention import GatedDeltaNet
from models.moe import SparseMLP
from models.rotary import Rotation
from models.weights import Weights


class GatedAttention(Attention):
    """Attention whose output is multiplied by sigmoid of a gate, which is projected beside each head's query."""

    query_parts = 2

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        heads = self.qkv_proj(hidden).unflatten(-1, (-1, self.head_dim))
        queries, key, value = heads.split((2 * self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        query, gate = queries[:, 0::2], queries[:, 1::2]
        attended = self.attend(query, key, value, rotation)
        return self.o_proj(attended * rowwise(torch.sigmoid, gate.flatten(1).float()).to(attended.dtype))


class Qwen3NextDeltaNet(GatedDeltaNet):
    """Projections that are interleaved by key head: query, key, its heads' values and gates; and their b and a."""

    def __init__(self, config: ModelConfig, layer_id: int, prefix: str, source: Weights) -> None:
        super().__init__(config, layer_id, prefix, source)
        state = self.state
        width = state.conv_channels + state.num_heads * state.value_dim
        self.in_proj_qkvz = Linear.load(
            source, prefix, ("in_proj_qkvz",), (width,), config.hidden_size, False
        )
        self.in_proj_ba = Linear.load(
            source, prefix, ("in_proj_ba",), (2 * state.num_heads,), config.hidden_size, False
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [T, hidden_size] to the same."""
        state = self.state
        shared = state.num_heads // state.num_key_heads
        parts = (state.key_dim, state.key_dim, shared * state.value_dim, shared * state.value_dim)
        qkvz = self.in_proj_qkvz(hidden).unflatten(1, (state.num_key_heads, -1)).split(parts, 2)
        query, key, value, z = (part.flatten(1) for part in qkvz)
        ba = self.in_proj_ba(hidden).unflatten(1, (state.num_key_heads, -1))
        b, a = (part.flatten(1) for part in ba.split(shared, 2))
        return self.mix(torch.cat((query, key, value), 1), z, b, a)


class GatedSharedMLP(torch.nn.Module):
    """A token's experts, and an MLP that all tokens take, by sigmoid of a gate."""

    def __init__(self, config: ModelConfig, prefix: str, source: Weights) -> None:
        super().__init__()
        self.routed = SparseMLP(config, prefix, source)
        self.shared_expert = GatedMLP(config, f"{prefix}.shared_expert", config.shared_expert_size, source)
        self.shared_expert_gate = source.tensor(
            f"{prefix}.shared_expert_gate.weight", (1, config.hidden_size)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size] to the same."""
        # A sum of products: a matrix product by a single row is not the same for every row of a tile.
        gate = (x.float() * self.shared_expert_gate).sum(-1, keepdim=True)
        gate = rowwise(torch.sigmoid, gate).to(x.dtype)
        return self.routed(x) + gate * self.shared_expert(x)


class Qwen3NextDecoderLayer(HybridDecoderLayer):
    """A gated delta net where there is no attention; norms that multiply by 1 + weight."""

    norm_class = GemmaRMSNorm
    attention_class = GatedAttention
    delta_net: ClassVar[type[GatedDeltaNet]] = Qwen3NextDeltaNet

    def make_state_mixer(self, config: ModelConfig, layer_id: int, source: Weights) -> torch.nn.Module:
        return self.delta_net(config, layer_id, f"model.layers.{layer_id}.linear_attn", source)

    def make_mlp(self, config: ModelConfig, layer_id: int, source: Weights) -> torch.nn.Module:
        if layer_id not in config.sparse_layers:
            return super().make_mlp(config, layer_id, source)
        return GatedSharedMLP(config, f"model.layers.{layer_id}.mlp", source)


class Qwen3NextForCausalLM(Decoder):
    """The layers above, and a final norm like theirs."""

    layer_class = Qwen3NextDecoderLayer
    norm_class = GemmaRMSNorm
