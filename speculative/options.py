"""Frozen settings of speculation. `app/` parses flags into these; nothing changes them afterwards."""

from __future__ import annotations

from typing import Literal

import msgspec

Algorithm = Literal["none", "ngram", "dflash", "standalone", "eagle3", "mtp", "auto"]


class SpeculativeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drafted. `num_draft_tokens` counts verified rows, the last token included.

    `ngram_history`: entries in which n-grams of all answers are remembered; 0: none.
    `draft_window_size`: how many tokens of context a DFlash block sees; None: all.
    """

    algorithm: Algorithm = "auto"
    has_drafter: bool = False  # whether a drafting model is loaded beside the target
    num_draft_tokens: int = 16
    ngram_min_match: int = 1
    ngram_max_match: int = 16
    ngram_history: int = 262_144
    draft_window_size: int | None = None

    @property
    def workers(self) -> Literal["target", "pair"]:
        """Who runs: the target alone, or with a drafter."""
        return "pair" if self.has_drafter else "target"
