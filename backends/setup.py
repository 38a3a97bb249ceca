"""Which backends a worker runs, and building them. Each worker gets its own; nothing here is shared or kept."""

from __future__ import annotations

from typing import Literal

import msgspec
import torch

from backends.base import AttentionBackend, reachable
from backends.options import AttentionOptions
from backends.registry import BackendError, usable_backend
from backends.torch_native import TorchNativeBackend


class ResolvedAttentionBackends(msgspec.Struct, frozen=True):
    """The names that a worker runs, and whether the drafter's own setting decided them."""

    prefill: str
    decode: str
    is_draft_override: bool


class AttentionBackends(msgspec.Struct, frozen=True):
    """A worker's backends. The decode fields are None and () where decode has none of its own."""

    attn_backend: AttentionBackend
    decode_attn_backend: AttentionBackend | None
    decode_attn_backend_group: tuple[AttentionBackend, ...]
    prefill_attention_backend_str: str
    decode_attention_backend_str: str


def resolve_attention_backends(
    options: AttentionOptions, role: Literal["target", "draft"], device: torch.device
) -> ResolvedAttentionBackends:
    """Two usable names. Raises BackendError for one that is not.

    Order: a drafter's own name (for both), the prefill or decode name, the common name, the automatic one.
    """
    override = options.speculative_draft_attention_backend if role == "draft" else None
    common = override or options.attention_backend or TorchNativeBackend.name
    prefill = override or options.prefill_attention_backend or common
    decode = override or options.decode_attention_backend or common
    for name in (prefill, decode):
        usable_backend(name, device)
    return ResolvedAttentionBackends(prefill, decode, override is not None)


def build_attention_backends(
    *, options: AttentionOptions, role: Literal["target", "draft"], device: torch.device
) -> AttentionBackends:
    """Build and stamp a worker's backends."""
    resolved = resolve_attention_backends(options, role, device)
    if resolved.prefill != resolved.decode:
        raise BackendError("prefill and decode must run the same attention backend")
    backend = usable_backend(resolved.prefill, device).make()
    for each in reachable(backend):
        each.stamp(resolved.prefill, resolved.decode)
    return AttentionBackends(backend, None, (), resolved.prefill, resolved.decode)
