"""Mixtures of experts: which experts a token goes to, their MLPs side by side, and the shared one that all take."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch.nn.functional import silu

from kernels.grouped import Choices, ExpertWeights, linear_by_expert
from kernels.linear import linear
from kernels.packed import FLOAT_FORMATS, PackedWeight, pack_float
from kernels.rowwise import rowwise
from models.base import ModelError
from models.config import ModelConfig
from models.layers import GatedMLP, activate, gelu_tanh
from models.weights import Weights


class Router(torch.nn.Module):
    """Scores every expert in float32, and chooses a few: among all, or in groups, the best groups first.

    Softmax scores weigh the experts as they are (DeepSeek-V2, Qwen3-MoE). To sigmoid scores a bias is added for the
    choice alone (DeepSeek-V3's balancing without an auxiliary loss).
    """

    def __init__(self, config: ModelConfig, prefix: str, source: Weights) -> None:
        super().__init__()
        self.config = config
        (weight,) = source.matrices([f"{prefix}.weight"], (config.num_experts,), config.hidden_size)
        floats = weight.format in FLOAT_FORMATS.values()
        self.weight = pack_float(weight.data.float()) if floats else weight
        self.bias: torch.Tensor | None = None
        if config.router_scoring == "sigmoid":
            name = f"{prefix}.e_score_correction_bias"
            self.bias = source.vector(name, config.num_experts, torch.float32)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, hidden_size] to weights, float32, and ids of the chosen experts, int64: [T, num_experts_per_tok]."""
        config = self.config
        scores = linear(x.float(), self.weight)
        if self.bias is None:
            scores = torch.softmax(scores, dim=-1)
            weights, chosen = self._in_groups(scores, 0.0).topk(config.num_experts_per_tok, dim=-1)
        else:
            scores = rowwise(torch.sigmoid, scores)
            chosen = self._in_groups(scores + self.bias, -torch.inf).topk(config.num_experts_per_tok).indices
            weights = scores.gather(1, chosen)
        if config.norm_topk_prob:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * config.routed_scaling_factor, chosen

    def _in_groups(self, scores: torch.Tensor, excluded: float) -> torch.Tensor:
        """`scores` [T, num_experts], those outside a token's best groups replaced by `excluded`."""
        config = self.config
        if config.num_groups_per_tok == config.num_expert_groups:
            return scores
        groups = scores.unflatten(1, (config.num_expert_groups, -1))
        # A group is as good as its best expert or, by biased scores, as its two best.
        of_groups = groups.amax(-1) if self.bias is None else groups.topk(2, dim=-1).values.sum(-1)
        best = of_groups.topk(config.num_groups_per_tok, dim=-1).indices
        outside = torch.ones_like(of_groups, dtype=torch.bool).scatter_(1, best, False)
        return groups.masked_fill(outside.unsqueeze(-1), excluded).flatten(1)


class Experts(torch.nn.Module):
    """down(act(gate(x)) * up(x)) of every expert."""

    def __init__(
        self, config: ModelConfig, gate_up_proj: tuple[ExpertWeights, ...], down_proj: ExpertWeights
    ) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self.act = silu if config.activation == "silu" else gelu_tanh
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj

    @classmethod
    def load(cls, config: ModelConfig, prefix: str, source: Weights) -> Experts:
        """From matrices named `prefix.{expert}.{gate,up,down}_proj` or, fused, tensors `prefix.{gate_up,down}_proj`."""
        if source.has(f"{prefix}.gate_up_proj"):
            return cls.fused(config, f"{prefix}.gate_up_proj", f"{prefix}.down_proj", source)
        count, inner, hidden = config.num_experts, config.moe_intermediate_size, config.hidden_size
        names = [f"{prefix}.{expert}" for expert in range(count)]
        gate_up = (
            source.matrices([f"{name}.gate_proj.weight", f"{name}.up_proj.weight"], (inner, inner), hidden)
            for name in names
        )
        down = (source.matrices([f"{name}.down_proj.weight"], (hidden,), inner) for name in names)
        return cls(config, stack(count, gate_up), *stack(count, down))

    @classmethod
    def fused(cls, config: ModelConfig, gate_up: str, down: str, source: Weights) -> Experts:
        """From two tensors, [num_experts, 2 * inner, hidden_size] and [num_experts, hidden_size, inner]."""
        count, inner, hidden = config.num_experts, config.moe_intermediate_size, config.hidden_size
        return cls(
            config,
            stack(count, source.slices(gate_up, count, 2 * inner, hidden)),
            *stack(count, source.slices(down, count, hidden, inner)),
        )

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size] through each of its experts, `chosen` [T, k]: [T, k, hidden_size]."""
        choices = Choices.of(chosen.flatten(), self.num_experts)
        rows = x.index_select(0, choices.order // chosen.shape[1])
        gate_up = [linear_by_expert(rows, weights, choices) for weights in self.gate_up_proj]
        gate, up = gate_up[0].chunk(2, dim=-1) if len(gate_up) == 1 else gate_up
        out = linear_by_expert(activate(self.act, gate) * up, self.down_proj, choices)
        return torch.empty_like(out).index_copy_(0, choices.order, out).unflatten(0, chosen.shape)


class SparseMLP(torch.nn.Module):
    """The weighted sum of a token's experts, and a shared MLP beside them where the configuration has one."""

    def __init__(self, config: ModelConfig, prefix: str, source: Weights) -> None:
        super().__init__()
        self.gate = Router(config, f"{prefix}.gate", source)
        self.experts = Experts.load(config, f"{prefix}.experts", source)
        self.shared_experts: GatedMLP | None = None
        if config.num_shared_experts:
            size = config.num_shared_experts * config.moe_intermediate_size
            self.shared_experts = GatedMLP(config, f"{prefix}.shared_experts", size, source)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size] to the same."""
        weights, chosen = self.gate(x)
        routed = weighted_sum(self.experts(x, chosen), weights)
        return routed if self.shared_experts is None else routed + self.shared_experts(x)


def weighted_sum(outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """outputs [T, k, n] of each token's experts by their weights [T, k]: [T, n].

    Added one by one: the sum of a token does not depend on the others in the batch.
    """
    return functools.reduce(torch.add, (outputs * weights.to(outputs.dtype).unsqueeze(-1)).unbind(1))


def stack(count: int, experts: Iterable[tuple[PackedWeight, ...]]) -> tuple[ExpertWeights, ...]:
    """One stack for each of the matrices that every expert has. They are copied as they come."""
    stacks: tuple[ExpertWeights, ...] = ()
    for expert, matrices in enumerate(experts):
        if not stacks:
            stacks = tuple(
                ExpertWeights(m.format, m.data.new_empty(count, *m.data.shape), m.rows, m.columns)
                for m in matrices
            )
        if [m.format for m in matrices] != [stack.format for stack in stacks]:
            raise ModelError(f"the weights of expert {expert} are in other formats than those of expert 0")
        for matrix, stack in zip(matrices, stacks, strict=True):
            stack.data[expert] = matrix.data
    return stacks
