"""Quantisation at load: blocks that the gguf package reads, and errors of half a step at most."""

from __future__ import annotations

import pytest
import torch
from gguf import GGMLQuantizationType, quants

from kernels.packed import PackedWeight
from kernels.quantize import quantize


def read(weight: PackedWeight) -> torch.Tensor:
    """By the gguf package."""
    values = quants.dequantize(weight.data.numpy(), GGMLQuantizationType[weight.format])
    return torch.from_numpy(values.reshape(weight.rows, weight.columns).copy())


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_values_are_within_half_a_step_of_their_block(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    matrix = (torch.randn(50, 256) * torch.logspace(-3, 1, 50)[:, None]).to(dtype)
    groups = matrix.float().unflatten(1, (-1, 32))
    steps = {
        "Q8_0": groups.abs().amax(-1, keepdim=True) / 127,
        "Q4_1": (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / 15,
    }
    for name, step in steps.items():
        weight = quantize(matrix, name)  # type: ignore[arg-type]
        error = (read(weight) - matrix.float()).abs().unflatten(1, (-1, 32))
        halves = 2**-11 * 16 * groups.abs().amax(-1, keepdim=True)  # of scales and minima, in half precision
        assert (error <= step / 2 + halves).all(), name


@pytest.mark.parametrize("name", ("Q8_0", "Q4_1"))
def test_blocks_of_one_value_keep_it(name: str) -> None:
    matrix = torch.zeros(3, 64)
    matrix[1] = 0.5
    assert torch.equal(read(quantize(matrix, "Q4_1")), matrix)
    assert torch.allclose(read(quantize(matrix, name)), matrix, rtol=1e-3)  # type: ignore[arg-type]
    assert torch.equal(read(quantize(matrix, name))[[0, 2]], matrix[[0, 2]])  # type: ignore[arg-type]
