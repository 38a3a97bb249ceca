"""What drafters share that draft one token after another from the target's own thoughts: EAGLE-3, MTP heads.

A row of theirs is a token and the *features* of the position before it: for known tokens, of what the target computed
there; for drafted ones, what this model itself had to say there. The row is rotated by that position, and its logits
are those of the token that follows (Li et al., 2024, EAGLE). All have a single layer, so what a known token leaves in
the cache depends on its own row alone.
"""

from __future__ import annotations

from abc import abstractmethod

import torch

from backends.forward import ForwardBatch
from backends.kv_pool import KVPool
from models.base import HiddenStates
from models.config import ModelConfig
from models.context import key_value_rows
from models.decoder import Decoder
from models.deepseek_v2 import LatentAttention
from models.layers import Attention, Embedding, Linear
from models.rotary import Rotation, rotate
from models.weights import Weights

# Under this id a pass gives back what stands for the target's features in the next one.
FEATURES = 0


class ChainDrafter(Decoder):
    """A decoder of one layer over tokens and features.

    target_layer_ids: the target's layers whose outputs its features are made of.
    draft_token_ids: [L] int64, the target's ids of the tokens that it can draft, in the order of its logits
        ([…, L]). None: it has the target's whole vocabulary.
    """

    target_layer_ids: tuple[int, ...] = ()
    draft_token_ids: torch.Tensor | None = None

    def __init__(self, config: ModelConfig, source: Weights, ends: tuple[Embedding, Linear]) -> None:
        super().__init__(config, source, ends)
        attention = self.layers[0].self_attn
        assert isinstance(attention, Attention | LatentAttention)
        self._attention = attention
        if isinstance(attention, Attention):
            rows = attention.num_kv_heads * attention.head_dim
            self._key_value = key_value_rows([attention.qkv_proj], rows)

    @abstractmethod
    def fuse(self, captured: torch.Tensor) -> torch.Tensor:
        """Features [T, hidden_size] of the outputs of `target_layer_ids`, one beside the other."""

    @abstractmethod
    def attended(self, embedded: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """What the attention is given for rows, [T, …], of their embeddings and features [T, hidden_size]."""

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> HiddenStates:
        """Rows of `batch.features`; captured[FEATURES] is what they leave to the next ones.

        A pass without features, as when scales are fitted, takes embeddings in their place: both are normed.
        """

    @torch.inference_mode()
    def write_context(
        self,
        input_ids: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        pool: KVPool,
    ) -> None:
        """Write what T known tokens have in the cache.

        input_ids, slots: [T] int64. features: [T, hidden_size], of the positions before the tokens, `positions` [T]
            int64. `pool` is this drafter's.
        """
        given = self.attended(self.embed_tokens(input_ids), features)
        key, value = self._cached(given, self.ropes[0](positions))
        pool.write(0, slots, key, value)

    def _cached(self, given: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, [T, num_kv_heads, head_dim] each."""
        attention = self._attention
        if isinstance(attention, LatentAttention):
            entry = attention.entry(given, rotation)
            return entry, entry
        heads = self._key_value(given).unflatten(-1, (2, attention.num_kv_heads, attention.head_dim))
        key, value = heads.unbind(1)
        key = key if attention.k_norm is None else attention.k_norm(key)
        return rotate(key, rotation), value
