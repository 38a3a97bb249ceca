"""The DFlash drafter as it is trained: differentiable, many blocks of many sequences in one pass, plain torch.

DFlash (Chen et al., "DFlash: Block Diffusion for Flash Speculative Decoding", arXiv:2602.06036) drafts a whole block
in one pass: position 0 holds the last known token (the anchor), the others hold the mask token, and position i
predicts the token at offset i. Every position attends to the target's hidden states before the anchor, and to the
whole block. Parameters have the names and meaning of published checkpoints, but for `successor`, which they lack: it
adds to a position what the token before it says. Drafted in one pass, a token does not know which ones were chosen
before it, and that knowledge is what drafts gain most by (Ankner et al., "Hydra: Sequentially-Dependent Draft Heads",
arXiv:2402.05109); as a linear map it costs one small product a token.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from models.rotary import Rotation, rotate
from speculative.training.ops import block_attention, linear, rms_norm


class DrafterShape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a drafter. `target_layer_ids`: the target's layers whose outputs it sees, in the order of `fc`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    rope_theta: float

    @property
    def short_block_size(self) -> int | None:
        """Rows of the shorter blocks that it is trained for as well; None for blocks too short for that."""
        return self.block_size // 2 if self.block_size >= 4 else None


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in x's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Linear(nn.Linear):
    """A product without bias, in x's dtype, over a float32 master weight."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__(columns, rows, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class Attention(nn.Module):
    """Attention of blocks to the context before them and to themselves."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        hidden, head_dim = shape.hidden_size, shape.head_dim
        self.kv_heads, self.head_dim = shape.num_kv_heads, head_dim
        self.group = shape.num_heads // shape.num_kv_heads
        self.q_proj = Linear(hidden, shape.num_heads * head_dim)
        self.k_proj = Linear(hidden, shape.num_kv_heads * head_dim)
        self.v_proj = Linear(hidden, shape.num_kv_heads * head_dim)
        self.o_proj = Linear(shape.num_heads * head_dim, hidden)
        self.q_norm = RMSNorm(head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(head_dim, shape.rms_norm_eps)

    def forward(
        self, x: Tensor, first: int, context: Tensor, rotation: Rotation, far_rotation: Rotation, bias: Tensor
    ) -> Tensor:
        """x [G, A, B, H] and context [G, L, H], both normed, to [G, A, B - first, H], of positions from `first` on.

        bias: [G, A, L], see `block_attention`.
        """
        kv, dim = self.kv_heads, self.head_dim
        queries = x[:, :, first:]
        cos, sin = rotation
        query = self.q_norm(self.q_proj(queries).unflatten(-1, (-1, dim)))
        query = rotate(query, (cos[:, :, first:] * dim**-0.5, sin[:, :, first:] * dim**-0.5))
        key = rotate(self.k_norm(self.k_proj(x).unflatten(-1, (kv, dim))), rotation)
        value = self.v_proj(x).unflatten(-1, (kv, dim))
        far_key = rotate(self.k_norm(self.k_proj(context).unflatten(-1, (kv, dim))), far_rotation)
        far_value = self.v_proj(context).unflatten(-1, (kv, dim))
        # The queries of all heads that share a KV head are rows of one product.
        query = query.unflatten(3, (kv, self.group)).permute(0, 3, 1, 2, 4, 5).flatten(3, 4)
        attended = block_attention(
            query,
            key.permute(0, 3, 1, 2, 4).contiguous(),
            value.permute(0, 3, 1, 2, 4).contiguous(),
            far_key.transpose(1, 2).contiguous(),
            far_value.transpose(1, 2).contiguous(),
            bias,
        )
        attended = attended.unflatten(3, (-1, self.group)).permute(0, 2, 3, 1, 4, 5)
        return self.o_proj(attended.reshape((*queries.shape[:3], -1)))


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = Linear(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)


class Drafter(nn.Module):
    """The trained part: layers, the projection of the target's states, norms. Embedding and head are the target's."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.shape = shape
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.fc = Linear(len(shape.target_layer_ids) * shape.hidden_size, shape.hidden_size)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.successor = Linear(shape.hidden_size, shape.hidden_size)
        self.successor_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, features: Tensor, embeddings: Tensor, before: Tensor, anchors: Tensor) -> Tensor:
        """Final hidden states [G, A, B - 1, H] of the blocks' masked positions, in the dtype of `features`.

        features: [G, L, layers * H], the target's states of G sequences, padded behind their ends.
        embeddings: [G, A, B, H], of each block's tokens: the anchor, then masks.
        before: [G, A, B - 1, H], of the tokens that come before those that are predicted.
        anchors: int64 [G, A], positions of the blocks' first tokens; each at least 1.
        """
        block, length, dtype = embeddings.shape[2], features.shape[1], features.dtype
        context = self.hidden_norm(self.fc(features))
        positions = torch.arange(length, device=features.device)
        bias = torch.zeros(*anchors.shape, length, dtype=dtype, device=features.device)
        bias.masked_fill_(positions >= anchors[..., None], -torch.inf)
        far_rotation = self._rotation(positions, dtype)
        offsets = torch.arange(block, device=features.device)
        rotation = self._rotation(anchors[..., None] + offsets, dtype)
        x = embeddings.to(dtype)
        for number, layer in enumerate(self._layers(), start=1):
            # Nothing is drafted at the anchor: the last layer needs its key and value only.
            first = 1 if number == self.shape.num_layers else 0
            normed = layer.input_layernorm(x)
            x = x[:, :, first:] + layer.self_attn(normed, first, context, rotation, far_rotation, bias)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x) + self.successor(self.successor_norm(before.to(dtype)))

    def _layers(self) -> Iterator[Layer]:
        for layer in self.layers:
            assert isinstance(layer, Layer)
            yield layer

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """cos and sin, [..., 1, head_dim / 2]."""
        dim = self.shape.head_dim
        exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=positions.device) / dim
        angles = positions[..., None, None] * self.shape.rope_theta**-exponents
        return angles.cos().to(dtype), angles.sin().to(dtype)
