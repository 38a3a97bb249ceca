"""Native CPU products: microseconds, GB/s of weights against the measured read bandwidth, and multiply-adds a second.

Weights are cycled through copies that together exceed a core's caches, as a forward pass reads them. Times are the
least of many runs, so that other work on the machine disturbs them little.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable

import torch

from kernels.cpu import library
from kernels.cpu.linear import linear, pack
from kernels.packed import PackedWeight

BYTES = 96_000_000  # of weights in turn
BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34}  # for 32 columns


def main() -> None:
    """Print a table; with --json, a last line with one object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", nargs="+", default=["Q4_1", "Q8_0", "BF16"])
    parser.add_argument("--shape", nargs=2, type=int, default=[3072, 576], metavar=("ROWS", "COLUMNS"))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4, 8, 16, 64, 512])
    parser.add_argument("--threads", type=int, help="size of the thread team (default: physical cores)")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.threads:
        library.set_threads(options.threads)

    bandwidth = read_bandwidth(library.threads(), options.repeats)
    rows, columns = options.shape
    print(f"{library.isa()}, {library.threads()} threads, read bandwidth {bandwidth:.1f} GB/s")
    print(f"{'format':8}{'rows':>6}{'us':>10}{'GB/s':>8}{'of read':>9}{'GMAC/s':>9}{'x 1 row':>9}")
    results = []
    for name in options.formats:
        weights = copies(name, rows, columns)
        size = weights[0].data.nbytes
        alone = None
        for count in options.batch:
            seconds = time_product(weights, torch.randn(count, columns), options.repeats)
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
    if options.json:
        print(json.dumps({"isa": library.isa(), "read_gb_per_s": bandwidth, "products": results}))


def least(run: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of `repeats` runs."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
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
        data = torch.randn(rows, columns).to({"BF16": torch.bfloat16, "F32": torch.float32}[name])
    weight = PackedWeight(name, data, rows, columns)
    return [pack(weight) for _ in range(max(1, BYTES // data.nbytes))]


def time_product(weights: list[PackedWeight], x: torch.Tensor, repeats: int) -> float:
    """Seconds a product, over some of the weights in turn."""
    in_turn = itertools.cycle(weights)
    few = max(1, min(len(weights), 256 // len(x)))

    def run() -> None:
        for _ in range(few):
            linear(x, next(in_turn))

    return least(run, repeats) / few


if __name__ == "__main__":
    main()
