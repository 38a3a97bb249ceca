"""Qwen3-MoE: Qwen3 whose MLP is, in most layers, a choice of a few experts for each token."""

from __future__ import annotations

import torch

from models.config import ModelConfig
from models.decoder import Decoder
from models.layers import DecoderLayer
from models.moe import SparseMLP
from models.weights import Weights


class MoeDecoderLayer(DecoderLayer):
    """A decoder layer that is sparse where the configuration says so."""

    def make_mlp(self, config: ModelConfig, layer_id: int, source: Weights) -> torch.nn.Module:
        if layer_id not in config.sparse_layers:
            return super().make_mlp(config, layer_id, source)
        return SparseMLP(config, f"model.layers.{layer_id}.mlp", source)


class Qwen3MoeForCausalLM(Decoder):
    """Qwen3's attention, dense and sparse MLPs."""

    layer_class = MoeDecoderLayer
