"""Token mixers with recurrent state: gated delta nets and Mamba-2. The state is the business of the pass's backend.

Arithmetic follows transformers; what is not a matrix product is float32.
"""

from __future__ import annotations

import torch
from torch.nn.functional import silu, softplus

from backends.forward import get_forward_context
from kernels.rowwise import rowwise
from models.config import ModelConfig
from models.layers import Linear
from models.weights import Weights


class StateMixer(torch.nn.Module):
    """A causal convolution and linear attention, both over the state that the backend keeps for `state_id`.

    Decay and step size come from `prefix.{A_log,dt_bias}`, one for each head, the convolution from `prefix.conv1d`.
    """

    def __init__(self, config: ModelConfig, layer_id: int, prefix: str, source: Weights) -> None:
        super().__init__()
        state = config.state
        assert state is not None
        self.state = state
        self.state_id = config.state_layers.index(layer_id)
        channels = state.conv_channels
        weight = source.tensor(f"{prefix}.conv1d.weight", (channels, 1, state.conv_taps))
        self.conv_weight = weight.squeeze(1).T.contiguous()
        self.conv_bias = source.tensor(f"{prefix}.conv1d.bias", (channels,)) if state.conv_bias else None
        self.decay = -source.tensor(f"{prefix}.A_log", (state.num_heads,)).exp()
        self.dt_bias = source.tensor(f"{prefix}.dt_bias", (state.num_heads,))

    def convolve(self, x: torch.Tensor) -> torch.Tensor:
        """silu(convolution) of x [T, conv_channels]: the same, float32."""
        context = get_forward_context()
        return rowwise(silu, context.backend.convolve(x, self, context.batch, context.plan))

    def recur(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query, key: [T, num_key_heads * key_dim]; value: [T, num_heads, value_dim]. Returns the like of value."""
        context, state = get_forward_context(), self.state
        return context.backend.recur(
            query.unflatten(1, (state.num_key_heads, state.key_dim)),
            key.unflatten(1, (state.num_key_heads, state.key_dim)),
            value,
            log_decay,
            beta,
            self,
            context.batch,
            context.plan,
        )


class GatedNorm(torch.nn.Module):
    """RMSNorm over groups of columns, gated by silu before the norm or after it."""

    def __init__(self, weight: torch.Tensor, eps: float, gate_first: bool) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps
        self.gate_first = gate_first

    def forward(self, x: torch.Tensor, gate: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """x [T, groups, width] float32, gate [T, groups * width] to `dtype` [T, groups * width]."""
        gate = rowwise(silu, gate.float())
        if self.gate_first:
            x = x * gate.view(x.shape)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.gate_first:
            return x.flatten(1).to(dtype) * self.weight
        return ((x.to(dtype) * self.weight).flatten(1) * gate).to(dtype)


class GatedDeltaNet(StateMixer):
    """Linear attention by the gated delta rule, on normalised keys and queries."""

    def __init__(self, config: ModelConfig, layer_id: int, prefix: str, source: Weights) -> None:
        super().__init__(config, layer_id, prefix, source)
        state = self.state
        value_width = state.num_heads * state.value_dim
        self.norm = GatedNorm(
            source.vector(f"{prefix}.norm.weight", state.value_dim), config.rms_norm_eps, gate_first=False
        )
        self.out_proj = Linear.load(source, prefix, ("out_proj",), (config.hidden_size,), value_width, False)

    def mix(self, qkv: torch.Tensor, z: torch.Tensor, b: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        """What the layer's projections give, qkv [T, conv_channels] (query, key, value), z [T, H * V], b and a [T, H],
        to the layer's output [T, hidden_size]."""
        state = self.state
        key_width = state.num_key_heads * state.key_dim
        query, key, value = self.convolve(qkv).split(
            (key_width, key_width, state.num_heads * state.value_dim), 1
        )
        out = self.recur(
            self._normalise(query) * state.key_dim**-0.5,
            self._normalise(key),
            value.unflatten(1, (state.num_heads, state.value_dim)),
            rowwise(softplus, a.float() + self.dt_bias) * self.decay,
            rowwise(torch.sigmoid, b.float()),
        )
        return self.out_proj(self.norm(out, z, z.dtype))

    def _normalise(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(1, (-1, self.state.key_dim))
        return (heads * torch.rsqrt(heads.pow(2).sum(-1, keepdim=True) + 1e-6)).flatten(1)


class Mamba2Mixer(StateMixer):
    """Mamba-2 (Dao and Gu, 2024): values are inputs times a step size, keys and queries its B and C."""

    def __init__(self, config: ModelConfig, layer_id: int, prefix: str, source: Weights) -> None:
        super().__init__(config, layer_id, prefix, source)
        state, hidden = self.state, config.hidden_size
        self.width = state.num_heads * state.value_dim
        self.skip = source.tensor(f"{prefix}.D", (state.num_heads,)).unsqueeze(-1)
        self.in_proj = Linear.load(
            source,
            prefix,
            ("in_proj",),
            (self.width + state.conv_channels + state.num_heads,),
            hidden,
            state.projection_bias,
        )
        self.norm = GatedNorm(
            source.vector(f"{prefix}.norm.weight", self.width), config.rms_norm_eps, gate_first=True
        )
        self.out_proj = Linear.load(
            source, prefix, ("out_proj",), (hidden,), self.width, state.projection_bias
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [T, hidden_size] to the same."""
        state = self.state
        gate, mixed, step = self.in_proj(hidden).split((self.width, state.conv_channels, state.num_heads), 1)
        x, key, query = self.convolve(mixed).split(
            (self.width, *(state.num_key_heads * state.key_dim,) * 2), 1
        )
        x = x.unflatten(1, (state.num_heads, state.value_dim))
        step = rowwise(softplus, step.float() + self.dt_bias).clamp(*state.time_step_limit)
        out = self.recur(query, key, x * step.unsqueeze(-1), step * self.decay) + x * self.skip
        groups = out.flatten(1).unflatten(1, (state.num_key_heads, -1))
        return self.out_proj(self.norm(groups, gate, hidden.dtype))
