"""Prefill on one backend, decode on another."""

from __future__ import annotations

from collections.abc import Iterator

from backends.base import AttentionBackend
from backends.forward import ForwardBatch, ForwardMode
from backends.options import SpeculativeAttentionMode
from backends.parts import Part, PartedBackend, phases

_SPECULATIVE = (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)


class HybridBackend(PartedBackend):
    """Each phase of a pass goes to its own half; verify and draft-extend to the one that the mode says."""

    name = "hybrid"

    def __init__(
        self, prefill: AttentionBackend, decode: AttentionBackend, speculative_mode: SpeculativeAttentionMode
    ) -> None:
        self.prefill = prefill
        self.decode = decode
        self.speculative_attention_mode = speculative_mode

    def children(self) -> Iterator[AttentionBackend]:
        yield self.prefill
        yield self.decode

    def assign(self, batch: ForwardBatch) -> Iterator[tuple[AttentionBackend, Part]]:
        for part in phases(batch):
            mode = part.batch.mode
            decodes = mode.is_decode_or_idle() or (
                mode in _SPECULATIVE and self.speculative_attention_mode == "decode"
            )
            yield self.decode if decodes else self.prefill, part
