"""The tensors that hold the recurrent state of running requests, indexed by a request's row of the slot table."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from backends.pool_memory import zeros
from kernels.linear_attention import CHUNK


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Shape of one request's state in each layer that has one.

    A layer convolves `conv_channels` channels over `conv_taps` positions; it keeps the inputs that a next position
    needs, in `dtype`. If `num_heads` is not 0, it has a state [key_dim, value_dim] for each of them, of which
    num_heads / num_key_heads share a key; `delta_rule` as in `kernels/linear_attention.py`.
    """

    num_layers: int
    conv_channels: int
    conv_taps: int
    dtype: torch.dtype
    num_heads: int = 0
    num_key_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    delta_rule: bool = False

    @property
    def row_parts(self) -> tuple[int, ...]:
        """Widths of what is kept of a row until its chunk is complete: key, value, log decay and, if any, beta."""
        gates = (self.num_heads,) * (2 if self.delta_rule else 1)
        return self.num_key_heads * self.key_dim, self.num_heads * self.value_dim, *gates

    @property
    def bytes_per_checkpoint(self) -> int:
        conv = self.conv_channels * (self.conv_taps - 1) * self.dtype.itemsize
        recurrent = self.num_heads * self.key_dim * self.value_dim * torch.float32.itemsize
        return self.num_layers * (conv + recurrent)

    @property
    def bytes_per_request(self) -> int:
        recent = self.num_layers * CHUNK * sum(self.row_parts) * torch.float32.itemsize
        return self.bytes_per_checkpoint + recent


class StatePool:
    """State of one worker's requests, [num_layers, num_rows, …] each, and checkpoints of it in the rows behind those.

    A checkpoint is of a multiple of CHUNK positions, so it has no recent rows.

    conv: [conv_taps - 1, conv_channels], the last inputs of the convolution.
    recurrent: [num_key_heads, key_dim, num_heads / num_key_heads * value_dim] float32, the state at the last multiple
        of CHUNK positions.
    recent: [CHUNK, sum(row_parts)] float32, the rows since then. Not of checkpoints.
    lengths: how many positions of its request each row is the state of.
    pending: by row, what a pass has computed for rows that may not stand; `backends/linear_attention.py` reads it.
    """

    def __init__(
        self, layout: StateLayout, num_rows: int, device: torch.device, num_checkpoints: int = 0
    ) -> None:
        self.layout = layout
        self.checkpoint_rows = range(num_rows, num_rows + num_checkpoints)
        layers, keys, rows = layout.num_layers, layout.num_key_heads, num_rows + num_checkpoints
        conv = (layers, rows, layout.conv_taps - 1, layout.conv_channels)
        self.conv = zeros(conv, layout.dtype, device)
        width = layout.num_heads // keys * layout.value_dim if keys else 0
        self.recurrent = zeros((layers, rows, keys, layout.key_dim, width), torch.float32, device)
        self.recent = zeros((layers, num_rows, CHUNK, sum(layout.row_parts)), torch.float32, device)
        self.lengths = [0] * num_rows
        self.pending: dict[int, object] = {}

    def resume(self, row: int, checkpoint_row: int, length: int) -> None:
        """Let the state of `row` be the checkpoint, which is that of `length` positions."""
        for tensor in (self.conv, self.recurrent):
            tensor[:, row] = tensor[:, checkpoint_row]
        self.lengths[row] = length
