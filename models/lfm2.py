"""LFM2: gated short convolutions, and attention in some layers."""

from __future__ import annotations

import torch

from backends.forward import get_forward_context
from models.config import ModelConfig
from models.decoder import Decoder
from models.hybrid import HybridDecoderLayer
from models.layers import Linear
from models.weights import Weights

_NAMES = {
    "model.embedding_norm.": "model.norm.",
    ".operator_norm.": ".input_layernorm.",
    ".ffn_norm.": ".post_attention_layernorm.",
    ".feed_forward.w1.": ".mlp.gate_proj.",
    ".feed_forward.w3.": ".mlp.up_proj.",
    ".feed_forward.w2.": ".mlp.down_proj.",
    ".self_attn.out_proj.": ".self_attn.o_proj.",
    ".self_attn.q_layernorm.": ".self_attn.q_norm.",
    ".self_attn.k_layernorm.": ".self_attn.k_norm.",
}


class ShortConv(torch.nn.Module):
    """c * convolution(b * x), where b, c and x are projections of the same input."""

    def __init__(self, config: ModelConfig, layer_id: int, prefix: str, source: Weights) -> None:
        super().__init__()
        state = config.state
        assert state is not None
        self.state_id = config.state_layers.index(layer_id)
        size, bias = config.hidden_size, state.projection_bias
        weight = source.tensor(f"{prefix}.conv.weight", (size, 1, state.conv_taps))
        self.conv_weight = weight.squeeze(1).T.contiguous()
        self.conv_bias = source.tensor(f"{prefix}.conv.bias", (size,)) if state.conv_bias else None
        self.in_proj = Linear.load(source, prefix, ("in_proj",), (3 * size,), size, bias)
        self.out_proj = Linear.load(source, prefix, ("out_proj",), (size,), size, bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [T, hidden_size] to the same."""
        b, c, x = self.in_proj(hidden).chunk(3, dim=-1)
        context = get_forward_context()
        convolved = context.backend.convolve(b * x, self, context.batch, context.plan)
        return self.out_proj(c * convolved.to(c.dtype))


class Lfm2DecoderLayer(HybridDecoderLayer):
    """A short convolution where there is no attention."""

    def make_state_mixer(self, config: ModelConfig, layer_id: int, source: Weights) -> torch.nn.Module:
        return ShortConv(config, layer_id, f"model.layers.{layer_id}.conv", source)


class Lfm2ForCausalLM(Decoder):
    """Published under names of its own."""

    layer_class = Lfm2DecoderLayer

    def __init__(self, config: ModelConfig, source: Weights) -> None:
        super().__init__(config, source.renamed(_canonical))


def _canonical(name: str) -> str:
    for own, canonical in _NAMES.items():
        name = name.replace(own, canonical)
    return name
