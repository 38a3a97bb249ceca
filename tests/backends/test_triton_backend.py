"""The Triton backend in the interpreter, and where it says that it cannot run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from backends.kv_pool import KVLayout
from backends.triton import unusable
from kernels.triton.attention import INTERPRETED
from tests.backends.triton_suite import (
    test_a_pass_without_tokens_gives_no_rows,
    test_a_row_is_the_same_in_every_cut_and_company,
    test_equals_dense_attention,
)

__all__ = [
    "test_a_pass_without_tokens_gives_no_rows",
    "test_a_row_is_the_same_in_every_cut_and_company",
    "test_equals_dense_attention",
]

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def device() -> torch.device:
    if not INTERPRETED:
        pytest.skip("the kernels are compiled for the GPU in this process")
    return CPU


def layout(dtype: torch.dtype = torch.float32) -> KVLayout:
    return KVLayout(num_layers=1, num_kv_heads=1, head_dim=16, v_head_dim=16, dtype=dtype)


class TestUnusable:
    def test_a_cpu_serves_in_the_interpreter(self, device: torch.device) -> None:
        assert unusable(CPU, layout()) is None

    def test_a_cpu_without_the_interpreter_is_told_how_to_get_it(self) -> None:
        script = (
            "import torch; from backends.kv_pool import KVLayout; from backends.triton import unusable;"
            "print(unusable(torch.device('cpu'), KVLayout(1, 1, 16, 16, torch.float32)))"
        )
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=Path(__file__).parents[2],
            env={"PATH": "", "TRITON_INTERPRET": "0"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert "needs CUDA" in done.stdout and "TRITON_INTERPRET=1" in done.stdout

    @pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float64])
    def test_a_cache_dtype_without_kernels_is_named(self, dtype: torch.dtype) -> None:
        reason = unusable(CPU, layout(dtype)) or ""
        assert str(dtype).removeprefix("torch.") in reason and "--kv-cache-dtype" in reason

    def test_other_devices_have_no_triton(self) -> None:
        assert unusable(torch.device("mps"), layout()) == "it needs CUDA"
