"""DeepSeek-V2 and V3, and the models of their shape: Kimi-K2, K2.5's text model, Moonlight.

Latent attention (MLA): one compressed entry a token is cached for all heads. Prompts attend to the keys and values
that are decompressed of it (MHA); decode and verify absorb the decompression into query and result (MQA). The two
are equal but for rounding. The later versions differ in how experts are chosen, which is `models.moe`'s business.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import linear

from backends.dispatch import LatentPart, latent_parts
from backends.forward import ForwardBatch, forward_context, get_attn_backend, get_forward_context
from backends.handlers import AttnForwardMethod
from backends.kv_pool import KVLayout
from kernels.grouped import linear_by_head
from models.base import HiddenStates
from models.config import ModelConfig
from models.decoder import Decoder
from models.layers import GatedMLP, Linear, RMSNorm
from models.moe import SparseMLP
from models.rotary import Rotation, rotate, rotate_neighbours, yarn_mscale
from models.weights import Weights

_LATENT_EPS = 1e-6  # of the norms within attention, whatever the configuration says of the others


class LatentAttention(torch.nn.Module):
    """MLA of one layer. For backends it is a layer with one head of keys, as wide as an entry."""

    num_kv_heads = 1
    sliding_window: int | None = None
    logit_softcap: float | None = None

    def __init__(self, config: ModelConfig, layer_id: int, source: Weights) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.num_heads = heads = config.num_heads
        self.latent_dim, self.rope_dim = config.kv_lora_rank, config.qk_rope_head_dim
        self.nope_dim = config.qk_nope_head_dim
        self.head_dim = self.latent_dim + self.rope_dim
        self.scale = config.attention_scale
        if config.rope.type != "default" and config.rope.mscale_all_dim:
            self.scale *= yarn_mscale(config.rope, config.rope.mscale_all_dim) ** 2
        self.rotate = rotate_neighbours if config.rope_interleaved else rotate
        prefix, hidden, bias = f"model.layers.{layer_id}.self_attn", config.hidden_size, config.attention_bias

        def load(name: str, rows: int, columns: int, bias: bool = False) -> Linear:
            return Linear.load(source, prefix, (name,), (rows,), columns, bias)

        def norm(name: str, size: int) -> RMSNorm:
            return RMSNorm(source.vector(f"{prefix}.{name}.weight", size), _LATENT_EPS)

        width = heads * config.head_dim
        if config.q_lora_rank:
            self.q_proj = torch.nn.Sequential(
                load("q_a_proj", config.q_lora_rank, hidden, bias),
                norm("q_a_layernorm", config.q_lora_rank),
                load("q_b_proj", width, config.q_lora_rank),
            )
        else:
            self.q_proj = torch.nn.Sequential(load("q_proj", width, hidden))
        self.kv_a_proj = load("kv_a_proj_with_mqa", self.head_dim, hidden, bias)
        self.kv_a_layernorm = norm("kv_a_layernorm", self.latent_dim)
        # Both methods multiply by it, one of them from the other side: so it is held as floats, and once.
        rows = heads * (self.nope_dim + config.v_head_dim)
        kv_b = source.dense(f"{prefix}.kv_b_proj.weight", rows, self.latent_dim)
        self.kv_b = kv_b.unflatten(0, (heads, -1))
        self.o_proj = load("o_proj", hidden, heads * config.v_head_dim, bias)

    def forward(self, hidden: torch.Tensor, rotation: Rotation, parts: Sequence[LatentPart]) -> torch.Tensor:
        """hidden [T, hidden_size] to the same; each of `parts` by its method."""
        query, entry = self._query(hidden, rotation), self.entry(hidden, rotation)
        backend = get_attn_backend()
        out: torch.Tensor | None = None
        for chosen in parts:
            part = chosen.part
            with forward_context(part.batch, backend, chosen.plan):
                attend = self._mha if chosen.method is AttnForwardMethod.MHA else self._mqa
                attended = attend(part.take(query), part.take(entry))
            if part.rows is None:
                out = attended
                break
            if out is None:
                out = attended.new_empty(len(hidden), *attended.shape[1:])
            out[part.rows] = attended
        assert out is not None
        return self.o_proj(out.flatten(1))

    def decompress(self, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        latent, rope = entries.to(self.kv_b.dtype).split((self.latent_dim, self.rope_dim), dim=-1)
        both = linear(latent, self.kv_b.flatten(0, 1)).unflatten(-1, (self.num_heads, -1))
        nope, values = both.tensor_split((self.nope_dim,), dim=-1)
        return torch.cat((nope, rope.unsqueeze(1).expand(-1, self.num_heads, -1)), dim=-1), values

    def _query(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """[T, num_heads, nope_dim + rope_dim], rotated."""
        query = self.q_proj(hidden).unflatten(-1, (self.num_heads, -1))
        nope, rope = query.split((self.nope_dim, self.rope_dim), dim=-1)
        return torch.cat((nope, self.rotate(rope, rotation)), dim=-1)

    def entry(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """What is cached: [T, 1, head_dim], the normed latent and the rotated key that all heads share."""
        latent, rope = self.kv_a_proj(hidden).unsqueeze(1).split((self.latent_dim, self.rope_dim), dim=-1)
        return torch.cat((self.kv_a_layernorm(latent), self.rotate(rope, rotation)), dim=-1)

    def _mha(self, query: torch.Tensor, entry: torch.Tensor) -> torch.Tensor:
        context = get_forward_context()
        return context.backend.forward_mha(query, entry, self, context.batch, context.plan)

    def _mqa(self, query: torch.Tensor, entry: torch.Tensor) -> torch.Tensor:
        context = get_forward_context()
        nope, rope = query.split((self.nope_dim, self.rope_dim), dim=-1)
        to_key, to_value = self.kv_b.tensor_split((self.nope_dim,), dim=1)
        absorbed = torch.cat((linear_by_head(nope, to_key.transpose(1, 2)), rope), dim=-1)
        latent = context.backend.forward(
            absorbed, entry, entry[..., : self.latent_dim], self, context.batch, context.plan
        )
        return linear_by_head(latent, to_value)


class DeepseekDecoderLayer(torch.nn.Module):
    """Pre-norm latent attention and an MLP, of experts from a certain layer on."""

    def __init__(self, config: ModelConfig, layer_id: int, source: Weights) -> None:
        super().__init__()
        prefix = f"model.layers.{layer_id}"

        def norm(name: str) -> RMSNorm:
            weight = source.vector(f"{prefix}.{name}.weight", config.hidden_size)
            return RMSNorm(weight, config.rms_norm_eps)

        self.input_layernorm = norm("input_layernorm")
        self.self_attn = LatentAttention(config, layer_id, source)
        self.post_attention_layernorm = norm("post_attention_layernorm")
        self.mlp: torch.nn.Module
        if layer_id in config.sparse_layers:
            self.mlp = SparseMLP(config, f"{prefix}.mlp", source)
        else:
            self.mlp = GatedMLP(config, f"{prefix}.mlp", config.intermediate_size, source)

    def forward(self, hidden: torch.Tensor, rotation: Rotation, parts: Sequence[LatentPart]) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, parts)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class DeepseekV2ForCausalLM(Decoder):
    """Latent attention, shared and routed experts. Which method each row takes is decided once a pass."""

    layer_class = DeepseekDecoderLayer

    def kv_layout(self, dtype: torch.dtype) -> KVLayout:
        config = self.config
        return KVLayout(config.num_layers, 1, config.kv_lora_rank + config.qk_rope_head_dim, 0, dtype)

    def run(self, hidden: torch.Tensor, batch: ForwardBatch) -> HiddenStates:
        rotation, parts = self.ropes[0](batch.positions), latent_parts(batch)
        captured: dict[int, torch.Tensor] = {}
        for layer_id, layer in enumerate(self.layers):
            hidden = layer(hidden, rotation, parts)
            if layer_id in batch.capture_layers:
                captured[layer_id] = hidden
        return HiddenStates(self.norm(hidden), captured)
