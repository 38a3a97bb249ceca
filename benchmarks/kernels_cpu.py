"""Native CPU products: microseconds, GB/s of weights against the measured read bandwidth, and multiply-adds a second.

Weights are cycled through copies that together exceed a core's caches, as a forward pass reads them. Times are the
least of many runs, so that other work on the machine disturbs them little.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from typing import Annotated, Literal

import msgspec
import torch
from command import run
from cyclopts import Parameter
from cyclopts.validators import Number

from kernels.cpu import library
from kernels.cpu.linear import linear, pack
from kernels.packed import PackedWeight

Format = Literal["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F32"]

BYTES = 96_000_000  # of weights in turn
BLOCK_BYTES: dict[str, int] = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34}  # for 32 columns
FLOATS: dict[str, torch.dtype] = {"BF16": torch.bfloat16, "F32": torch.float32}

_SEVERAL = Parameter(consume_multiple=True)
_AT_LEAST_ONE = Parameter(validator=Number(gte=1))


def kernels_cpu(
    *,
    formats: Annotated[tuple[Format, ...], _SEVERAL] = ("Q4_1", "Q8_0", "BF16"),
    shape: tuple[int, int] = (3072, 576),
    batch: Annotated[tuple[Annotated[int, _AT_LEAST_ONE], ...], _SEVERAL] = (1, 4, 8, 16, 64, 512),
    threads: Annotated[int | None, _AT_LEAST_ONE] = None,
    repeats: Annotated[int, _AT_LEAST_ONE] = 15,
    json: bool = False,
) -> int:
    """Time native CPU products by themselves. No model is loaded.

    Parameters
    ----------
    formats
        Of the weights.
    shape
        Rows and columns of a weight.
    batch
        Rows of activations.
    threads
        Size of the thread team (default: physical cores).
    repeats
        Runs, of which the fastest counts.
    json
        The last line of stdout is one JSON object.
    """
    if threads:
        library.set_threads(threads)

    bandwidth = read_bandwidth(library.threads(), repeats)
    rows, columns = shape
    print(f"{library.isa()}, {library.threads()} threads, read bandwidth {bandwidth:.1f} GB/s")
    print(f"{'format':8}{'rows':>6}{'us':>10}{'GB/s':>8}{'of read':>9}{'GMAC/s':>9}{'x 1 row':>9}")
    results = []
    for name in formats:
        weights = copies(name, rows, columns)
        size = weights[0].data.nbytes
        alone = None
        for count in batch:
            seconds = time_product(weights, torch.randn(count, columns), repeats)
            alone = alone or seconds
            result = {
                "format": name,
                "rows": count,
                "us": seconds * 1e6,
                "gb_per_s": size / seconds / 1e9,
                "gmac_per_s": count * rows * columns / seconds / 1e9,
                "cost_of_one_row": seconds / alone,
            }
            results.append(result)
            print(
                f"{name:8}{count:6}{result['us']:10.1f}{result['gb_per_s']:8.1f}"
                f"{result['gb_per_s'] / bandwidth:9.0%}{result['gmac_per_s']:9.0f}{seconds / alone:9.2f}"
            )
    if json:
        found = {"isa": library.isa(), "read_gb_per_s": bandwidth, "products": results}
        print(msgspec.json.encode(found).decode())
    return 0


def least(work: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of `repeats` runs."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def read_bandwidth(threads: int, repeats: int) -> float:
    """GB/s of summing a large array on `threads` threads."""
    torch.set_num_threads(threads)
    data = torch.ones(BYTES // 4)
    bandwidth = data.nbytes / least(data.sum, repeats) / 1e9
    torch.set_num_threads(1)
    return bandwidth


def copies(name: str, rows: int, columns: int) -> list[PackedWeight]:
    """Equal packed weights of random content, BYTES of them together."""
    if name in BLOCK_BYTES:
        # Bytes under 60 are small positive numbers wherever a block keeps its scales.
        data = torch.randint(60, (rows, columns // 32 * BLOCK_BYTES[name]), dtype=torch.uint8)
    else:
        data = torch.randn(rows, columns).to(FLOATS[name])
    weight = PackedWeight(name, data, rows, columns)
    return [pack(weight) for _ in range(max(1, BYTES // data.nbytes))]


def time_product(weights: list[PackedWeight], x: torch.Tensor, repeats: int) -> float:
    """Seconds a product, over some of the weights in turn."""
    in_turn = itertools.cycle(weights)
    few = max(1, min(len(weights), 256 // len(x)))

    def multiply() -> None:
        for _ in range(few):
            linear(x, next(in_turn))

    return least(multiply, repeats) / few


if __name__ == "__main__":
    sys.exit(run(kernels_cpu))
