"""The layers that families share. Each takes its weights when it is built; none holds anything of a pass.

Arithmetic follows transformers step by step, so that equal weights give equal logits. Activations are flat,
[T, …] over all sequences of a batch, in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch.nn.functional import gelu, silu

from backends.forward import get_forward_context
from kernels.linear import embedding, linear
from kernels.packed import PackedWeight
from models.config import ModelConfig
from models.rotary import Rotation, rotate
from models.weights import Weights

# On a CPU, torch may divide an element-wise operation of more elements than this (GELU's limit, the lowest) among
# its threads, wherever that falls within a row, and computes the ends of each share with another exp or tanh.
_UNDIVIDED = 16384


class Linear(torch.nn.Module):
    """y = x @ W^T + b, for one matrix or several stacked ones that share their input."""

    def __init__(self, weights: tuple[PackedWeight, ...], bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.weights = weights
        self.bias = bias

    @classmethod
    def load(
        cls,
        source: Weights,
        prefix: str,
        names: tuple[str, ...],
        rows: tuple[int, ...],
        columns: int,
        bias: bool,
    ) -> Linear:
        """`prefix.name.weight` [rows[i], columns] of every name, stacked; with `bias`, their biases too."""
        weights = source.matrices([f"{prefix}.{name}.weight" for name in names], rows, columns)
        if not bias:
            return cls(weights)
        biases = [source.vector(f"{prefix}.{name}.bias", n) for name, n in zip(names, rows, strict=True)]
        return cls(weights, torch.cat(biases))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.weights) == 1:
            return linear(x, self.weights[0], self.bias)
        y = torch.cat([linear(x, weight) for weight in self.weights], dim=-1)
        return y if self.bias is None else y + self.bias


class Embedding(torch.nn.Module):
    """Rows of a matrix, times `scale` rounded to the model's dtype."""

    def __init__(self, weight: PackedWeight, dtype: torch.dtype, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = weight
        self.dtype = dtype
        self.scale = float(torch.tensor(scale, dtype=dtype))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = embedding(ids, self.weight, self.dtype)
        return rows if self.scale == 1.0 else rows * self.scale


class RMSNorm(torch.nn.Module):
    """x / rms(x) * weight over the last dimension; float32 inside, rounded before the weight is applied."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * self.normalise(x).to(x.dtype)

    def normalise(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class Attention(torch.nn.Module):
    """Self-attention of one layer; scores and cache are the business of the pass's backend."""

    query_parts: ClassVar[int] = 1  # what q_proj gives for each head, in widths of one
    input_parts: ClassVar[int] = 1  # what it is given, in hidden sizes

    def __init__(self, config: ModelConfig, layer_id: int, source: Weights, norm: type[RMSNorm]) -> None:
        super().__init__()
        self.layer_id = config.attention_layers.index(layer_id)  # in the KV pool
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.scale = config.attention_scale
        self.sliding_window = config.window(layer_id)
        self.logit_softcap = config.attn_logit_softcap
        prefix = f"model.layers.{layer_id}.self_attn"
        width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.qkv_proj = Linear.load(
            source,
            prefix,
            ("q_proj", "k_proj", "v_proj"),
            (self.query_parts * width, kv_width, kv_width),
            self.input_parts * config.hidden_size,
            config.attention_bias,
        )
        self.o_proj = Linear.load(
            source, prefix, ("o_proj",), (config.hidden_size,), width, config.attention_output_bias
        )
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm:
            self.q_norm = norm(source.vector(f"{prefix}.q_norm.weight", self.head_dim), config.rms_norm_eps)
            self.k_norm = norm(source.vector(f"{prefix}.k_norm.weight", self.head_dim), config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """hidden [T, input_parts * hidden_size] to [T, hidden_size]."""
        heads = self.qkv_proj(hidden).unflatten(-1, (-1, self.head_dim))
        query, key, value = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        return self.o_proj(self.attend(query, key, value, rotation))

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rotation: Rotation
    ) -> torch.Tensor:
        """Heads as projected, [T, heads, head_dim] each, to what the queries read: [T, num_heads * head_dim]."""
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        context = get_forward_context()
        attended = context.backend.forward(
            rotate(query, rotation), rotate(key, rotation), value, self, context.batch, context.plan
        )
        return attended.flatten(1)


class GatedMLP(torch.nn.Module):
    """down(act(gate(x)) * up(x)), the tensors named `prefix.{gate,up,down}_proj`."""

    def __init__(self, config: ModelConfig, prefix: str, intermediate_size: int, source: Weights) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.act = silu if config.activation == "silu" else gelu_tanh
        self.gate_up_proj = Linear.load(
            source, prefix, ("gate_proj", "up_proj"), (intermediate_size,) * 2, hidden, config.mlp_bias
        )
        self.down_proj = Linear.load(
            source, prefix, ("down_proj",), (hidden,), intermediate_size, config.mlp_bias
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(activate(self.act, gate) * up)


class DecoderLayer(torch.nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig, layer_id: int, source: Weights) -> None:
        super().__init__()
        prefix = f"model.layers.{layer_id}"
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(source.vector(f"{prefix}.input_layernorm.weight", size), eps)
        self.self_attn = Attention(config, layer_id, source, RMSNorm)
        self.post_attention_layernorm = RMSNorm(
            source.vector(f"{prefix}.post_attention_layernorm.weight", size), eps
        )
        self.mlp = self.make_mlp(config, layer_id, source)

    def make_mlp(self, config: ModelConfig, layer_id: int, source: Weights) -> torch.nn.Module:
        return GatedMLP(config, f"model.layers.{layer_id}.mlp", config.intermediate_size, source)

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


def activate(act: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Element-wise act(x), x [T, n], whose rows do not depend, to the bit, on T or the number of threads."""
    if x.device.type != "cpu" or x.numel() <= _UNDIVIDED:
        return act(x)
    return torch.cat([act(rows) for rows in x.split(max(1, _UNDIVIDED // x.shape[-1]))])


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU by its tanh approximation."""
    return gelu(x, approximate="tanh")
