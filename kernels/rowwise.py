"""Element-wise functions whose rows do not depend, to the bit, on how many there are or on the number of threads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import pad

# On a CPU torch computes what is left over behind whole vectors with another exp or tanh than the vectors, and may
# divide more elements than this among its threads wherever that falls. So rows are made whole vectors wide, and
# computed in parts that are not divided.
_LANES = 32
_UNDIVIDED = 16384


def rowwise(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """`function` of every element of x [T, n] float32."""
    if x.device.type != "cpu":
        return function(x)
    width = x.shape[-1]
    padded = -width % _LANES
    if padded:
        return rowwise(function, pad(x, (0, padded)))[:, :width]
    if x.numel() <= _UNDIVIDED:
        return function(x)
    return torch.cat([function(rows) for rows in x.split(max(1, _UNDIVIDED // width))])
