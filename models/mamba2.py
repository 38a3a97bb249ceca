"""Mamba-2: nothing but mixers with recurrent state. It has no attention, and no positions."""

from __future__ import annotations

import torch

from models.config import ModelConfig
from models.decoder import Decoder
from models.layers import RMSNorm
from models.linear_attention import Mamba2Mixer
from models.rotary import Rotation
from models.weights import Weights

_NAMES = {"backbone.embedding.": "model.embed_tokens.", "backbone.embeddings.": "model.embed_tokens."}


class Mamba2Layer(torch.nn.Module):
    """Pre-norm mixer, added to the residual stream."""

    def __init__(self, config: ModelConfig, layer_id: int, source: Weights) -> None:
        super().__init__()
        prefix = f"model.layers.{layer_id}"
        weight = source.vector(f"{prefix}.norm.weight", config.hidden_size)
        self.norm = RMSNorm(weight, config.rms_norm_eps)
        self.mixer = Mamba2Mixer(config, layer_id, f"{prefix}.mixer", source)

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        return hidden + self.mixer(self.norm(hidden))


class Mamba2ForCausalLM(Decoder):
    """Published under names of its own."""

    layer_class = Mamba2Layer

    def __init__(self, config: ModelConfig, source: Weights) -> None:
        super().__init__(config, source.renamed(canonical_name))


def canonical_name(name: str) -> str:
    """The name that other families have for the tensor `name` of a `backbone`."""
    for own, canonical in _NAMES.items():
        name = name.replace(own, canonical)
    return name.replace("backbone.norm_f.", "model.norm.").replace("backbone.", "model.")
