"""Frozen settings of attention. `app/` parses flags into these; nothing changes them afterwards."""

from __future__ import annotations

from typing import Literal

import msgspec

SpeculativeAttentionMode = Literal["prefill", "decode"]


class AttentionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which backend each worker runs. None leaves the choice to what comes next in the order: the draft override
    (both names of a drafter), the prefill or decode name, the common name, the automatic one.

    speculative_attention_mode: which of the two names verify and draft-extend passes take.
    enable_pdmux: decode on backends of its own, one for each of `sm_group_num` groups of multiprocessors.
    enable_two_batch_overlap: attend in two halves of the batch, each by a backend of its own.
    """

    attention_backend: str | None = None
    prefill_attention_backend: str | None = None
    decode_attention_backend: str | None = None
    speculative_draft_attention_backend: str | None = None
    speculative_attention_mode: SpeculativeAttentionMode = "prefill"
    enable_pdmux: bool = False
    sm_group_num: int = 8
    enable_two_batch_overlap: bool = False

    def __post_init__(self) -> None:
        if self.sm_group_num < 1:
            raise ValueError(f"sm_group_num must be at least 1, not {self.sm_group_num}")
