"""Frozen settings of the engine. `app/` parses flags into these; nothing changes them afterwards."""

from __future__ import annotations

from typing import Literal

import msgspec

STATE_CHUNK = 16  # the CHUNK of kernels/linear_attention.py, which is too heavy to import here

KVCacheDtype = Literal["auto", "float32", "bfloat16", "bf16", "float16", "fp16", "fp8_e4m3", "fp8", "int8"]


class CacheOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Size and layout of the KV pool.

    kv_cache_dtype: what keys and values are held in; auto: what the model computes in, or less if its weights are
        narrower. Of fp8 and int8 the scales are held besides.
    speculative_draft_kv_cache_dtype: the same for a drafter; None: as the target's.
    """

    mem_fraction_static: float = 0.6  # of the memory that is free once weights are loaded
    max_total_tokens: int | None = None  # exact number of slots; None: from memory
    page_size: int = 1
    kv_cache_dtype: KVCacheDtype = "auto"
    speculative_draft_kv_cache_dtype: KVCacheDtype | None = None
    enable_prefix_caching: bool = True
    mamba_track_interval: int = (
        256  # tokens between checkpoints of recurrent state, a multiple of STATE_CHUNK
    )

    def dtype_of(self, role: Literal["target", "draft"]) -> KVCacheDtype:
        """What was asked for the pool of one worker."""
        own = self.speculative_draft_kv_cache_dtype if role == "draft" else None
        return own or self.kv_cache_dtype


class SchedulerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How requests share a step."""

    max_running_requests: int = 64
    max_queued_requests: int = 256
    chunked_prefill_size: int = 512  # prompt tokens a step, all requests together
