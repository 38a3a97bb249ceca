"""Granite 4 hybrid: Mamba-2 mixers, attention in some layers, a shared MLP in all of them and experts beside it."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from models.config import ModelConfig
from models.decoder import Decoder
from models.hybrid import HybridDecoderLayer
from models.layers import Linear, activate
from models.linear_attention import Mamba2Mixer
from models.moe import Experts, Router, weighted_sum
from models.weights import Weights


class FusedMLP(torch.nn.Module):
    """down(silu(gate(x)) * up(x)), with gate and up in one matrix."""

    def __init__(self, config: ModelConfig, prefix: str, source: Weights) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.shared_expert_size
        self.input_linear = Linear.load(source, prefix, ("input_linear",), (2 * size,), hidden, False)
        self.output_linear = Linear.load(source, prefix, ("output_linear",), (hidden,), size, False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.input_linear(x).chunk(2, dim=-1)
        return self.output_linear(activate(silu, gate) * up)


class GraniteMLP(torch.nn.Module):
    """The shared MLP, plus a token's experts where the model has any."""

    def __init__(self, config: ModelConfig, prefix: str, source: Weights) -> None:
        super().__init__()
        self.shared_mlp = FusedMLP(config, f"{prefix}.shared_mlp", source)
        self.router: Router | None = None
        self.experts: Experts | None = None
        if config.num_experts:
            experts = f"{prefix}.block_sparse_moe"
            self.router = Router(config, f"{experts}.router.layer", source)
            self.experts = Experts.fused(
                config, f"{experts}.input_linear.weight", f"{experts}.output_linear.weight", source
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size] to the same."""
        shared = self.shared_mlp(x)
        if self.router is None or self.experts is None:
            return shared
        weights, chosen = self.router(x)
        return weighted_sum(self.experts(x, chosen), weights) + shared


class GraniteHybridLayer(HybridDecoderLayer):
    """A Mamba-2 mixer where there is no attention."""

    def make_state_mixer(self, config: ModelConfig, layer_id: int, source: Weights) -> torch.nn.Module:
        return Mamba2Mixer(config, layer_id, f"model.layers.{layer_id}.mamba", source)

    def make_mlp(self, config: ModelConfig, layer_id: int, source: Weights) -> torch.nn.Module:
        return GraniteMLP(config, f"model.layers.{layer_id}", source)


class GraniteMoeHybridForCausalLM(Decoder):
    """Embedding, residual stream and logits are scaled, attention by a factor that the configuration gives."""

    layer_class = GraniteHybridLayer
