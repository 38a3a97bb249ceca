"""How much memory there is for the KV pool."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from backends.kv_pool import KVLayout
from engine.options import CacheOptions

# In a host's own memory a small model's pool stops growing where it would serve no one: this many full contexts.
MAX_CONTEXTS = 4
NO_LIMIT = 1 << 62


def available_bytes(device: torch.device) -> int:
    """Bytes that can still be taken on `device`, within the container's limit if there is one."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(_free_memory(), cgroup_headroom())


def num_slots(
    layouts: list[KVLayout],
    options: CacheOptions,
    context_len: int,
    device: torch.device,
    reserved_bytes: int = 0,
) -> int:
    """Slots of a pool that holds every layout: what was asked for, else what memory allows: all of that on a
    GPU, which is there for it, and up to MAX_CONTEXTS elsewhere.

    `reserved_bytes` of that memory go to what requests hold beside their slots (recurrent state). Whole pages.
    Raises ValueError, naming the setting, where not even one page fits.
    """
    page = options.page_size
    if options.max_total_tokens is not None:
        slots = options.max_total_tokens // page * page
    else:
        budget = int(available_bytes(device) * options.mem_fraction_static) - reserved_bytes
        per_slot = sum(layout.bytes_per_slot for layout in layouts)
        # Without attention layers a slot is no more than a number.
        slots = budget // max(per_slot, 1)
        if device.type == "cpu" or not per_slot:
            slots = min(slots, MAX_CONTEXTS * context_len)
        slots = slots // page * page
    if slots < 1:
        raise ValueError(
            "the KV pool has no room for a single page: raise --mem-fraction-static or --max-total-tokens, "
            "or lower --page-size"
            + (" or, as each keeps recurrent state, --max-running-requests" if reserved_bytes else "")
        )
    return slots


def num_checkpoints(
    bytes_each: int,
    layouts: list[KVLayout],
    options: CacheOptions,
    context_len: int,
    device: torch.device,
    reserved_bytes: int,
) -> int:
    """Checkpoints of recurrent state: one for each boundary that a full KV pool has, if there is memory.

    At most half of what memory allows goes to them, or what a KV pool of the size that was asked for leaves.
    """
    if not options.enable_prefix_caching:
        return 0
    budget = int(available_bytes(device) * options.mem_fraction_static) - reserved_bytes
    if options.max_total_tokens is None:
        tokens, budget = MAX_CONTEXTS * context_len, budget // 2
    else:
        tokens = options.max_total_tokens
        budget -= tokens * sum(layout.bytes_per_slot for layout in layouts)
    return max(0, min(tokens // options.mamba_track_interval, budget // bytes_each))


def _free_memory() -> int:
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cgroup_headroom(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes below the nearest of the cgroup v2 limits that this process is under; huge where there is none.

    File pages that no process maps are not counted as used: the kernel drops them when memory is asked for.
    """
    try:
        path = next(line[3:] for line in own.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return NO_LIMIT
    group = root / path.strip("/")
    return min(_headroom(each) for each in (group, *group.parents) if each.is_relative_to(root))


def _headroom(group: Path) -> int:
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        pairs = (line.split() for line in (group / "memory.stat").read_text().splitlines())
        stat = {name: int(value) for name, value in pairs}
    except (OSError, ValueError):
        return NO_LIMIT
    if limit == "max":
        return NO_LIMIT
    cached = stat.get("inactive_file", 0) + stat.get("active_file", 0) - stat.get("file_mapped", 0)
    return max(0, int(limit) - used + max(0, cached))
