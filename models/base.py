"""What the engine needs of a model, whatever its family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from backends.forward import ForwardBatch
from backends.kv_pool import KVLayout
from backends.state_pool import StateLayout

if TYPE_CHECKING:
    from models.config import ModelConfig


class ModelError(Exception):
    """A model that cannot be used: not found, unknown, truncated or corrupt. The text names the file."""


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """Result of a pass: final-norm output [T, hidden_size], and the outputs of the layers that were asked for."""

    last: torch.Tensor
    captured: Mapping[int, torch.Tensor] = field(default_factory=dict)


class CausalLM(torch.nn.Module, ABC):
    """A decoder that runs inside `forward_context(batch, backend)`. `dtype` is that of its activations."""

    config: ModelConfig
    dtype: torch.dtype

    @property
    def kv_dtype(self) -> torch.dtype:
        """What keys and values are held in where nothing else is asked for."""
        return self.dtype

    @property
    @abstractmethod
    def weight_format(self) -> str:
        """How most of its weights are held: `BF16`, `Q4_1/native`."""

    @property
    def capturable_layers(self) -> range:
        """Ids of the layers whose outputs `forward` can return. A family that returns none has an empty range."""
        return range(0)

    @abstractmethod
    def kv_layout(self, dtype: torch.dtype) -> KVLayout:
        """What one token costs in the KV pool."""

    def state_layout(self) -> StateLayout | None:
        """What one request costs in the pool of recurrent state. None for a model without."""
        return None

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> HiddenStates:
        """Run all layers over the T tokens of `batch`."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [L, hidden_size] to raw logits [L, vocab_size], float32."""
