"""What a pass over layers with recurrent state reads and writes, worked out once for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from backends.forward import ForwardBatch
from backends.state_pool import StatePool
from kernels.cpu.state_layer import Recurrence, StateRows
from kernels.linear_attention import CHUNK


@dataclass(frozen=True, slots=True)
class Span:
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
class Rows:
    """Rows of a pool, as a tensor, and as a slice where they lie side by side, which needs no copy."""

    rows: torch.Tensor
    run: slice | None

    @classmethod
    def of(cls, rows: Sequence[int], device: torch.device) -> Rows:
        together = bool(rows) and list(rows) == list(range(rows[0], rows[0] + len(rows)))
        run = slice(rows[0], rows[0] + len(rows)) if together else None
        return cls(torch.tensor(rows, dtype=torch.int64, device=device), run)

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.index_select(0, self.rows) if self.run is None else tensor[self.run]


@dataclass(frozen=True, slots=True)
class Writes:
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
class Drafted:
    """What a pass keeps of all layers for rows that may not stand, [num_layers, …] each.

    inputs: [rows, conv_channels], of the convolution. rows: [T, sum(row_parts)].
    states: those that each round ends with.
    """

    inputs: torch.Tensor
    rows: torch.Tensor
    states: list[torch.Tensor]

    @classmethod
    def empty(cls, pool: StatePool, num_sequences: int, num_rows: int, completed: Sequence[int]) -> Drafted:
        """For a pass whose rounds complete so many chunks."""
        layers, _, before, channels = pool.conv.shape
        return cls(
            pool.conv.new_empty(layers, num_sequences * before + num_rows, channels),
            pool.recent.new_empty(layers, num_rows, pool.recent.shape[3]),
            [pool.recurrent.new_empty(layers, chunks, *pool.recurrent.shape[2:]) for chunks in completed],
        )


@dataclass(slots=True)
class Plan:
    """Index tensors of a pass, the same for all layers.

    Sequences are ordered so that those with most chunks come first, then those whose last chunk is complete. So the
    chunks with number r, a round, are a run of chunks; they belong to a run of sequences from the first on, of which a
    shorter run have it complete.
    """

    spans: list[Span]
    order: list[int]
    conv_taps: int
    taps: torch.Tensor  # [conv_taps, T] of the inputs
    table_rows: torch.Tensor
    without_inputs: torch.Tensor | None  # which of table_rows have seen nothing yet
    ordered_rows: Rows
    without_state: torch.Tensor | None  # which of ordered_rows have no complete chunk yet
    cells: torch.Tensor
    query_cells: torch.Tensor
    out_cells: torch.Tensor
    rounds: list[tuple[int, int, int]]  # first chunk, sequences, of which complete
    writes: Writes
    drafted: Drafted | None
    native: Recurrence | None


def make_plan(batch: ForwardBatch, pool: StatePool, native: bool) -> Plan:
    """What the pass reads and writes; the pool then counts its certain rows as done. native: for the native kernels.

    Raises RuntimeError where the state of a sequence is not that of the position at which it goes on.
    """
    device, before = pool.conv.device, pool.layout.conv_taps - 1
    firsts = accumulate(batch.query_lens, initial=0)
    kept = batch.state_checkpoints or ({},) * len(batch.query_lens)
    spans = [
        Span(
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

    def before_position(position: int, of: Sequence[Span]) -> torch.Tensor | None:
        found = [i for i, span in enumerate(of) if span.start < position]
        return indices(found) if found else None

    ordered = [spans[i] for i in order]
    certain = {i: span.num_rows for i, span in enumerate(spans) if not drafts[i]}
    inputs = [_inputs(spans, i, before) for i in range(len(spans))]
    cells, query_cells, out_cells = _cells(spans, order)
    rounds = _rounds(ordered)
    drafted = None
    if len(certain) < len(spans):
        completed = [complete for *_, complete in rounds]
        drafted = Drafted.empty(pool, len(spans), sum(batch.query_lens), completed)
    plan = Plan(
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
        ordered_rows=Rows.of([span.table_row for span in ordered], device),
        without_state=before_position(CHUNK, ordered),
        cells=indices(cells),
        query_cells=indices(query_cells),
        out_cells=indices(out_cells),
        rounds=rounds,
        writes=make_writes(spans, order, before + 1, certain, device),
        drafted=drafted,
        native=_native(spans, order, certain, pool, drafted) if native else None,
    )
    for i, span in enumerate(spans):
        if i in certain:
            pool.lengths[span.table_row] = span.start + span.num_rows
        else:
            pool.pending[span.table_row] = plan
    return plan


def _inputs(spans: Sequence[Span], index: int, before: int) -> list[int]:
    """Where the inputs of a sequence's convolution lie: the `before` that the pool has, then its rows."""
    span = spans[index]
    first = len(spans) * before + span.first_row
    return [*range(index * before, (index + 1) * before), *range(first, first + span.num_rows)]


def _cells(spans: Sequence[Span], order: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
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


def _rounds(ordered: Sequence[Span]) -> list[tuple[int, int, int]]:
    rounds = []
    first = 0
    for number in range(ordered[0].num_chunks if ordered else 0):
        sequences = sum(span.num_chunks > number for span in ordered)
        rounds.append((first, sequences, sum(span.complete(span.num_rows) > number for span in ordered)))
        first += sequences
    return rounds


def _native(
    spans: Sequence[Span],
    order: Sequence[int],
    certain: Mapping[int, int],
    pool: StatePool,
    drafted: Drafted | None,
) -> Recurrence:
    """The same for the native kernels: states that are certain go to the pool, others to what is kept of the pass."""
    place_of = {index: place for place, index in enumerate(order)}
    described = []
    for index, span in enumerate(spans):
        stores = []
        if index in certain:
            for end, to in ((span.num_rows, span.table_row), *span.checkpoints):
                if completed := span.complete(end):
                    stores.append((completed - 1, pool.recurrent[:, to]))
        else:
            assert drafted is not None
            place = place_of[index]
            stores = [(n, drafted.states[n][:, place]) for n in range(span.complete(span.num_rows))]
        described.append(
            StateRows(span.table_row, span.first_row, span.num_rows, span.start, index in certain, stores)
        )
    return Recurrence(described)


def make_writes(
    spans: Sequence[Span],
    order: Sequence[int],
    conv_taps: int,
    kept: Mapping[int, int],
    device: torch.device,
) -> Writes:
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

    return Writes(
        indices(conv),
        indices(conv_rows),
        indices(sources),
        indices(places),
        {number: (indices(ends), indices(rows)) for number, (ends, rows) in states.items()},
    )
