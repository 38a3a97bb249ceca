"""The decoder layer of families that mix attention with recurrent state: pre-norm mixer and MLP."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from models.config import ModelConfig
from models.layers import Attention, GatedMLP, RMSNorm
from models.rotary import Rotation
from models.weights import Weights


class HybridDecoderLayer(torch.nn.Module, ABC):
    """A mixer and an MLP, each added to the residual stream, times `config.residual_scale`.

    Families say by `make_state_mixer` what stands in for attention in the layers that keep state.
    """

    norm_class: ClassVar[type[RMSNorm]] = RMSNorm
    attention_class: ClassVar[type[Attention]] = Attention

    def __init__(self, config: ModelConfig, layer_id: int, source: Weights) -> None:
        super().__init__()
        self.residual_scale = config.residual_scale
        self.input_layernorm = self._norm(config, layer_id, "input_layernorm", source)
        self.self_attn: Attention | None = None
        self.state_mixer: torch.nn.Module | None = None
        if layer_id in config.state_layers:
            self.state_mixer = self.make_state_mixer(config, layer_id, source)
        else:
            self.self_attn = self.attention_class(config, layer_id, source, self.norm_class)
        self.post_attention_layernorm = self._norm(config, layer_id, "post_attention_layernorm", source)
        self.mlp = self.make_mlp(config, layer_id, source)

    @abstractmethod
    def make_state_mixer(self, config: ModelConfig, layer_id: int, source: Weights) -> torch.nn.Module:
        """A module from hidden states [T, hidden_size] to the same."""

    def make_mlp(self, config: ModelConfig, layer_id: int, source: Weights) -> torch.nn.Module:
        return GatedMLP(config, f"model.layers.{layer_id}.mlp", config.intermediate_size, source)

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        normed = self.input_layernorm(hidden)
        if self.self_attn is not None:
            mixed = self.self_attn(normed, rotation)
        else:
            assert self.state_mixer is not None
            mixed = self.state_mixer(normed)
        hidden = hidden + self._scaled(mixed)
        return hidden + self._scaled(self.mlp(self.post_attention_layernorm(hidden)))

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.residual_scale == 1.0 else x * self.residual_scale

    def _norm(self, config: ModelConfig, layer_id: int, name: str, source: Weights) -> RMSNorm:
        weight = source.vector(f"model.layers.{layer_id}.{name}.weight", config.hidden_size)
        return self.norm_class(weight, config.rms_norm_eps)
