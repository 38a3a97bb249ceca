"""Pools are full of zeros, and take up memory as they are written to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from backends.kv_pool import DTYPES, KVLayout, KVPool
from backends.pool_memory import zeros

CPU = torch.device("cpu")
MIB = 1 << 20
STATUS = Path("/proc/self/status")


def resident() -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize("dtype", sorted(set(DTYPES.values()), key=str), ids=str)
@pytest.mark.parametrize("shape", [(3, 1000, 2, 16), (2, 5, 1, 0), (0, 7)])
def test_memory_of_a_pool_is_zeros_that_can_be_written(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    memory = zeros(shape, dtype, CPU)
    assert (memory.shape, memory.dtype, memory.is_contiguous()) == (shape, dtype, True)
    assert not memory.float().any()
    memory.fill_(1)
    assert (memory.float() == 1).all()


@pytest.mark.skipif(not STATUS.exists(), reason="needs /proc")
def test_a_pool_is_as_large_as_what_was_written_to_it() -> None:
    before = resident()
    pool = KVPool(KVLayout(4, 4, 64, 64, torch.float32), 1 << 16, CPU)
    assert pool.key.nbytes + pool.value.nbytes == 512 * MIB
    assert resident() - before < 64 * MIB
    slots = torch.arange(1 << 14)
    entries = torch.ones(len(slots), 4, 64)
    written = resident()
    for layer in range(4):
        pool.write(layer, slots, entries, entries)
    assert 100 * MIB < resident() - written < 256 * MIB
