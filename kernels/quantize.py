"""From a float matrix to the blocks of 32 columns that GGUF files hold: quantisation when a checkpoint is loaded."""

from __future__ import annotations

from typing import Literal

import torch

from kernels.packed import PackedWeight

COLUMNS = 32  # of a block; a matrix to quantise is whole blocks wide
_ROWS_AT_A_TIME = 4096  # so that no float32 copy of a large matrix is made


def quantize(matrix: torch.Tensor, format: Literal["Q8_0", "Q4_1"]) -> PackedWeight:
    """matrix [rows, columns], any float type, in blocks of `format`, each value rounded to the nearest of its block's.

    Q8_0: 255 steps between plus and minus the largest magnitude. Q4_1: 16 steps from the least to the largest value.
    """
    rows, columns = matrix.shape
    blocks = _q8_0 if format == "Q8_0" else _q4_1
    parts = [blocks(part.float().unflatten(1, (-1, COLUMNS))) for part in matrix.split(_ROWS_AT_A_TIME)]
    return PackedWeight(format, torch.cat(parts).flatten(1), rows, columns)


def _q8_0(groups: torch.Tensor) -> torch.Tensor:
    """groups [rows, blocks, 32] float32 to bytes [rows, blocks, 34]: a half scale, then signed bytes."""
    scale = (groups.abs().amax(-1, keepdim=True) / 127).half()
    values = (groups / _nonzero(scale)).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat([scale.view(torch.uint8), values.view(torch.uint8)], dim=-1)


def _q4_1(groups: torch.Tensor) -> torch.Tensor:
    """groups [rows, blocks, 32] float32 to bytes [rows, blocks, 20]: half scale and minimum, then two values a byte."""
    least, largest = groups.aminmax(dim=-1, keepdim=True)
    scale, minimum = ((largest - least) / 15).half(), least.half()
    values = ((groups - minimum.float()) / _nonzero(scale)).round_().clamp_(0, 15).to(torch.uint8)
    low, high = values.split(COLUMNS // 2, dim=-1)
    return torch.cat([scale.view(torch.uint8), minimum.view(torch.uint8), low | high << 4], dim=-1)


def _nonzero(scale: torch.Tensor) -> torch.Tensor:
    """The scale as it is stored, float32; 1 in place of 0, where every value is the same."""
    scale = scale.float()
    return torch.where(scale == 0, 1.0, scale)
