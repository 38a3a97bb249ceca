"""How much memory there is for the KV pool."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from backends.kv_pool import KVLayout
from engine.options import CacheOptions

# Without an explicit size a small model's pool stops growing where it would serve no one: this many full contexts.
MAX_CONTEXTS = 4


def available_bytes(device: torch.device) -> int:
    """Bytes that can still be taken on `device`, within the container's limit if there is one."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(_free_memory(), _cgroup_headroom())


def num_slots(layouts: list[KVLayout], options: CacheOptions, context_len: int, device: torch.device) -> int:
    """Slots of a pool that holds every layout: what was asked for, else what memory allows up to a bound.

    Whole pages. Raises ValueError, naming the setting, where not even one page fits.
    """
    page = options.page_size
    if options.max_total_tokens is not None:
        slots = options.max_total_tokens // page * page
    else:
        budget = int(available_bytes(device) * options.mem_fraction_static)
        per_slot = sum(layout.bytes_per_slot for layout in layouts)
        slots = min(budget // per_slot, MAX_CONTEXTS * context_len) // page * page
    if slots < 1:
        raise ValueError(
            "the KV pool has no room for a single page: raise --mem-fraction-static or --max-total-tokens, "
            "or lower --page-size"
        )
    return slots


def _free_memory() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_headroom() -> int:
    """Bytes below this process's cgroup v2 limit; huge where there is none."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return 1 << 62
    return 1 << 62 if limit == "max" else max(0, int(limit) - used)
