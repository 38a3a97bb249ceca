"""Layers with recurrent state as native calls: linear attention, row after row, and the convolution before it.

A head's state goes from the last multiple of 16 positions through the rows since then, one by one, each time by the
same operations. So a row has the same bits in a prompt, a chunk, a decode step and a block to verify.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.cpu.library import check, library

MOST_TAPS = 16  # kMostTaps of src/kernels.h


class _Span(ctypes.Structure):
    """`StateSpan` of src/step.h."""

    _fields_ = tuple(
        (name, ctypes.c_int32)
        for name in (
            "table_row",
            "first_row",
            "rows",
            "start",
            "is_certain",
            "first_store",
            "stores",
            "reserved",
        )
    )


class _Store(ctypes.Structure):
    """`StateStore` of src/step.h."""

    _fields_ = (("chunk", ctypes.c_int64), ("layer_stride", ctypes.c_int64), ("to", ctypes.c_void_p))


class _Recurrence(ctypes.Structure):
    """`RecurrenceCall` of src/step.h."""

    _fields_ = (
        ("spans", ctypes.c_int32),
        ("layer", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("key_heads", ctypes.c_int32),
        ("key_dim", ctypes.c_int32),
        ("value_dim", ctypes.c_int32),
        ("delta_rule", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("span", ctypes.c_void_p),
        ("store", ctypes.c_void_p),
        ("query", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("recurrent", ctypes.c_void_p),
        ("recent", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
    )


class _Convolution(ctypes.Structure):
    """`ConvolutionCall` of src/step.h."""

    _fields_ = (
        ("rows", ctypes.c_int32),
        ("taps", ctypes.c_int32),
        ("channels", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("tap_rows", ctypes.c_void_p),
        ("inputs", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class StateRows:
    """Rows [first_row, first_row + rows) of a pass: positions of one sequence from `start` on.

    table_row: the pool's row of its state. is_certain: none of them is a draft, so the pool takes those of them that no
    complete chunk holds. stores: for the state at the end of a chunk, the number of the chunk among those that the rows
    touch, and the tensor it goes to: [num_layers, key_heads, key_dim, heads / key_heads * value_dim] float32, a layer
    contiguous.
    """

    table_row: int
    first_row: int
    rows: int
    start: int
    is_certain: bool
    stores: Sequence[tuple[int, torch.Tensor]]


class Recurrence:
    """What all layers of a pass share."""

    def __init__(self, spans: Sequence[StateRows]) -> None:
        stores: list[_Store] = []
        described = []
        for span in spans:
            first = len(stores)
            for chunk, to in sorted(span.stores, key=lambda store: store[0]):
                stores.append(_Store(chunk=chunk, layer_stride=to.stride(0), to=to.data_ptr()))
            described.append(
                _Span(
                    table_row=span.table_row,
                    first_row=span.first_row,
                    rows=span.rows,
                    start=span.start,
                    is_certain=span.is_certain,
                    first_store=first,
                    stores=len(stores) - first,
                )
            )
        self._spans = (_Span * len(described))(*described)
        self._stores = (_Store * len(stores))(*stores)

    def run(
        self,
        layer: int,
        query: torch.Tensor,
        rows: torch.Tensor,
        recurrent: torch.Tensor,
        recent: torch.Tensor,
        value_dim: int,
        delta_rule: bool,
    ) -> torch.Tensor:
        """Linear attention of the T rows: [T, heads, value_dim] float32. It writes states, and recent rows.

        query: [T, key_heads, key_dim]. rows: [T, sum(row_parts)], contiguous. recurrent: [layers, pool rows, key_heads,
        key_dim, heads / key_heads * value_dim], recent: [layers, rows, 16, sum(row_parts)], those of the pool (see
        backends/state_pool.py). All float32.
        """
        key_heads, key_dim = query.shape[1:]
        heads = recurrent.shape[4] * key_heads // value_dim
        query = query.contiguous()
        out = torch.empty(len(query), heads, value_dim)
        call = _Recurrence(
            spans=len(self._spans),
            layer=layer,
            heads=heads,
            key_heads=key_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            delta_rule=delta_rule,
            span=ctypes.addressof(self._spans),
            store=ctypes.addressof(self._stores),
            query=query.data_ptr(),
            rows=rows.data_ptr(),
            recurrent=recurrent[layer].data_ptr(),
            recent=recent[layer].data_ptr(),
            out=out.data_ptr(),
        )
        check(library().tandem_recur(ctypes.addressof(call)))
        return out


def convolve(
    inputs: torch.Tensor, taps: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Depthwise: row r is the sum over t of inputs[taps[t, r]] * weight[t], plus bias: [T, channels] float32.

    inputs: [N, channels] float32; taps: [num_taps, T] int64, num_taps at most MOST_TAPS; weight: [num_taps, channels]
    float32; bias: [channels] float32. All contiguous.
    """
    num_taps, rows = taps.shape
    out = torch.empty(rows, inputs.shape[1])
    call = _Convolution(
        rows=rows,
        taps=num_taps,
        channels=inputs.shape[1],
        tap_rows=taps.data_ptr(),
        inputs=inputs.data_ptr(),
        weight=weight.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        out=out.data_ptr(),
    )
    check(library().tandem_convolve(ctypes.addressof(call)))
    return out
