"""Memory of a worker's pools."""

from __future__ import annotations

import math
import sys

import numpy as np
import torch

from kernels.cpu import library


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros of `shape`. On a CPU their pages are large, as decoding reads a whole context at every step, and take up
    memory only once they are written to: a server is ready sooner, and no larger than the contexts it has served."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    if size > sys.maxsize:
        raise MemoryError(f"{size} bytes")
    memory = np.zeros(size, np.uint8)  # from calloc: what torch makes it also fills
    if library.available():
        library.use_large_pages(memory.ctypes.data, memory.nbytes)
    return torch.from_numpy(memory).view(dtype).view(shape)
