"""Backends that say who they are, and registries with them."""

from __future__ import annotations

import torch

from backends.base import AttentionLayer
from backends.forward import ForwardBatch, get_attn_backend
from backends.handlers import always_absorbed
from backends.kv_pool import KVLayout
from backends.registry import BackendArgs, BackendSpec, BackendSpecs
from backends.torch_native import TorchNativeBackend

CPU = torch.device("cpu")
LAYOUT = KVLayout(2, 2, 16, 16, torch.float32)
LATENT = KVLayout(2, 1, 24, 0, torch.float32)


class NamedBackend(TorchNativeBackend):
    """Attends as torch_native does, and notes each pass it attends for."""

    def __init__(self, name: str, args: BackendArgs | None = None) -> None:
        super().__init__()
        self.given_name = name
        self.args = args
        self.seen: list[ForwardBatch] = []

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        plan: object,
    ) -> torch.Tensor:
        assert get_attn_backend() is self
        self.seen.append(batch)
        return super().forward(query, key, value, layer, batch, plan)


def named(name: str, unusable: str | None = None, **kwargs: object) -> BackendSpec:
    """A backend that runs anywhere, or nowhere for the reason `unusable`."""
    return BackendSpec(lambda args: NamedBackend(name, args), lambda device, layout: unusable, **kwargs)


def latent_only() -> BackendSpec:
    """A backend for MLA models alone."""
    return BackendSpec(
        lambda args: NamedBackend("mla", args),
        lambda device, layout: None if layout.is_latent else "it reads latent KV caches only",
        always_absorbed,
    )


def registry() -> BackendSpecs:
    return {
        "torch_native": named("torch_native"),
        "one": named("one"),
        "two": named("two"),
        "mla": latent_only(),
        "nowhere": named("nowhere", unusable="it needs a device that nobody has"),
    }


EXTERNAL = named("external")
NOT_A_SPEC = object()
