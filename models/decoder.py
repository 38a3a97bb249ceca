"""The decoder that all families are: embedding, layers, final norm, head. Families say which layers and norm."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import torch

from backends.forward import ForwardBatch
from backends.kv_pool import KVLayout
from backends.state_pool import StateLayout
from kernels.cpu.linear import SUFFIX as PACKED
from models.base import CausalLM, HiddenStates
from models.config import ModelConfig
from models.layers import DecoderLayer, Embedding, Linear, RMSNorm
from models.rotary import RotaryEmbedding
from models.weights import Weights


class Decoder(CausalLM):
    """A decoder-only model, built layer by layer from `source`."""

    layer_class: ClassVar[type[torch.nn.Module]] = DecoderLayer
    norm_class: ClassVar[type[RMSNorm]] = RMSNorm

    def __init__(
        self, config: ModelConfig, source: Weights, ends: tuple[Embedding, Linear] | None = None
    ) -> None:
        """`ends`: another model's embedding and head, for one that has none of its own."""
        super().__init__()
        self.config = config
        self.dtype = source.dtype
        self.embed_tokens, self.lm_head = ends or _ends(config, source)
        self.layers = torch.nn.ModuleList(
            self.layer_class(config, layer_id, source) for layer_id in range(config.num_layers)
        )
        self.norm = self.norm_class(
            source.vector("model.norm.weight", config.hidden_size), config.rms_norm_eps
        )
        ropes = [config.rope] if config.local_rope is None else [config.rope, config.local_rope]
        self.ropes = [RotaryEmbedding(rope, config, source.dtype, source.device) for rope in ropes]

    @property
    def kv_dtype(self) -> torch.dtype:
        # Narrow weights that stay narrow get a cache to match: float32 there would be most of what a step reads.
        kept = self.weight_format.endswith(PACKED) and not self.weight_format.startswith("F32")
        return torch.bfloat16 if kept else self.dtype

    @property
    def weight_format(self) -> str:
        linears = (module for module in self.layers.modules() if isinstance(module, Linear))
        return Counter(weight.format for linear in linears for weight in linear.weights).most_common(1)[0][0]

    @property
    def capturable_layers(self) -> range:
        return range(self.config.num_layers)

    def kv_layout(self, dtype: torch.dtype) -> KVLayout:
        config = self.config
        layers = len(config.attention_layers)
        return KVLayout(layers, config.num_kv_heads, config.head_dim, config.head_dim, dtype)

    def state_layout(self) -> StateLayout | None:
        state = self.config.state
        if state is None:
            return None
        return StateLayout(
            num_layers=len(self.config.state_layers),
            conv_channels=state.conv_channels,
            conv_taps=state.conv_taps,
            dtype=self.dtype,
            num_heads=state.num_heads,
            num_key_heads=state.num_key_heads,
            key_dim=state.key_dim,
            value_dim=state.value_dim,
            delta_rule=state.delta_rule,
        )

    def forward(self, batch: ForwardBatch) -> HiddenStates:
        return self.run(self.embed_tokens(batch.input_ids), batch)

    def run(self, hidden: torch.Tensor, batch: ForwardBatch) -> HiddenStates:
        """All layers over what the first one is given, [T, hidden_size]."""
        rotations = {id(rope): rope(batch.positions) for rope in self.ropes}
        captured: dict[int, torch.Tensor] = {}
        for layer_id, layer in enumerate(self.layers):
            hidden = layer(hidden, rotations[id(self.rope_of(layer_id))])
            if layer_id in batch.capture_layers:
                captured[layer_id] = hidden
        return HiddenStates(self.norm(hidden), captured)

    def rope_of(self, layer_id: int) -> RotaryEmbedding:
        """The rotary embedding of a layer: with two of them, the second is the sliding layers'."""
        return self.ropes[-1] if self.config.is_sliding(layer_id) else self.ropes[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.finish_logits(self.lm_head(hidden).float())

    def finish_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """What the head's products become by the family's divisor and soft cap."""
        if self.config.logits_divisor != 1.0:
            logits = logits / self.config.logits_divisor
        cap = self.config.final_logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap


def _ends(config: ModelConfig, source: Weights) -> tuple[Embedding, Linear]:
    shape = (config.vocab_size,), config.hidden_size
    embedding = source.matrices(["model.embed_tokens.weight"], *shape)
    tied = config.tie_word_embeddings and source.same("lm_head.weight", "model.embed_tokens.weight")
    head = embedding if tied else source.matrices(["lm_head.weight"], *shape)
    return Embedding(embedding[0], source.dtype, config.embedding_scale), Linear(head)
