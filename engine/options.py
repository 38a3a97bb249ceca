"""Frozen settings of the engine. `app/` parses flags into these; nothing changes them afterwards."""

from __future__ import annotations

import msgspec


class CacheOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Size and layout of the KV pool."""

    mem_fraction_static: float = 0.6  # of the memory that is free once weights are loaded
    max_total_tokens: int | None = None  # exact number of slots; None: from memory
    page_size: int = 1
    kv_cache_dtype: str = "auto"
    enable_prefix_caching: bool = True


class SchedulerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How requests share a step."""

    max_running_requests: int = 64
    max_queued_requests: int = 256
    chunked_prefill_size: int = 512  # prompt tokens a step, all requests together
