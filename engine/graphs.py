"""Captured steps: the same pass as the eager one, prepared once and replayed.

The last start-up hook calls `capture`. On a CPU with the native kernels the whole forward of a pass is one call
into `kernels/cpu` (a step plan). A pass that the captured form does not fit runs eagerly, with the same numbers.
"""

from __future__ import annotations

import logging
from typing import Protocol

import torch

from backends.base import AttentionBackend
from backends.forward import ForwardBatch
from backends.kv_pool import KVPool
from backends.torch_native import TorchNativeBackend
from kernels.cpu.kv import KV_DTYPES
from kernels.cpu.step_plan import Chosen, StepBatch, StepPlan
from models.base import CausalLM
from models.step_plan import step_plan

logger = logging.getLogger(__name__)


class StepGraph(Protocol):
    """A captured pass. It binds its model, pool and backend at capture."""

    def fits(self, batch: ForwardBatch) -> bool:
        """Whether `run` can take this batch."""

    def run(self, batch: ForwardBatch) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Logits of `batch.logits_rows` [L, vocab_size] float32, and captured hidden states by layer."""

    def choose(self, batch: ForwardBatch, chances: bool) -> Chosen:
        """The best token of each of `batch.logits_rows`, the lowest id among equals, and with `chances` its
        probability."""


class NativeGraph:
    """A native step plan over one pool. It takes every pass, so no other path ever fills that pool's slots."""

    def __init__(self, plan: StepPlan, pool: KVPool) -> None:
        self._plan = plan
        self._pool = pool

    def fits(self, batch: ForwardBatch) -> bool:
        return batch.kv_pool is self._pool

    def run(self, batch: ForwardBatch) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        return self._plan.run(self._step(batch))

    def choose(self, batch: ForwardBatch, chances: bool) -> Chosen:
        return self._plan.choose(self._step(batch), chances)

    def _step(self, batch: ForwardBatch) -> StepBatch:
        return StepBatch(
            input_ids=batch.input_ids,
            positions=batch.positions,
            out_slots=batch.out_slots,
            query_lens=batch.query_lens,
            context_lens=batch.context_lens,
            slot_table=batch.slot_table,
            table_rows=batch.table_rows,
            logits_rows=batch.logits_rows,
            kv=self._pool.tensors(),
            causal=batch.causal,
            capture_layers=batch.capture_layers,
        )


def capture(model: CausalLM, pool: KVPool, backend: AttentionBackend) -> StepGraph | None:
    """The captured form of `model`'s pass, or None where there is none for this device and model.

    A plan brings its own attention, so it stands in for the default backend only: another one was asked for.
    """
    if pool.key.device.type != "cpu" or type(backend) is not TorchNativeBackend:
        return None
    if pool.key.dtype in KV_DTYPES:
        plan = step_plan(model)
    else:
        plan = f"it has no attention over a KV cache of {pool.layout.dtype_name}"
    if isinstance(plan, str):
        logger.info("no native step plan: %s", plan)
        return None
    return NativeGraph(plan, pool)
