"""Products by head and by expert: right, and for each row the same bits whatever rows are beside it."""

from __future__ import annotations

import gguf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels.cpu.linear as native
from kernels.grouped import Choices, ExpertWeights, linear_by_expert, linear_by_head
from kernels.linear import linear
from kernels.packed import PackedWeight, pack_float
from tests.native import needs_native

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "F32/native": 1e-5, "Q8_0/native": 6e-2}

dtypes = st.sampled_from([torch.float32, torch.bfloat16])


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(0, 60),
    heads=st.integers(1, 5),
    rows=st.sampled_from([4, 16, 33]),
    columns=st.sampled_from([1, 24, 64]),
    dtype=dtypes,
)
def test_by_head(count: int, heads: int, rows: int, columns: int, dtype: torch.dtype) -> None:
    x, matrices = drawn(count, heads, columns, dtype=dtype), drawn(heads, rows, columns, seed=1, dtype=dtype)
    got = linear_by_head(x, matrices)
    assert got.dtype == dtype
    expected = torch.einsum("thk,hnk->thn", x.double(), matrices.double())
    scale = columns**0.5
    tolerance = TOLERANCE[str(dtype).removeprefix("torch.")]
    torch.testing.assert_close(got.double() / scale, expected / scale, atol=tolerance, rtol=1e-2)
    for row in {0, count // 2, count - 1} if count else ():
        assert torch.equal(got[row : row + 1], linear_by_head(x[row : row + 1], matrices))


def experts(form: str, count: int, rows: int, columns: int) -> tuple[ExpertWeights, torch.Tensor]:
    """Stacked matrices in the form asked for, and as they were, [count, rows, columns]."""
    dtype = torch.bfloat16 if form == "bfloat16" else torch.float32
    matrices = drawn(count, rows, columns, seed=1, dtype=dtype)
    if form == "Q8_0/native":
        blocks = gguf.quants.quantize(matrices.numpy(), gguf.GGMLQuantizationType.Q8_0)
        packed = [PackedWeight("Q8_0", data, rows, columns) for data in torch.from_numpy(blocks)]
    else:
        packed = [pack_float(matrix) for matrix in matrices]
    if form.endswith("native"):
        packed = [native.pack(weight) for weight in packed]
    data = torch.stack([weight.data for weight in packed])
    return ExpertWeights(packed[0].format, data, rows, columns), matrices


@pytest.mark.parametrize(
    "form",
    [
        "float32",
        "bfloat16",
        pytest.param("F32/native", marks=needs_native),
        pytest.param("Q8_0/native", marks=needs_native),
    ],
)
@settings(max_examples=25, deadline=None)
@given(
    count=st.integers(1, 300),
    num_experts=st.sampled_from([1, 4, 40]),
    skew=st.floats(0.2, 3.0),
    shape=st.sampled_from([(16, 32), (33, 64), (96, 64)]),
    seed=st.integers(0, 9),
)
def test_by_expert(
    form: str, count: int, num_experts: int, skew: float, shape: tuple[int, int], seed: int
) -> None:
    """However evenly rows are spread over the experts."""
    weights, matrices = experts(form, num_experts, *shape)
    x = drawn(count, shape[1], dtype=matrices.dtype)
    random = torch.rand(count, generator=torch.Generator().manual_seed(seed))
    chosen = (random**skew * num_experts).long()
    choices = Choices.of(chosen, num_experts)
    sorted_rows = linear_by_expert(x[choices.order], weights, choices)
    got = torch.empty_like(sorted_rows).index_copy_(0, choices.order, sorted_rows)
    expected = torch.einsum("rk,rnk->rn", x.double(), matrices[chosen].double())
    scale = shape[1] ** 0.5
    torch.testing.assert_close(got.double() / scale, expected / scale, atol=TOLERANCE[form], rtol=1e-2)
    for row in {0, count // 2, count - 1}:
        assert torch.equal(got[row : row + 1], linear(x[row : row + 1], weights.of(int(chosen[row]))))
