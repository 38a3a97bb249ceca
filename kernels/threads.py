"""CPU threads: how many are worth having, and telling those who use them."""

from __future__ import annotations

from pathlib import Path

import torch

from kernels.cpu import library

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def default_threads(quota: Path = _QUOTA) -> int:
    """One a physical core, within this process's cgroup quota; at least one."""
    cores = library.physical_cores()
    try:
        limit, period = quota.read_text().split()
        return max(1, min(cores, int(limit) // int(period)))
    except (OSError, ValueError):  # no such file, or no limit
        return cores


def set_threads(count: int) -> None:
    """Have torch and the native kernels use `count` threads."""
    torch.set_num_threads(count)
    if library.available():
        library.set_threads(count)
