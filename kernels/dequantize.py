"""GGUF block formats: how many bytes a block of values takes, and how to read it as float32.

Every value of a format is computed in float32 in the order that the format's definition gives, so that the result
is the same, bit for bit, whichever rows are read and however many at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from kernels.packed import PackedWeight

_CHUNK_VALUES = (
    1 << 15
)  # values read at once: they stay in cache, and torch does not fan such small steps out


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at byte `start` of each block, as float32 [n, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [n, groups, width] to [n, groups, 8 // bits, width]: lowest bits first, each field by itself."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(-2) >> shifts.view(-1, 1)) & ((1 << bits) - 1)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [n, 16] to [n, 32]: all low halves, then all high halves."""
    return _unpack(packed.unsqueeze(1), 4).flatten(1)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [n, 4] to [n, 32]: bit i of the little-endian word, moved to where a fifth bit belongs."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & 1).flatten(1) << 4


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).float() - 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).float() + _half(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    quants = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _half(blocks, 0) * (quants.float() - 16)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    quants = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _half(blocks, 0) * quants.float() + _half(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].view(torch.int8).float() * _half(blocks, 0)


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    scales = blocks[:, :16]
    quants = _unpack(blocks[:, 16:80].reshape(-1, 2, 32), 2).reshape(-1, 16, 16).float()
    scale = _half(blocks, 80) * (scales & 15).float()
    offset = _half(blocks, 82) * (scales >> 4).float()
    return (scale.unsqueeze(-1) * quants - offset.unsqueeze(-1)).flatten(1)


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    # A set bit of the mask means "no offset": the third bit is stored inverted.
    offset = (_unpack(blocks[:, :32].reshape(-1, 1, 32), 1).reshape(-1, 16, 16) ^ 1).float() * 4
    quants = _unpack(blocks[:, 32:96].reshape(-1, 2, 32), 2).reshape(-1, 16, 16).float() - offset
    low = _unpack(blocks[:, 96:104].reshape(-1, 1, 8), 4).reshape(-1, 16)
    high = _unpack(blocks[:, 104:108].reshape(-1, 1, 4), 2).reshape(-1, 16)
    scale = _half(blocks, 108) * ((low | (high << 4)).float() - 32)
    return (scale.unsqueeze(-1) * quants).flatten(1)


def _scales_and_mins(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The 6-bit scales and minima, each float32 [n, 8], of the 12 bytes that Q4_K and Q5_K keep them in."""
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat([first & 63, (rest & 15) | ((first >> 2) & 48)], dim=1)
    mins = torch.cat([second & 63, (rest >> 4) | ((second >> 2) & 48)], dim=1)
    return scales.float(), mins.float()


def _scaled_k(blocks: torch.Tensor, quants: torch.Tensor) -> torch.Tensor:
    """Q4_K and Q5_K share everything but the width of `quants` (uint8 [n, 8, 32])."""
    scales, mins = _scales_and_mins(blocks[:, 4:16])
    scale = (_half(blocks, 0) * scales).unsqueeze(-1)
    offset = (_half(blocks, 2) * mins).unsqueeze(-1)
    return (scale * quants.float() - offset).flatten(1)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _scaled_k(blocks, _unpack(blocks[:, 16:].reshape(-1, 4, 32), 4).reshape(-1, 8, 32))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _unpack(blocks[:, 48:].reshape(-1, 4, 32), 4).reshape(-1, 8, 32)
    high = _unpack(blocks[:, 16:48].reshape(-1, 1, 32), 1).reshape(-1, 8, 32)
    return _scaled_k(blocks, low | (high << 4))


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _unpack(blocks[:, :128].reshape(-1, 2, 64), 4).reshape(-1, 8, 32)
    high = _unpack(blocks[:, 128:192].reshape(-1, 2, 32), 2).reshape(-1, 8, 32)
    quants = ((low | (high << 4)).float() - 32).reshape(-1, 16, 16)
    scale = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    return (scale.unsqueeze(-1) * quants).flatten(1)


class BlockFormat(NamedTuple):
    """`values` per block, `size` in bytes, and `read`: uint8 [n, size] to float32 [n, values]."""

    values: int
    size: int
    read: Callable[[torch.Tensor], torch.Tensor]


BLOCK_FORMATS: dict[str, BlockFormat] = {
    "Q4_0": BlockFormat(32, 18, _q4_0),
    "Q4_1": BlockFormat(32, 20, _q4_1),
    "Q5_0": BlockFormat(32, 22, _q5_0),
    "Q5_1": BlockFormat(32, 24, _q5_1),
    "Q8_0": BlockFormat(32, 34, _q8_0),
    "Q2_K": BlockFormat(256, 84, _q2_k),
    "Q3_K": BlockFormat(256, 110, _q3_k),
    "Q4_K": BlockFormat(256, 144, _q4_k),
    "Q5_K": BlockFormat(256, 176, _q5_k),
    "Q6_K": BlockFormat(256, 210, _q6_k),
}


def dequantize(weight: PackedWeight, rows: torch.Tensor | None = None) -> torch.Tensor:
    """float32 [rows, columns] of all rows of `weight`, or of `rows` (int64 [n], any order, repeats allowed).

    `weight` is in a file's own layout. ValueError if it is in a kernel's.
    """
    data = weight.data if rows is None else weight.data.index_select(0, rows)
    if data.is_floating_point():
        return data.float()
    block = BLOCK_FORMATS.get(weight.format)
    if block is None:
        raise ValueError(f"cannot read {weight.format}; readable: {', '.join(BLOCK_FORMATS)}, F32, F16, BF16")
    out = torch.empty(data.shape[0], weight.columns, dtype=torch.float32, device=data.device)
    step = max(1, _CHUNK_VALUES // weight.columns)
    for start in range(0, data.shape[0], step):
        chunk = data[start : start + step]
        out[start : start + step] = block.read(chunk.reshape(-1, block.size)).view(
            chunk.shape[0], weight.columns
        )
    return out
