"""How the attention of an MLA layer computes the pass that it is in."""

from __future__ import annotations

from typing import NamedTuple

from backends.base import AttentionBackend
from backends.forward import ForwardBatch, ForwardMode, get_attn_backend
from backends.handlers import AttnForwardMethod
from backends.options import AttentionOptions
from backends.registry import BackendSpecs, installed_specs
from backends.setup import resolve_attention_backends


class Dispatch(NamedTuple):
    """The method, and the name of the backend whose handler chose it."""

    method: AttnForwardMethod
    backend: str


def dispatch_attn_forward_method(batch: ForwardBatch, specs: BackendSpecs | None = None) -> Dispatch:
    """What the backend of the current forward pass has its handler choose for `batch`.

    Decode and idle go by the worker's decode name; target-verify and draft-extend by the decode name if its
    speculative attention mode is `decode`, else by the prefill name; all else by the prefill name. `specs` are the
    installed ones unless given. Raises RuntimeError outside a pass.
    """
    specs = installed_specs() if specs is None else specs
    backend = get_attn_backend()
    prefill, decode = _names(backend, batch, specs)
    by_decode = batch.mode.is_decode_or_idle() or (
        batch.mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)
        and backend.speculative_attention_mode == "decode"
    )
    name = decode if by_decode else prefill
    return Dispatch(specs[name].handler(batch), name)


def _names(backend: AttentionBackend, batch: ForwardBatch, specs: BackendSpecs) -> tuple[str, str]:
    """The backend's own names. One that no worker has stamped has those of a target without settings."""
    prefill, decode = backend.prefill_attention_backend_str, backend.decode_attention_backend_str
    if prefill is not None and decode is not None:
        return prefill, decode
    device, layout = batch.input_ids.device, batch.kv_pool.layout
    resolved = resolve_attention_backends(
        AttentionOptions(), role="target", device=device, layout=layout, specs=specs
    )
    return resolved.prefill, resolved.decode
