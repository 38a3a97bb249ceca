"""Every block format is read as the `gguf` package reads it, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from kernels.dequantize import BLOCK_FORMATS, dequantize
from kernels.packed import PackedWeight, pack_float

ROWS, COLUMNS = 7, 512


def random_weight(name: str, seed: int = 0) -> PackedWeight:
    """Random bytes: every bit pattern of a format occurs. Scales are kept finite, since NaN equals nothing."""
    block = BLOCK_FORMATS[name]
    generator = np.random.default_rng(seed)
    data = generator.integers(0, 256, (ROWS * COLUMNS // block.values, block.size), np.uint8)
    halves = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}.get(
        name, (0, 2) if "1" in name or "K" in name else (0,)
    )
    for start in halves:
        data[:, start : start + 2] = generator.normal(0, 2, (len(data), 1)).astype(np.float16).view(np.uint8)
    return PackedWeight(name, torch.from_numpy(data.reshape(ROWS, -1)), ROWS, COLUMNS)


def reference(weight: PackedWeight) -> np.ndarray:
    return gguf.quants.dequantize(weight.data.numpy(), gguf.GGMLQuantizationType[weight.format])


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_equals_the_reference_bit_for_bit(name: str) -> None:
    weight = random_weight(name)
    values = dequantize(weight)
    assert values.dtype == torch.float32
    assert values.shape == (ROWS, COLUMNS)
    assert values.numpy().tobytes() == reference(weight).tobytes()


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_block_sizes_are_those_of_the_format(name: str) -> None:
    values, size, _ = BLOCK_FORMATS[name]
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == (values, size)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_chosen_rows_are_the_same_rows(name: str) -> None:
    weight = random_weight(name)
    rows = torch.tensor([5, 0, 5, 3])
    assert torch.equal(dequantize(weight, rows), dequantize(weight)[rows])


def test_a_matrix_larger_than_one_chunk_is_read_whole() -> None:
    block = BLOCK_FORMATS["Q8_0"]
    data = torch.randint(0, 100, (300, 1024 // block.values * block.size), dtype=torch.uint8)
    weight = PackedWeight("Q8_0", data, 300, 1024)
    assert dequantize(weight).numpy().tobytes() == reference(weight).tobytes()


def test_rows_longer_than_a_chunk_are_read_one_by_one() -> None:
    columns = 1 << 17
    data = torch.randint(0, 100, (2, columns // 32 * 34), dtype=torch.uint8)
    weight = PackedWeight("Q8_0", data, 2, columns)
    assert dequantize(weight).numpy().tobytes() == reference(weight).tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_float_formats_are_widened(dtype: torch.dtype) -> None:
    values = torch.randn(4, 6).to(dtype)
    assert torch.equal(dequantize(pack_float(values)), values.float())
    assert torch.equal(dequantize(pack_float(values), torch.tensor([3, 1])), values[[3, 1]].float())


def test_a_kernel_layout_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="Q4_1/vnni"):
        dequantize(PackedWeight("Q4_1/vnni", torch.zeros(1, 20, dtype=torch.uint8), 1, 32))
