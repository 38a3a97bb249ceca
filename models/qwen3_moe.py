"""Qwen3-MoE: Qwen3 whose MLP is, in most layers, a choice of a few experts for each token."""

from __future__ import annotations

import functools

import torch

from models.config import ModelConfig
from models.decoder import Decoder
from models.layers import DecoderLayer, GatedMLP, Linear
from models.weights import Weights


class SparseMLP(torch.nn.Module):
    """The `num_experts_per_tok` likeliest experts of each token, weighted by their router probabilities."""

    def __init__(self, config: ModelConfig, prefix: str, source: Weights) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.norm_topk_prob = config.norm_topk_prob
        self.gate = Linear.load(source, prefix, ("gate",), (config.num_experts,), config.hidden_size, False)
        self.experts = torch.nn.ModuleList(
            GatedMLP(config, f"{prefix}.experts.{expert}", config.moe_intermediate_size, source)
            for expert in range(config.num_experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size] to the same."""
        probabilities = torch.softmax(self.gate(x), dim=-1, dtype=torch.float32)
        weights, chosen = probabilities.topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        # Sort the [T * k] choices by expert, so that each expert in use runs once, over rows that lie together.
        order = chosen.flatten().argsort(stable=True)
        rows = x[order // self.top_k]
        used, counts = chosen.flatten().unique(return_counts=True)
        segments = rows.split(counts.tolist())
        outputs = [self.experts[expert](part) for expert, part in zip(used.tolist(), segments, strict=True)]
        mixed = (
            torch.empty_like(rows).index_copy_(0, order, torch.cat(outputs)).view(-1, self.top_k, x.shape[-1])
        )
        mixed = mixed * weights.to(x.dtype).unsqueeze(-1)
        # Added one by one, likeliest first: the sum of a token does not depend on the others in the batch.
        return functools.reduce(torch.add, mixed.unbind(1))


class Qwen3MoeDecoderLayer(DecoderLayer):
    """A decoder layer that is sparse where the configuration says so."""

    def make_mlp(self, config: ModelConfig, layer_id: int, source: Weights) -> torch.nn.Module:
        if layer_id not in config.sparse_layers:
            return super().make_mlp(config, layer_id, source)
        return SparseMLP(config, f"model.layers.{layer_id}.mlp", source)


class Qwen3MoeForCausalLM(Decoder):
    """Qwen3's attention, dense and sparse MLPs."""

    layer_class = Qwen3MoeDecoderLayer
