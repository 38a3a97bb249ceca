"""Every Triton kernel compiles to machine code for the GPUs it is meant for, and fits their shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = {"windowed", "block", "latent", "fp8"}
KERNELS = {"extend_kernel", "split_kernel", "merge_kernel"}
SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}  # bytes a block may take


@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_kernels_compile_ahead_of_time(capability: int, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_triton", str(capability)],
        cwd=Path(__file__).parents[2],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    built = [json.loads(line) for line in done.stdout.splitlines()]
    assert {(each["case"], each["kernel"]) for each in built} == {
        (case, kernel) for case in CASES - ({"fp8"} if capability < 89 else set()) for kernel in KERNELS
    }
    for each in built:
        assert each["target"].startswith(f"sm_{capability}")
        assert each["cubin_bytes"] > 0
        assert each["shared_memory"] <= SHARED_MEMORY[capability]
