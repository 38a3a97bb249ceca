"""Frozen settings of a drafter's training. `app/` parses flags into these."""

from __future__ import annotations

from typing import Literal

import msgspec

Weights = Literal["bfloat16", "int8"]


class TrainingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is trained and for how long.

    minutes: spent on training, over all resumptions. steps: where given, they end it instead.
    target_layer_ids: the target's layers that the drafter sees; empty: three, up to the last but one.
    mask_token_id: None: a special token that the data lacks.
    draft_vocab_size: tokens that it can draft, the most frequent ones of the data.
    soft_share: of the loss, what is against the target's distribution; the rest is against the text's own token.
    decay: offsets over which the weight of a position falls to 1 / e.
    weights: what the drafter is stored in.
    cache_bytes: hidden states that are kept in a file, so that they are computed once.
    """

    layers: int = 2
    block_size: int = 8
    target_layer_ids: tuple[int, ...] = ()
    draft_vocab_size: int = 8192
    mask_token_id: int | None = None
    minutes: float = 60.0
    steps: int | None = None
    learning_rate: float = 1e-3
    warmup_steps: int = 50
    anchors_per_step: int = 192
    anchors_per_example: int = 32
    soft_share: float = 0.5
    decay: float = 4.0
    weights: Weights = "bfloat16"
    max_length: int = 1024
    cache_bytes: int = 8 << 30
    checkpoint_seconds: float = 120.0
    evaluate_seconds: float = 240.0
    seed: int = 0
