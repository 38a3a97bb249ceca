"""Rotary position embedding: tables for every scaling, and the rotation in Hugging Face's half-split layout.

A position's rotation is a pure function of the position, so that a cached key serves any later request. For
every type but `dynamic` that is how transformers computes it. Dynamic NTK raises the base with the length of the
sequence: here position p takes the base of a sequence of max(p + 1, max_position_embeddings) tokens. Up to
max_position_embeddings this equals transformers; beyond, it equals transformers decoding token by token with a
cache, but not transformers prefilling a longer prompt, which rotates earlier positions anew.
"""

from __future__ import annotations

import math

import torch

from models.config import ModelConfig, RopeConfig

Rotation = tuple[torch.Tensor, torch.Tensor]


class RotaryEmbedding:
    """cos and sin of every angle, float32 [context_length, rotary_dim / 2], attention factor included."""

    def __init__(
        self, rope: RopeConfig, config: ModelConfig, dtype: torch.dtype, device: torch.device
    ) -> None:
        positions = torch.arange(config.context_length, dtype=torch.float32)[:, None]
        frequencies, factor = inverse_frequencies(
            rope, config.rotary_dim, positions, config.max_position_embeddings
        )
        angles = positions * frequencies
        self.cos = (angles.cos() * factor).to(device)
        self.sin = (angles.sin() * factor).to(device)
        self._dtype = dtype

    def __call__(self, positions: torch.Tensor) -> Rotation:
        """cos and sin at `positions` [T], each [T, 1, rotary_dim / 2] in the model's dtype."""
        return self._at(self.cos, positions), self._at(self.sin, positions)

    def _at(self, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return table.index_select(0, positions).to(self._dtype).unsqueeze(1)


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate the columns of `x` [T, heads, head_dim] that have angles, the first ones: one half with the other."""
    cos, sin = rotation
    rotated = 2 * cos.shape[-1]
    if rotated == 0:
        return x
    if rotated < x.shape[-1]:
        return torch.cat((rotate(x[..., :rotated], rotation), x[..., rotated:]), dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rotate_neighbours(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate `x` [T, heads, head_dim], whose element 2i is paired with 2i + 1. Pairs come out as `rotate` has them."""
    cos, sin = rotation
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def inverse_frequencies(
    rope: RopeConfig, head_dim: int, positions: torch.Tensor, trained: int
) -> tuple[torch.Tensor, float]:
    """Float32 inverse frequencies [head_dim / 2] (dynamic: [P, head_dim / 2], one row for each of `positions`
    [P, 1]), and the factor that cos and sin are multiplied by. `trained` is max_position_embeddings."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / rope.theta**exponents
    if rope.frequency_factors:
        plain = plain / torch.tensor(rope.frequency_factors, dtype=torch.float32)
    if rope.type == "linear":
        return plain / rope.factor, 1.0
    if rope.type == "dynamic":
        lengths = (positions + 1).clamp(min=trained)
        stretch = rope.factor * lengths / trained - (rope.factor - 1)
        return 1.0 / (rope.theta * stretch ** (head_dim / (head_dim - 2))) ** exponents, 1.0
    if rope.type == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.type == "yarn":
        return _yarn(rope, plain), _yarn_attention_factor(rope)
    return plain, 1.0


def _llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Slow down long wavelengths by `factor`, keep short ones, and blend in between."""
    trained = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / plain
    blend = (trained / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * plain / rope.factor + blend * plain
    scaled = torch.where(wavelengths > trained / rope.low_freq_factor, plain / rope.factor, blended)
    return torch.where(wavelengths < trained / rope.high_freq_factor, plain, scaled)


def _yarn(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Interpolate dimensions that turn less than beta_slow times over the trained length, keep those that turn
    more than beta_fast times, and ramp in between."""
    half = len(plain)

    def dimension(turns: float) -> float:
        trained = rope.original_max_position_embeddings
        return half * math.log(trained / (turns * 2 * math.pi)) / math.log(rope.theta)

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    interpolated = ((torch.arange(half, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * interpolated + plain * (1 - interpolated)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    if rope.mscale and rope.mscale_all_dim:
        return yarn_mscale(rope, rope.mscale) / yarn_mscale(rope, rope.mscale_all_dim)
    return yarn_mscale(rope, 1.0)


def yarn_mscale(rope: RopeConfig, weight: float) -> float:
    """How much larger yarn has attention's numbers be, to make up for the stretch (Peng et al., 2023)."""
    return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0
