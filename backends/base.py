"""The interface of an attention backend: what a model's attention layers call.

Each worker owns its backends. A backend carries the two names that its worker resolved
(`prefill_attention_backend_str`, `decode_attention_backend_str`); they are stamped once, when the worker's
backends are built, and never read from settings afterwards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch

from backends.forward import ForwardBatch
from backends.options import SpeculativeAttentionMode

if TYPE_CHECKING:
    from backends.registry import BackendSpecs


class AttentionLayer(Protocol):
    """What a backend sees of a model's attention layer."""

    layer_id: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None  # tokens of context a query sees, itself included; None: all
    logit_softcap: float | None


class LatentAttentionLayer(AttentionLayer, Protocol):
    """A layer whose cache holds compressed entries (MLA); `num_kv_heads` is 1, `head_dim` an entry's width."""

    def decompress(self, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[N, head_dim] to the keys [N, num_heads, k_dim] and values [N, num_heads, v_dim] that are made of them.

        The bits of one may depend on N and on its place, so a backend that promises them gives blocks of one size.
        """


class StateLayer(Protocol):
    """What a backend sees of a layer that keeps recurrent state.

    conv_weight: [taps, channels] float32, the oldest tap first; conv_bias: [channels] float32.
    """

    state_id: int  # its number among the layers that keep state
    conv_weight: torch.Tensor
    conv_bias: torch.Tensor | None


class Workspace:
    """Scratch memory of backends, made when it is first asked for. Those that share one must not run at once."""

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    def take(self, num_bytes: int) -> torch.Tensor:
        """[num_bytes] uint8 with any content. The same memory as last time, unless it was too small."""
        if self._memory.numel() < num_bytes:
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._memory.device)
        return self._memory[:num_bytes]


class AttentionBackend(ABC):
    """Attention over a paged KV pool for one worker.

    `plan(batch)` runs once a pass, before the first layer; `forward(...)` once a layer. Neither may keep
    anything that another pass could read: what `plan` returns is held by the runner for that pass only.
    """

    name: ClassVar[str]

    prefill_attention_backend_str: str | None = None
    decode_attention_backend_str: str | None = None
    speculative_attention_mode: SpeculativeAttentionMode = "prefill"
    specs: BackendSpecs | None = None

    def stamp(
        self,
        prefill: str,
        decode: str,
        speculative_attention_mode: SpeculativeAttentionMode = "prefill",
        specs: BackendSpecs | None = None,
    ) -> None:
        """Write the worker's resolved names on this backend, and which of them a verify takes.

        `specs` is the registry that the names are of; None: the installed backends. A second stamp raises RuntimeError.
        """
        if self.prefill_attention_backend_str is not None or self.decode_attention_backend_str is not None:
            raise RuntimeError(
                f"{type(self).__name__} is already stamped "
                f"({self.prefill_attention_backend_str}/{self.decode_attention_backend_str}): "
                "a backend belongs to one worker"
            )
        self.prefill_attention_backend_str = prefill
        self.decode_attention_backend_str = decode
        self.speculative_attention_mode = speculative_attention_mode
        self.specs = specs

    def children(self) -> Iterator[AttentionBackend]:
        """Backends that this one forwards to. Wrappers override it; a plain backend has none."""
        return iter(())

    def mamba_commit(self) -> Callable[..., None] | None:
        """The function that commits recurrent state after a verify, or None. Wrappers ask their children."""
        for child in self.children():
            commit = child.mamba_commit()
            if commit is not None:
                return commit
        return None

    @abstractmethod
    def plan(self, batch: ForwardBatch) -> object:
        """Work out, once for all layers of a pass, what `forward` needs (indices, masks)."""

    @abstractmethod
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        plan: object,
    ) -> torch.Tensor:
        """Write `key` and `value` to `batch.out_slots`, then attend.

        query: [T, num_heads, head_dim]; key, value: [T, num_kv_heads, head_dim], rotary already applied.
        Returns [T, num_heads, head_dim] in query's dtype. Over a latent cache (MQA), a key is the entry, and a
        value its first columns, as many as the result has.
        """

    def forward_mha(
        self,
        query: torch.Tensor,
        entry: torch.Tensor,
        layer: LatentAttentionLayer,
        batch: ForwardBatch,
        plan: object,
    ) -> torch.Tensor:
        """Write `entry` [T, 1, head_dim] to `batch.out_slots`, then attend to what `layer` decompresses of the cache.

        query: [T, num_heads, k_dim]. Returns [T, num_heads, v_dim] in query's dtype. Only a backend whose dispatch
        handler chooses MHA has it; RuntimeError from the others.
        """
        raise RuntimeError(
            f"{self.name} does not attend to decompressed entries: its handler has to choose MQA"
        )

    def convolve(self, x: torch.Tensor, layer: StateLayer, batch: ForwardBatch, plan: object) -> torch.Tensor:
        """Causal depthwise convolution of x [T, channels] over each sequence, its earlier passes included.

        Returns [T, channels] float32. Only a backend wrapped for a model with recurrent state has it, and `recur`;
        RuntimeError from the others.
        """
        raise RuntimeError(f"{self.name} keeps no recurrent state: it was not wrapped for it")

    def recur(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor | None,
        layer: StateLayer,
        batch: ForwardBatch,
        plan: object,
    ) -> torch.Tensor:
        """Linear attention of every row to its sequence so far (kernels/linear_attention.py).

        query, key: [T, J, K]; value: [T, H, V]; log_decay and, for the delta rule, beta: [T, H]; all float32.
        Returns [T, H, V] float32.
        """
        raise RuntimeError(f"{self.name} keeps no recurrent state: it was not wrapped for it")


def reachable(backend: AttentionBackend) -> Iterator[AttentionBackend]:
    """`backend` and every backend below it."""
    yield backend
    for child in backend.children():
        yield from reachable(child)
