"""Layers with recurrent state: the state backend, and the wrapper that routes each layer to it or to attention.

A pass reads the state of each sequence from the pool, runs all layers over its rows, and leaves the state after them
there. Rows that are drafts may fall: the pool keeps the state before them, and the pass keeps what each row would add
to it, until `update_mamba_state_after_mtp_verify` is told how many stand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from backends.base import AttentionBackend, AttentionLayer, LatentAttentionLayer, StateLayer
from backends.forward import ForwardBatch, forward_context
from backends.state_pool import StatePool
from kernels.linear_attention import CHUNK, advance, chunks, read

_ROWS_AT_ONCE = 64  # of a convolution: what it works on stays in the cache


@dataclass(frozen=True, slots=True)
class _Span:
    """Rows [first_row, first_row + num_rows) of a pass, which are a sequence's positions from `start` on.

    `checkpoints`: how many of them come before a boundary, and the pool's row for the state there.
    """

    table_row: int
    first_row: int
    num_rows: int
    start: int
    checkpoints: tuple[tuple[int, int], ...]

    @property
    def cached(self) -> int:
        """Rows since the last multiple of CHUNK, which the pool has."""
        return self.start % CHUNK

    @property
    def num_chunks(self) -> int:
        return -(-(self.cached + self.num_rows) // CHUNK)

    def complete(self, rows: int) -> int:
        """How many chunks its first `rows` rows complete."""
        return (self.cached + rows) // CHUNK


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a pool, as a tensor, and as a slice where they lie side by side, which needs no copy."""

    rows: torch.Tensor
    run: slice | None

    @classmethod
    def of(cls, rows: Sequence[int], device: torch.device) -> _Rows:
        together = bool(rows) and list(rows) == list(range(rows[0], rows[0] + len(rows)))
        run = slice(rows[0], rows[0] + len(rows)) if together else None
        return cls(torch.tensor(rows, dtype=torch.int64, device=device), run)

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.index_select(0, self.rows) if self.run is None else tensor[self.run]


@dataclass(frozen=True, slots=True)
class _Writes:
    """What goes from a pass into the pool, once it is known how many rows of some sequences stand.

    conv_from: rows of the convolution's inputs that are the last of their sequence, or the last before a checkpoint;
        conv_rows: [s] where they go.
    recent_from: rows of the pass, recent_to: their places in `recent`, seen as [rows * CHUNK, …].
    states: by round, which of the states that it ends with are a sequence's last or a checkpoint, and where they go.
    """

    conv_from: torch.Tensor
    conv_rows: torch.Tensor
    recent_from: torch.Tensor
    recent_to: torch.Tensor
    states: Mapping[int, tuple[torch.Tensor, torch.Tensor]]


@dataclass(slots=True)
class _Drafted:
    """What a pass keeps of each layer for rows that may not stand, by layer."""

    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    rows: dict[int, torch.Tensor] = field(default_factory=dict)
    states: dict[int, list[torch.Tensor]] = field(default_factory=dict)


@dataclass(slots=True)
class _Plan:
    """Index tensors of a pass, the same for all layers.

    Sequences are ordered so that those with most chunks come first, then those whose last chunk is complete. So the
    chunks with number r, a round, are a run of chunks; they belong to a run of sequences from the first on, of which a
    shorter run have it complete.
    """

    spans: list[_Span]
    order: list[int]
    conv_taps: int
    taps: torch.Tensor  # [conv_taps, T] of the inputs
    table_rows: torch.Tensor
    without_inputs: torch.Tensor | None  # which of table_rows have seen nothing yet
    ordered_rows: _Rows
    without_state: torch.Tensor | None  # which of ordered_rows have no complete chunk yet
    cells: torch.Tensor
    query_cells: torch.Tensor
    out_cells: torch.Tensor
    rounds: list[tuple[int, int, int]]  # first chunk, sequences, of which complete
    writes: _Writes
    drafted: _Drafted | None


class LinearAttentionBackend:
    """Keeps the state of short convolutions and of linear attention, in plain torch. It holds nothing itself."""

    def plan(self, batch: ForwardBatch) -> object:
        """Work out, once for all layers of a pass, what they read and write.

        Raises RuntimeError where the state of a sequence is not that of the position at which it goes on.
        """
        pool = _pool(batch)
        return _plan(batch, pool)

    def convolve(self, x: torch.Tensor, layer: StateLayer, batch: ForwardBatch, plan: object) -> torch.Tensor:
        """Causal depthwise convolution of x [T, channels] over each sequence: [T, channels] float32."""
        assert isinstance(plan, _Plan)
        pool = _pool(batch)
        before = pool.conv[layer.state_id].index_select(0, plan.table_rows)
        if plan.without_inputs is not None:
            before.index_fill_(0, plan.without_inputs, 0)
        inputs = torch.cat((before.flatten(0, 1), x.to(before.dtype)))
        parts = [_convolve(inputs, taps, layer.conv_weight) for taps in plan.taps.split(_ROWS_AT_ONCE, 1)]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        _write_conv(pool, layer.state_id, inputs, plan.writes)
        if plan.drafted is not None:
            plan.drafted.inputs[layer.state_id] = inputs
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
        assert isinstance(plan, _Plan)
        if not len(value):
            return value
        pool, layer_id = _pool(batch), layer.state_id
        layout = pool.layout
        gates = (log_decay,) if beta is None else (log_decay, beta)
        rows = torch.cat((key.flatten(1), value.flatten(1), *gates), 1)
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
        outs, states = [], []
        for number, (first, sequences, complete) in enumerate(plan.rounds):
            part = prepared.part(first, first + sequences)
            out, update = read(part, state[:sequences])
            outs.append(out)
            if complete:
                state = advance(part.part(0, complete), update[:complete], state[:complete])
                _write_state(pool, layer_id, number, state, plan.writes)
                if plan.drafted is not None:
                    states.append(state)
        _write_recent(pool, layer_id, rows, plan.writes)
        if plan.drafted is not None:
            plan.drafted.rows[layer_id], plan.drafted.states[layer_id] = rows, states
        return torch.cat(outs).transpose(1, 2).flatten(0, 1).index_select(0, plan.out_cells)

    @staticmethod
    def update_mamba_state_after_mtp_verify(pool: StatePool, kept: Mapping[int, int]) -> None:
        """Commit the state after a verify, for all sequences at once: `kept[table_row]` of a block's rows stand, the
        last token's row included. What the rows behind those computed is dropped."""
        passes: dict[int, _Plan] = {}
        for table_row in kept:
            plan = pool.pending.pop(table_row)
            assert isinstance(plan, _Plan)
            passes[id(plan)] = plan
        for plan in passes.values():  # one, or one for each half of the batch
            stand = {
                index: kept[span.table_row] for index, span in enumerate(plan.spans) if span.table_row in kept
            }
            _commit(pool, plan, stand)


class HybridLinearBackend(AttentionBackend):
    """Routes attention layers to `attention`, which may be a hybrid of two, and layers with state to `linear`."""

    name = "hybrid_linear"

    def __init__(self, attention: AttentionBackend) -> None:
        self.attention = attention
        self.linear = LinearAttentionBackend()

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


def _commit(pool: StatePool, plan: _Plan, stand: Mapping[int, int]) -> None:
    """Write what the first `stand[i]` rows of span i computed."""
    drafted = plan.drafted
    assert drafted is not None
    writes = _writes(plan.spans, plan.order, plan.conv_taps, stand, pool.conv.device)
    for layer_id, inputs in drafted.inputs.items():
        _write_conv(pool, layer_id, inputs, writes)
    for layer_id, rows in drafted.rows.items():
        _write_recent(pool, layer_id, rows, writes)
        for number, state in enumerate(drafted.states[layer_id]):
            _write_state(pool, layer_id, number, state, writes)
    for index, length in stand.items():
        span = plan.spans[index]
        pool.lengths[span.table_row] = span.start + length


def _pool(batch: ForwardBatch) -> StatePool:
    assert batch.state_pool is not None, "a model with recurrent state runs over a state pool"
    return batch.state_pool


def _plan(batch: ForwardBatch, pool: StatePool) -> _Plan:
    device, before = pool.conv.device, pool.layout.conv_taps - 1
    firsts = accumulate(batch.query_lens, initial=0)
    kept = batch.state_checkpoints or ({},) * len(batch.query_lens)
    spans = [
        _Span(
            row,
            first,
            rows,
            context - rows,
            tuple((at - context + rows, to) for at, to in of.items() if context - rows < at <= context),
        )
        for row, first, rows, context, of in zip(
            batch.table_rows, firsts, batch.query_lens, batch.context_lens, kept, strict=False
        )
    ]
    drafts = batch.num_draft_rows or (0,) * len(spans)
    for span in spans:
        pool.pending.pop(span.table_row, None)
        if span.start not in (0, pool.lengths[span.table_row]):
            raise RuntimeError(
                f"the state of row {span.table_row} is that of position {pool.lengths[span.table_row]}, "
                f"but its sequence goes on at {span.start}"
            )
    order = sorted(
        range(len(spans)), key=lambda i: (-spans[i].num_chunks, -spans[i].complete(spans[i].num_rows))
    )

    def indices(values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    def before_position(position: int, of: Sequence[_Span]) -> torch.Tensor | None:
        found = [i for i, span in enumerate(of) if span.start < position]
        return indices(found) if found else None

    ordered = [spans[i] for i in order]
    certain = {i: span.num_rows for i, span in enumerate(spans) if not drafts[i]}
    inputs = [_inputs(spans, i, before) for i in range(len(spans))]
    cells, query_cells, out_cells = _cells(spans, order)
    plan = _Plan(
        spans=spans,
        order=order,
        conv_taps=before + 1,
        taps=indices(
            [
                [row for span, own in zip(spans, inputs, strict=True) for row in own[tap:][: span.num_rows]]
                for tap in range(before + 1)
            ]
        ),
        table_rows=indices([span.table_row for span in spans]),
        without_inputs=before_position(1, spans),
        ordered_rows=_Rows.of([span.table_row for span in ordered], device),
        without_state=before_position(CHUNK, ordered),
        cells=indices(cells),
        query_cells=indices(query_cells),
        out_cells=indices(out_cells),
        rounds=_rounds(ordered),
        writes=_writes(spans, order, before + 1, certain, device),
        drafted=_Drafted() if len(certain) < len(spans) else None,
    )
    for i, span in enumerate(spans):
        if i in certain:
            pool.lengths[span.table_row] = span.start + span.num_rows
        else:
            pool.pending[span.table_row] = plan
    return plan


def _inputs(spans: Sequence[_Span], index: int, before: int) -> list[int]:
    """Where the inputs of a sequence's convolution lie: the `before` that the pool has, then its rows."""
    span = spans[index]
    first = len(spans) * before + span.first_row
    return [*range(index * before, (index + 1) * before), *range(first, first + span.num_rows)]


def _cells(spans: Sequence[_Span], order: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """For every row of every chunk, round by round: where it lies among recent rows, rows of the pass and a row of
    zeros; where its query lies; and for every row of the pass, where it is found among those of the chunks."""
    total = sum(span.num_rows for span in spans)
    first, zero = len(spans) * CHUNK, len(spans) * CHUNK + total
    cells: list[int] = []
    queries: list[int] = []
    outs = [0] * total
    for number in range(max((span.num_chunks for span in spans), default=0)):
        for place, index in enumerate(order):
            span = spans[index]
            if span.num_chunks <= number:
                break
            begin = (
                number * CHUNK - span.cached
            )  # the chunk's first row among those of the sequence in this pass
            cached = min(max(-begin, 0), CHUNK)
            rows = range(span.first_row + max(begin, 0), span.first_row + min(begin + CHUNK, span.num_rows))
            empty = CHUNK - cached - len(rows)
            for offset, row in enumerate(rows, len(cells) + cached):
                outs[row] = offset
            cells += range(place * CHUNK, place * CHUNK + cached)
            cells += (first + row for row in rows)
            cells += [zero] * empty
            queries += [total] * cached
            queries += rows
            queries += [total] * empty
    return cells, queries, outs


def _rounds(ordered: Sequence[_Span]) -> list[tuple[int, int, int]]:
    rounds = []
    first = 0
    for number in range(ordered[0].num_chunks if ordered else 0):
        sequences = sum(span.num_chunks > number for span in ordered)
        rounds.append((first, sequences, sum(span.complete(span.num_rows) > number for span in ordered)))
        first += sequences
    return rounds


def _writes(
    spans: Sequence[_Span],
    order: Sequence[int],
    conv_taps: int,
    kept: Mapping[int, int],
    device: torch.device,
) -> _Writes:
    """What to write once the first `kept[i]` rows of span i stand, for those in `kept`."""
    before = conv_taps - 1
    conv: list[int] = []
    conv_rows: list[int] = []
    sources: list[int] = []
    places: list[int] = []
    states: dict[int, tuple[list[int], list[int]]] = {}
    place_of = {index: place for place, index in enumerate(order)}
    for index, rows in kept.items():
        span = spans[index]
        inputs = _inputs(spans, index, before)
        passed = (each for each in span.checkpoints if each[0] <= rows)
        for end, to in ((rows, span.table_row), *passed):
            conv += inputs[end : end + before]
            conv_rows.append(to)
            completed = span.complete(end)
            if completed:
                ends, pool_rows = states.setdefault(completed - 1, ([], []))
                ends.append(place_of[index])
                pool_rows.append(to)
        completed = span.complete(rows)
        start = max(0, completed * CHUNK - span.cached)
        sources += range(span.first_row + start, span.first_row + rows)
        offset = span.table_row * CHUNK + (span.start + start) % CHUNK
        places += range(offset, offset + rows - start)

    def indices(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return _Writes(
        indices(conv),
        indices(conv_rows),
        indices(sources),
        indices(places),
        {number: (indices(ends), indices(rows)) for number, (ends, rows) in states.items()},
    )


def _write_conv(pool: StatePool, layer_id: int, inputs: torch.Tensor, writes: _Writes) -> None:
    if len(writes.conv_rows):
        last = inputs.index_select(0, writes.conv_from).unflatten(0, (len(writes.conv_rows), -1))
        pool.conv[layer_id].index_copy_(0, writes.conv_rows, last)


def _write_recent(pool: StatePool, layer_id: int, rows: torch.Tensor, writes: _Writes) -> None:
    if len(writes.recent_from):
        recent = pool.recent[layer_id].flatten(0, 1)
        recent.index_copy_(0, writes.recent_to, rows.index_select(0, writes.recent_from))


def _write_state(pool: StatePool, layer_id: int, number: int, state: torch.Tensor, writes: _Writes) -> None:
    """`state` is that of the sequences which have chunk `number` complete."""
    if number in writes.states:
        ends, rows = writes.states[number]
        pool.recurrent[layer_id].index_copy_(0, rows, state.index_select(0, ends))
