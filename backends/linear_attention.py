"""Layers with recurrent state: the state backend, and the wrapper that routes each layer to it or to attention.

A pass reads the state of each sequence from the pool, runs all layers over its rows, and leaves the state after them
there. Rows that are drafts may fall: the pool keeps the state before them, and the pass keeps what each row would add
to it, until `update_mamba_state_after_mtp_verify` is told how many stand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from backends.base import AttentionBackend, AttentionLayer, LatentAttentionLayer, StateLayer
from backends.forward import ForwardBatch, forward_context
from backends.state_plan import Plan, Writes, make_plan, make_writes
from backends.state_pool import StatePool
from kernels.cpu import library
from kernels.cpu.state_layer import MOST_TAPS
from kernels.cpu.state_layer import convolve as native_convolve
from kernels.linear_attention import CHUNK, advance, chunks, read

_ROWS_AT_ONCE = 64  # of a convolution: what it works on stays in the cache


class LinearAttentionBackend:
    """Keeps the state of short convolutions and of linear attention, by native kernels on a CPU, else in plain torch.

    It holds no state itself.
    """

    def __init__(self, native: bool = True) -> None:
        """native: take the native kernels where there are some."""
        self._native = native and library.available()

    def plan(self, batch: ForwardBatch) -> object:
        """Work out, once for all layers of a pass, what they read and write.

        Raises RuntimeError where the state of a sequence is not that of the position at which it goes on.
        """
        pool = _pool(batch)
        return make_plan(batch, pool, self._native and pool.conv.device.type == "cpu")

    def convolve(self, x: torch.Tensor, layer: StateLayer, batch: ForwardBatch, plan: object) -> torch.Tensor:
        """Causal depthwise convolution of x [T, channels] over each sequence: [T, channels] float32."""
        assert isinstance(plan, Plan)
        pool = _pool(batch)
        before = pool.conv[layer.state_id].index_select(0, plan.table_rows)
        if plan.without_inputs is not None:
            before.index_fill_(0, plan.without_inputs, 0)
        kept = None if plan.drafted is None else plan.drafted.inputs[layer.state_id]
        inputs = torch.cat((before.flatten(0, 1), x.to(before.dtype)), out=kept)
        _write_conv(pool, _one(layer.state_id), inputs.unsqueeze(0), plan.writes)
        if plan.native is not None and len(plan.taps) <= MOST_TAPS:
            return native_convolve(inputs.float(), plan.taps, layer.conv_weight, layer.conv_bias)
        parts = [_convolve(inputs, taps, layer.conv_weight) for taps in plan.taps.split(_ROWS_AT_ONCE, 1)]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out if layer.conv_bias is None else out.add_(layer.conv_bias)

    def recur(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor | None,
        layer: StateLayer,
        batch: ForwardBatch,
        plan: object,
    ) -> torch.Tensor:
        """Linear attention of every row to its sequence so far, as `kernels/linear_attention.py` has it.

        query, key: [T, J, K]; value: [T, H, V]; log_decay, beta: [T, H]; all float32. Returns [T, H, V] float32.
        """
        assert isinstance(plan, Plan)
        if not len(value):
            return value
        pool, layer_id, drafted = _pool(batch), layer.state_id, plan.drafted
        layout = pool.layout
        gates = (log_decay,) if beta is None else (log_decay, beta)
        kept = None if drafted is None else drafted.rows[layer_id]
        rows = torch.cat((key.flatten(1), value.flatten(1), *gates), 1, out=kept)
        if plan.native is not None:
            return plan.native.run(
                layer_id, query, rows, pool.recurrent, pool.recent, value.shape[2], beta is not None
            )
        recent = plan.ordered_rows.take(pool.recent[layer_id]).flatten(0, 1)
        known = torch.cat((recent, rows, rows.new_zeros(1, rows.shape[1])))
        parts = known.index_select(0, plan.cells).view(-1, CHUNK, rows.shape[1]).split(layout.row_parts, 2)
        queries = torch.cat((query, query.new_zeros(1, *query.shape[1:]))).index_select(0, plan.query_cells)
        prepared = chunks(
            queries.unflatten(0, (-1, CHUNK)),
            parts[0].unflatten(2, key.shape[1:]),
            parts[1].unflatten(2, value.shape[1:]),
            *parts[2:],
        )
        state = plan.ordered_rows.take(pool.recurrent[layer_id])
        if plan.without_state is not None:
            state = state.index_fill(0, plan.without_state, 0)
        outs = []
        for number, (first, sequences, complete) in enumerate(plan.rounds):
            part = prepared.part(first, first + sequences)
            out, update = read(part, state[:sequences])
            outs.append(out)
            if complete:
                kept = None if drafted is None else drafted.states[number][layer_id]
                state = advance(part.part(0, complete), update[:complete], state[:complete], kept)
                _write_state(pool, _one(layer_id), number, state.unsqueeze(0), plan.writes)
        _write_recent(pool, _one(layer_id), rows.unsqueeze(0), plan.writes)
        return torch.cat(outs).transpose(1, 2).flatten(0, 1).index_select(0, plan.out_cells)

    @staticmethod
    def update_mamba_state_after_mtp_verify(pool: StatePool, kept: Mapping[int, int]) -> None:
        """Commit the state after a verify, for all sequences at once: `kept[table_row]` of a block's rows stand, the
        last token's row included. What the rows behind those computed is dropped."""
        passes: dict[int, Plan] = {}
        for table_row in kept:
            plan = pool.pending.pop(table_row)
            assert isinstance(plan, Plan)
            passes[id(plan)] = plan
        for plan in passes.values():  # one, or one for each half of the batch
            stand = {
                index: kept[span.table_row] for index, span in enumerate(plan.spans) if span.table_row in kept
            }
            _commit(pool, plan, stand)


class HybridLinearBackend(AttentionBackend):
    """Routes attention layers to `attention`, which may be a hybrid of two, and layers with state to `linear`."""

    name = "hybrid_linear"

    def __init__(self, attention: AttentionBackend, native: bool = True) -> None:
        """native: take the native kernels for layers with state where there are some."""
        self.attention = attention
        self.linear = LinearAttentionBackend(native)

    def children(self) -> Iterator[AttentionBackend]:
        yield self.attention

    def mamba_commit(self) -> Callable[[StatePool, Mapping[int, int]], None]:
        return self.linear.update_mamba_state_after_mtp_verify

    def plan(self, batch: ForwardBatch) -> tuple[object, object]:
        return self.attention.plan(batch), self.linear.plan(batch)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        plan: object,
    ) -> torch.Tensor:
        with forward_context(batch, self.attention, _half(plan, 0)) as context:
            return self.attention.forward(query, key, value, layer, batch, context.plan)

    def forward_mha(
        self,
        query: torch.Tensor,
        entry: torch.Tensor,
        layer: LatentAttentionLayer,
        batch: ForwardBatch,
        plan: object,
    ) -> torch.Tensor:
        with forward_context(batch, self.attention, _half(plan, 0)) as context:
            return self.attention.forward_mha(query, entry, layer, batch, context.plan)

    def convolve(self, x: torch.Tensor, layer: StateLayer, batch: ForwardBatch, plan: object) -> torch.Tensor:
        return self.linear.convolve(x, layer, batch, _half(plan, 1))

    def recur(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor | None,
        layer: StateLayer,
        batch: ForwardBatch,
        plan: object,
    ) -> torch.Tensor:
        return self.linear.recur(query, key, value, log_decay, beta, layer, batch, _half(plan, 1))


def _convolve(inputs: torch.Tensor, taps: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Tap by tap: sums of products in one order, whatever the number of rows."""
    out = inputs.index_select(0, taps[0]).float().mul_(weight[0])
    for tap, of_tap in zip(taps[1:], weight[1:], strict=True):
        out += inputs.index_select(0, tap).float().mul_(of_tap)
    return out


def _half(plan: object, index: int) -> object:
    assert isinstance(plan, tuple)
    return plan[index]


def _commit(pool: StatePool, plan: Plan, stand: Mapping[int, int]) -> None:
    """Write what the first `stand[i]` rows of span i computed, in all layers at once."""
    drafted = plan.drafted
    assert drafted is not None
    writes = make_writes(plan.spans, plan.order, plan.conv_taps, stand, pool.conv.device)
    every = slice(None)
    _write_conv(pool, every, drafted.inputs, writes)
    _write_recent(pool, every, drafted.rows, writes)
    for number in writes.states:
        _write_state(pool, every, number, drafted.states[number], writes)
    for index, length in stand.items():
        span = plan.spans[index]
        pool.lengths[span.table_row] = span.start + length


def _pool(batch: ForwardBatch) -> StatePool:
    assert batch.state_pool is not None, "a model with recurrent state runs over a state pool"
    return batch.state_pool


def _one(layer_id: int) -> slice:
    return slice(layer_id, layer_id + 1)


def _write_conv(pool: StatePool, layers: slice, inputs: torch.Tensor, writes: Writes) -> None:
    """As the others do, of some layers: `inputs` is [layers, …]."""
    if len(writes.conv_rows):
        last = inputs.index_select(1, writes.conv_from).unflatten(1, (len(writes.conv_rows), -1))
        pool.conv[layers].index_copy_(1, writes.conv_rows, last)


def _write_recent(pool: StatePool, layers: slice, rows: torch.Tensor, writes: Writes) -> None:
    if len(writes.recent_from):
        recent = pool.recent[layers].flatten(1, 2)
        recent.index_copy_(1, writes.recent_to, rows.index_select(1, writes.recent_from))


def _write_state(pool: StatePool, layers: slice, number: int, state: torch.Tensor, writes: Writes) -> None:
    """`state` is that of the sequences which have chunk `number` complete."""
    if number in writes.states:
        ends, rows = writes.states[number]
        pool.recurrent[layers].index_copy_(1, rows, state.index_select(1, ends))
