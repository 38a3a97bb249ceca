"""Products over weights in any format: right, and for each row the same bits whatever rows are beside it."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.functional import linear as torch_linear

from kernels.dequantize import dequantize
from kernels.linear import embedding, linear
from kernels.packed import PackedWeight, pack_float

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def quantised(name: str, rows: int, columns: int) -> PackedWeight:
    kind = gguf.GGMLQuantizationType[name]
    data = torch.from_numpy(gguf.quants.quantize(drawn(rows, columns, seed=1).numpy(), kind))
    return PackedWeight(name, data.view(rows, -1), rows, columns)


shapes = st.tuples(st.sampled_from([1, 7, 33, 96, 257]), st.sampled_from([1, 9, 31, 64, 576]))


@settings(max_examples=30, deadline=None)
@given(shape=shapes, count=st.integers(0, 70), dtype=st.sampled_from(DTYPES), with_bias=st.booleans())
def test_equals_the_product_in_float64(
    shape: tuple[int, int], count: int, dtype: torch.dtype, with_bias: bool
) -> None:
    matrix, x = drawn(*shape, dtype=dtype), drawn(count, shape[1], seed=1, dtype=dtype)
    bias = drawn(shape[0], seed=2, dtype=dtype) if with_bias else None
    expected = torch_linear(x.double(), matrix.double(), None if bias is None else bias.double())
    got = linear(x, pack_float(matrix), bias)
    assert got.dtype == dtype
    scale = max(1.0, shape[1] ** 0.5)
    torch.testing.assert_close(
        got.double() / scale, expected / scale, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


@settings(max_examples=60, deadline=None)
@given(
    shape=shapes,
    dtype=st.sampled_from(DTYPES),
    count=st.integers(1, 600),
    first=st.integers(0, 40),
    offset=st.integers(0, 17),
)
@example(
    shape=(7, 9), dtype=torch.float32, count=2, first=0, offset=0
)  # on processors of AMD places matter to MKL
@example(shape=(1, 9), dtype=torch.float32, count=8, first=0, offset=1)
def test_a_row_is_the_same_alone_at_any_place_and_in_any_company(
    shape: tuple[int, int], dtype: torch.dtype, count: int, first: int, offset: int
) -> None:
    """Also where its memory is not aligned, as rows of a larger tensor are."""
    weight = pack_float(drawn(*shape, dtype=dtype))
    rows = drawn(count, shape[1], seed=1, dtype=dtype)
    memory = torch.zeros(offset + rows.numel(), dtype=dtype)
    moved = memory[offset:].view_as(rows).copy_(rows)
    together = linear(moved, weight)
    for row in {0, count // 2, count - 1, min(first, count - 1)}:
        assert torch.equal(together[row : row + 1], linear(rows[row : row + 1], weight))
    some = slice(min(first, count - 1), min(first, count - 1) + 19)
    assert torch.equal(together[some], linear(rows[some], weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(576, 1536), (1536, 576), (2048, 576)])
def test_every_row_of_a_prompt_has_the_bits_of_decode(rows: int, columns: int, dtype: torch.dtype) -> None:
    weight = pack_float(drawn(rows, columns, dtype=dtype))
    x = drawn(300, columns, seed=1, dtype=dtype)
    together = linear(x, weight)
    assert torch.equal(together, torch.cat([linear(row, weight) for row in x.split(1)]))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16", "F32"])
def test_formats_that_no_kernel_has_packed_multiply_as_dequantised(name: str) -> None:
    if name in ("F16", "BF16", "F32"):
        kinds = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
        weight = pack_float(drawn(40, 64, seed=1).to(kinds[name]))
    else:
        weight = quantised(name, 40, 64)
    x = drawn(21, 64)
    expected = x.double() @ dequantize(weight).double().T
    torch.testing.assert_close(linear(x, weight).double(), expected, atol=1e-4, rtol=1e-5)
    alone = torch.cat([linear(row, weight) for row in x.split(1)])
    assert torch.equal(linear(x, weight), alone)


def test_a_large_quantised_matrix_is_dequantised_piece_by_piece_with_the_same_result() -> None:
    weight = quantised("Q8_0", 9000, 32)
    x = drawn(3, 32)
    expected = (
        x.double()
        @ torch.from_numpy(
            gguf.quants.dequantize(weight.data.numpy(), gguf.GGMLQuantizationType.Q8_0).astype(np.float64)
        ).T
    )
    torch.testing.assert_close(linear(x, weight).double(), expected, atol=1e-4, rtol=1e-5)


def test_leading_dimensions_are_kept() -> None:
    weight = pack_float(drawn(5, 8))
    x = drawn(2, 3, 8)
    assert torch.equal(linear(x, weight), linear(x.view(6, 8), weight).view(2, 3, 5))
    assert linear(x[:, :0], weight).shape == (2, 0, 5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_gives_the_rows_asked_for(dtype: torch.dtype) -> None:
    ids = torch.tensor([3, 0, 3, 39])
    matrix = drawn(40, 64, seed=1)
    assert torch.equal(embedding(ids, pack_float(matrix), dtype), matrix[ids].to(dtype))
    packed = quantised("Q4_1", 40, 64)
    expected = gguf.quants.dequantize(packed.data.numpy(), gguf.GGMLQuantizationType.Q4_1)
    assert torch.equal(embedding(ids, packed, dtype), torch.from_numpy(expected)[ids].to(dtype))
