"""Qwen3.5, text: Qwen3-Next's layers, with a projection for each input of a gated delta net; dense or with experts."""

from __future__ import annotations

import torch

from models.config import ModelConfig
from models.layers import Linear
from models.linear_attention import GatedDeltaNet
from models.qwen3_next import Qwen3NextDecoderLayer, Qwen3NextForCausalLM
from models.weights import Weights


class Qwen3_5DeltaNet(GatedDeltaNet):
    """Projections of query, key and value together, and of z, b and a."""

    def __init__(self, config: ModelConfig, layer_id: int, prefix: str, source: Weights) -> None:
        super().__init__(config, layer_id, prefix, source)
        state = self.state
        self.parts = (
            state.conv_channels,
            state.num_heads * state.value_dim,
            state.num_heads,
            state.num_heads,
        )
        self.in_proj = Linear.load(
            source,
            prefix,
            ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
            self.parts,
            config.hidden_size,
            False,
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [T, hidden_size] to the same."""
        return self.mix(*self.in_proj(hidden).split(self.parts, 1))


class Qwen3_5DecoderLayer(Qwen3NextDecoderLayer):
    """Qwen3-Next's with the delta net above."""

    delta_net = Qwen3_5DeltaNet


class Qwen3_5ForCausalLM(Qwen3NextForCausalLM):
    """The text model, alone or out of a multimodal checkpoint."""

    layer_class = Qwen3_5DecoderLayer
