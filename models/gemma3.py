"""Gemma 3, text: local and global layers with a rope each, norms before and after, a scaled embedding."""

from __future__ import annotations

import torch

from models.config import ModelConfig
from models.decoder import Decoder
from models.layers import Attention, GatedMLP, RMSNorm
from models.rotary import Rotation
from models.weights import Weights


class GemmaRMSNorm(RMSNorm):
    """x / rms(x) * (1 + weight), rounded once at the end."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.normalise(x) * (1.0 + self.weight.float())).to(x.dtype)


class Gemma3DecoderLayer(torch.nn.Module):
    """Attention and MLP, each normed on its way in and on its way out."""

    def __init__(self, config: ModelConfig, layer_id: int, source: Weights) -> None:
        super().__init__()
        prefix = f"model.layers.{layer_id}"

        def norm(name: str) -> GemmaRMSNorm:
            return GemmaRMSNorm(
                source.vector(f"{prefix}.{name}.weight", config.hidden_size), config.rms_norm_eps
            )

        self.input_layernorm = norm("input_layernorm")
        self.self_attn = Attention(config, layer_id, source, GemmaRMSNorm)
        self.post_attention_layernorm = norm("post_attention_layernorm")
        self.pre_feedforward_layernorm = norm("pre_feedforward_layernorm")
        self.mlp = GatedMLP(config, f"{prefix}.mlp", config.intermediate_size, source)
        self.post_feedforward_layernorm = norm("post_feedforward_layernorm")

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        attended = self.self_attn(self.input_layernorm(hidden), rotation)
        hidden = hidden + self.post_attention_layernorm(attended)
        expanded = self.mlp(self.pre_feedforward_layernorm(hidden))
        return hidden + self.post_feedforward_layernorm(expanded)


class Gemma3ForCausalLM(Decoder):
    """The text model, alone or out of a multimodal checkpoint."""

    layer_class = Gemma3DecoderLayer
    norm_class = GemmaRMSNorm
