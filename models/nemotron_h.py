"""Nemotron-H: layers that are one thing each, a Mamba-2 mixer, attention without positions, an MLP, or experts."""

from __future__ import annotations

import torch
from torch.nn.functional import relu

from kernels.grouped import Choices, linear_by_expert
from models.config import ModelConfig
from models.decoder import Decoder
from models.layers import Attention, Linear, RMSNorm
from models.linear_attention import Mamba2Mixer
from models.mamba2 import canonical_name
from models.moe import Router, stack, weighted_sum
from models.rotary import Rotation
from models.weights import Weights


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """relu(x)², element-wise."""
    return relu(x).square()


class SquaredReluMLP(torch.nn.Module):
    """down(relu(up(x))²)."""

    def __init__(self, config: ModelConfig, prefix: str, size: int, source: Weights) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.mlp_bias
        self.up_proj = Linear.load(source, prefix, ("up_proj",), (size,), hidden, bias)
        self.down_proj = Linear.load(source, prefix, ("down_proj",), (hidden,), size, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(squared_relu(self.up_proj(x)))


class SquaredReluExperts(torch.nn.Module):
    """A few experts for each token, of fewer dimensions if `config.moe_latent_size` is set, and a shared one."""

    def __init__(self, config: ModelConfig, prefix: str, source: Weights) -> None:
        super().__init__()
        self.gate = Router(config, f"{prefix}.gate", source)
        self.num_experts, inner = config.num_experts, config.moe_intermediate_size
        hidden, bias = config.hidden_size, config.mlp_bias
        latent = config.moe_latent_size
        width = latent or hidden
        names = [f"{prefix}.experts.{expert}" for expert in range(config.num_experts)]
        up = (source.matrices([f"{name}.up_proj.weight"], (inner,), width) for name in names)
        down = (source.matrices([f"{name}.down_proj.weight"], (width,), inner) for name in names)
        (self.up_proj,), (self.down_proj,) = stack(len(names), up), stack(len(names), down)
        self.to_latent: Linear | None = None
        self.from_latent: Linear | None = None
        if latent:
            self.to_latent = Linear.load(source, prefix, ("fc1_latent_proj",), (latent,), hidden, bias)
            self.from_latent = Linear.load(source, prefix, ("fc2_latent_proj",), (hidden,), latent, bias)
        self.shared_experts = SquaredReluMLP(
            config, f"{prefix}.shared_experts", config.shared_expert_size, source
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size] to the same."""
        weights, chosen = self.gate(x)
        inputs = x if self.to_latent is None else self.to_latent(x)
        choices = Choices.of(chosen.flatten(), self.num_experts)
        rows = inputs.index_select(0, choices.order // chosen.shape[1])
        rows = linear_by_expert(rows, self.up_proj, choices)
        rows = linear_by_expert(squared_relu(rows), self.down_proj, choices)
        outputs = torch.empty_like(rows).index_copy_(0, choices.order, rows).unflatten(0, chosen.shape)
        routed = weighted_sum(outputs, weights)
        return (routed if self.from_latent is None else self.from_latent(routed)) + self.shared_experts(x)


class NemotronHLayer(torch.nn.Module):
    """Pre-norm mixer of the kind that the configuration says, added to the residual stream."""

    def __init__(self, config: ModelConfig, layer_id: int, source: Weights) -> None:
        super().__init__()
        prefix = f"model.layers.{layer_id}"
        weight = source.vector(f"{prefix}.norm.weight", config.hidden_size)
        self.norm = RMSNorm(weight, config.rms_norm_eps)
        self.attention: Attention | None = None
        self.mixer: torch.nn.Module | None = None
        kind = config.layer_types[layer_id]
        if kind == "full_attention":
            self.attention = Attention(config, layer_id, source, RMSNorm)
        elif kind == "linear_attention":
            self.mixer = Mamba2Mixer(config, layer_id, f"{prefix}.mixer", source)
        elif kind == "moe":
            self.mixer = SquaredReluExperts(config, f"{prefix}.mixer", source)
        else:
            self.mixer = SquaredReluMLP(config, f"{prefix}.mixer", config.intermediate_size, source)

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        normed = self.norm(hidden)
        if self.attention is not None:
            return hidden + self.attention(normed, rotation)
        assert self.mixer is not None
        return hidden + self.mixer(normed)


class NemotronHForCausalLM(Decoder):
    """Published under names of its own."""

    layer_class = NemotronHLayer

    def __init__(self, config: ModelConfig, source: Weights) -> None:
        super().__init__(config, source.renamed(_canonical))


def _canonical(name: str) -> str:
    name = canonical_name(name)
    for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
        name = name.replace(f".mixer.{projection}.", f".self_attn.{projection}.")
    return name
