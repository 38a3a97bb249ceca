"""A context pass: a drafter's keys and values of known tokens, for which it needs no queries, attention or MLP."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.cpu.linear import is_packed, slice_rows
from kernels.packed import PackedWeight
from models.layers import Linear
from models.weights import concat_rows


def key_value_rows(projections: Sequence[Linear], rows: int) -> Linear:
    """The products of k and v of some layers, one after the other, over the memory of the layers' own.

    projections: q, k and v of each layer. rows: of k, and of v.
    Packed matrices are joined, so that a context pass is one product, and the layers get slices of the whole.
    """
    biases = [projection.bias[-2 * rows :] for projection in projections if projection.bias is not None]
    bias = torch.cat(biases) if biases else None
    first = projections[0].weights[0]
    if not is_packed(first):  # q, k and v in one float matrix
        weights = [weight for projection in projections for weight in projection.weights]
        return Linear(
            tuple(PackedWeight(w.format, w.data[-2 * rows :], 2 * rows, w.columns) for w in weights), bias
        )
    parts = [weight for projection in projections for weight in projection.weights[1:]]
    if len({part.format for part in parts}) > 1 or rows % 16:
        return Linear(tuple(parts), bias)
    joined = concat_rows(parts)
    for index, projection in enumerate(projections):
        slices = (slice_rows(joined, (2 * index + part) * rows, rows) for part in range(2))
        projection.weights = (projection.weights[0], *slices)
    return Linear((joined,), bias)
