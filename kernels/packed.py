"""A weight matrix as it is held: its format, its bytes, and how to read it. There is one owner of each matrix.

The torch path and the native kernels read the same object; no second, dequantised copy stays resident.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

FLOAT_FORMATS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A [rows, columns] matrix, y = x @ W^T.

    format: a GGUF type name ("F32", "BF16", "Q4_1", …) for the file's own layout, or that name with the
        suffix of a kernel layout ("Q4_1/native") once a kernel has repacked it.
    data: [rows, columns] for float formats, else uint8 [rows, bytes per row] (a kernel layout may be flat).
    """

    format: str
    data: torch.Tensor
    rows: int
    columns: int


def pack_float(weight: torch.Tensor) -> PackedWeight:
    """A float matrix [rows, columns] as a PackedWeight, without a copy."""
    rows, columns = weight.shape
    return PackedWeight(FLOAT_FORMATS[weight.dtype], weight, rows, columns)
