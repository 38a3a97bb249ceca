"""Frozen settings of attention. `app/` parses flags into these; nothing changes them afterwards."""

from __future__ import annotations

from typing import Literal

import msgspec


class AttentionOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which backend each worker runs. None leaves the choice to what comes next in the order: the draft override
    (both names of a drafter), the prefill or decode name, the common name, the automatic one."""

    attention_backend: str | None = None
    prefill_attention_backend: str | None = None
    decode_attention_backend: str | None = None
    speculative_draft_attention_backend: str | None = None
    speculative_attention_mode: Literal["prefill", "decode"] = "prefill"
