"""Frozen settings of speculation. `app/` parses flags into these; nothing changes them afterwards."""

from __future__ import annotations

from typing import Literal

import msgspec

Algorithm = Literal["none", "ngram"]


class SpeculativeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drafted. `num_draft_tokens` counts verified rows, the last token included."""

    algorithm: Algorithm = "ngram"
    num_draft_tokens: int = 16
    ngram_min_match: int = 1
    ngram_max_match: int = 16
