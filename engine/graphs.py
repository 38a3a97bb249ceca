"""Captured steps: the same pass as the eager one, prepared once and replayed.

The last start-up hook calls `capture`. On a CPU with the native kernels the whole forward of a pass is one call
into `kernels/cpu` (a step plan). A pass that the captured form does not fit runs eagerly, with the same numbers.
"""

from __future__ import annotations

from typing import Protocol

import torch

from backends.base import AttentionBackend
from backends.forward import ForwardBatch
from backends.kv_pool import KVPool
from models.base import CausalLM


class StepGraph(Protocol):
    """A captured pass. It binds its model, pool and backend at capture."""

    def fits(self, batch: ForwardBatch) -> bool:
        """Whether `run` can take this batch."""

    def run(self, batch: ForwardBatch) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Logits of `batch.logits_rows` [L, vocab_size] float32, and captured hidden states by layer."""


def capture(model: CausalLM, pool: KVPool, backend: AttentionBackend) -> StepGraph | None:
    """The captured form of `model`'s pass, or None where there is none for this device and model."""
    return None
