"""How the attention of an MLA layer computes the pass that it is in: which rows take which method."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from backends.base import AttentionBackend
from backends.forward import ForwardBatch, ForwardMode, get_attn_backend, get_forward_context
from backends.handlers import AttnForwardMethod
from backends.options import AttentionOptions
from backends.parts import Part, Piece, cut, phases
from backends.registry import BackendSpecs, installed_specs
from backends.setup import resolve_attention_backends


class Dispatch(NamedTuple):
    """The method, and the name of the backend whose handler chose it."""

    method: AttnForwardMethod
    backend: str


def dispatch_attn_forward_method(batch: ForwardBatch, specs: BackendSpecs | None = None) -> Dispatch:
    """What the backend of the current forward pass has its handler choose for `batch`.

    Decode and idle go by the worker's decode name; target-verify and draft-extend by the decode name if its
    speculative attention mode is `decode`, else by the prefill name; all else by the prefill name. `specs` are those
    that the backend was stamped with, or else the installed ones, unless given. Raises RuntimeError outside a pass.
    """
    backend = get_attn_backend()
    specs = specs or backend.specs or installed_specs()
    prefill, decode = _names(backend, batch, specs)
    by_decode = batch.mode.is_decode_or_idle() or (
        batch.mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)
        and backend.speculative_attention_mode == "decode"
    )
    name = decode if by_decode else prefill
    return Dispatch(specs[name].handler(batch), name)


@dataclass(frozen=True, slots=True)
class LatentPart:
    """Rows of a pass that take one method, and what their backend planned for them."""

    part: Part
    method: AttnForwardMethod
    plan: object


def latent_parts(batch: ForwardBatch) -> list[LatentPart]:
    """The current pass cut by phase, and each prompt by the method that is chosen for it alone.

    So the method of a row depends on its own sequence only: a decode row beside a prompt's chunk stays MQA.
    """
    context = get_forward_context()
    return [
        LatentPart(part, method, context.plan if part.rows is None else context.backend.plan(part.batch))
        for phase in phases(batch)
        for part, method in _by_method(phase)
    ]


def _by_method(phase: Part) -> Iterator[tuple[Part, AttnForwardMethod]]:
    batch = phase.batch
    if batch.mode is not ForwardMode.EXTEND or len(batch.query_lens) == 1:
        yield phase, dispatch_attn_forward_method(batch).method
        return
    pieces: dict[AttnForwardMethod, list[Piece]] = {}
    for sequence, queries in enumerate(batch.query_lens):
        piece = Piece(sequence, 0, queries)
        method = dispatch_attn_forward_method(cut(batch, [piece]).batch).method
        pieces.setdefault(method, []).append(piece)
    for method, found in pieces.items():
        if len(pieces) == 1:
            yield phase, method
            return
        part = cut(batch, found)
        yield Part(part.batch, part.rows if phase.rows is None else phase.rows[part.rows]), method


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
