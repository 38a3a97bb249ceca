"""Native linear attention and convolutions: those of float64, and bits that no company, cut or thread changes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.cpu import library
from kernels.cpu.state_layer import MOST_TAPS, Recurrence, StateRows, convolve
from kernels.linear_attention import CHUNK
from tests.kernels.test_linear_attention import Rows, make_rows, recurrence
from tests.native import needs_native

pytestmark = needs_native

LENGTH, ROWS, LAYERS, LAYER = 5 * CHUNK + 3, 3, 2, 1
# Heads, keys that they share, width of a key, of a value: one block of columns, parts of one, and several.
SHAPES = [(4, 2, 8, 12), (3, 3, 17, 16), (2, 1, 24, 64), (2, 2, 16, 150)]
Shape = tuple[int, int, int, int]


class States:
    """ROWS sequences that all read the same LENGTH tokens, each from its own state; pools begin with rubbish."""

    def __init__(self, shape: Shape, delta_rule: bool) -> None:
        heads, keys, key_dim, value_dim = shape
        self.value_dim, self.delta_rule = value_dim, delta_rule
        given_ = make_rows(LENGTH, shape, delta_rule)
        query = given_["query"]
        assert query is not None
        self.query = query
        parts = [given_[name] for name in ("key", "value", "log_decay", "beta")]
        self.rows = torch.cat([part.flatten(1) for part in parts if part is not None], 1)
        size = (LAYERS, ROWS + 4, keys, key_dim, heads // keys * value_dim)
        self.recurrent = torch.full(size, torch.nan)
        self.recent = torch.full((LAYERS, ROWS, CHUNK, self.rows.shape[1]), torch.nan)

    def run(
        self,
        parts: Sequence[tuple[int, int, int]],
        stores: Sequence[tuple[int, int]] = (),
        draft: bool = False,
    ) -> list[torch.Tensor]:
        """A pass over tokens [start, stop) of each (row, start, stop), what they read. Of the first one, chunk n's
        state goes to row `to` of the pool, too, for each (n, to) of `stores`. draft: the pass writes nothing else."""
        spans, first = [], 0
        for row, start, stop in parts:
            own = [(number, self.recurrent[:, to]) for number, to in (stores if not spans else ())]
            completed = (start % CHUNK + stop - start) // CHUNK
            if completed and not draft:
                own.append((completed - 1, self.recurrent[:, row]))
            spans.append(StateRows(row, first, stop - start, start, not draft, own))
            first += stop - start
        out = Recurrence(spans).run(
            LAYER,
            torch.cat([self.query[start:stop] for _, start, stop in parts]),
            torch.cat([self.rows[start:stop] for _, start, stop in parts]),
            self.recurrent,
            self.recent,
            self.value_dim,
            self.delta_rule,
        )
        return list(out.split([stop - start for _, start, stop in parts]))

    def state(self, row: int) -> torch.Tensor:
        """[heads, key_dim, value_dim]"""
        by_key = self.recurrent[LAYER, row].unflatten(-1, (-1, self.value_dim))
        return by_key.transpose(1, 2).flatten(0, 1)


@pytest.mark.parametrize("delta_rule", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_recurrence(isa: str, shape: Shape, delta_rule: bool) -> None:
    rows: Rows = make_rows(LENGTH, shape, delta_rule)
    expected, _ = recurrence(rows)
    whole = {name: None if x is None else x[: 5 * CHUNK] for name, x in rows.items()}
    states = States(shape, delta_rule)
    out = [states.run([(1, start, stop)])[0] for start, stop in ((0, 50), (50, 51), (51, LENGTH))]
    torch.testing.assert_close(torch.cat(out).double(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(states.state(1).double(), recurrence(whole)[1], atol=1e-5, rtol=0)
    assert torch.equal(states.recent[LAYER, 1, :3], states.rows[5 * CHUNK :])
    assert states.recurrent[0].isnan().all() and states.recent[0].isnan().all()


@pytest.mark.parametrize("delta_rule", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@settings(deadline=None, max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_cuts_company_and_threads_change_no_bit(
    isa: str, shape: Shape, delta_rule: bool, data: st.DataObject
) -> None:
    alone = States(shape, delta_rule)
    (expected,) = alone.run([(0, 0, LENGTH)])
    states, done, before = States(shape, delta_rule), [0] * ROWS, library.threads()
    try:
        while left := [row for row in range(ROWS) if done[row] < LENGTH]:
            library.set_threads(data.draw(st.integers(1, 4)))
            parts = []
            for row in data.draw(st.lists(st.sampled_from(left), min_size=1, unique=True)):
                stop = min(LENGTH, done[row] + data.draw(st.sampled_from([1, 3, CHUNK, CHUNK + 1, LENGTH])))
                parts.append((row, done[row], stop))
            if data.draw(st.booleans(), label="drafts first"):
                states.run(parts, draft=True)
            for (row, start, stop), out in zip(parts, states.run(parts), strict=True):
                assert torch.equal(out, expected[start:stop])
                done[row] = stop
    finally:
        library.set_threads(before)
    assert all(torch.equal(states.state(row), alone.state(0)) for row in range(ROWS))


def test_states_at_the_ends_of_chunks_go_where_they_are_wanted(isa: str) -> None:
    states = States(SHAPES[0], True)
    states.run([(2, 0, 20)])
    states.run([(2, 20, LENGTH), (0, 0, 5)], [(0, 4), (2, 5), (2, 6)])  # of chunks that 16 and 48 begin
    for row, length in ((4, 32), (5, 64), (6, 64)):
        alone = States(SHAPES[0], True)
        alone.run([(0, 0, length)])
        assert torch.equal(states.state(row), alone.state(0))
    assert states.state(3).isnan().all()


def test_drafts_leave_the_pool_as_it_was(isa: str) -> None:
    states = States(SHAPES[1], False)
    states.run([(0, 0, 20)])
    before = states.recurrent.clone(), states.recent.clone()
    states.run([(0, 20, LENGTH)], [(0, 5)], draft=True)
    states.recurrent[:, 5] = torch.nan
    for now, then in zip((states.recurrent, states.recent), before, strict=True):
        torch.testing.assert_close(now, then, atol=0, rtol=0, equal_nan=True)


def test_decay_to_nothing_is_no_nan(isa: str) -> None:
    states = States(SHAPES[0], True)
    states.rows[:, 2 * 8 + 4 * 12 :][:, :4] = -1e4
    assert states.run([(0, 0, LENGTH)])[0].isfinite().all()


def test_a_pass_without_sequences_gives_no_rows() -> None:
    states = States(SHAPES[0], True)
    out = Recurrence([]).run(0, states.query[:0], states.rows[:0], states.recurrent, states.recent, 12, True)
    assert out.shape == (0, 4, 12)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("num_taps", "channels", "rows"), [(4, 40, 9), (1, 16, 1), (3, 129, 300)])
def test_a_convolution_adds_up_its_taps(
    isa: str, num_taps: int, channels: int, rows: int, threads: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(rows + 20, channels, generator=generator)
    taps = torch.randint(rows + 20, (num_taps, rows), generator=generator)
    weight, bias = (torch.randn(n, channels, generator=generator) for n in (num_taps, 1))
    expected = (inputs.double()[taps] * weight.double().unsqueeze(1)).sum(0)
    before = library.threads()
    library.set_threads(threads)
    try:
        found, with_bias = convolve(inputs, taps, weight, None), convolve(inputs, taps, weight, bias[0])
    finally:
        library.set_threads(before)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(with_bias.double(), expected + bias.double(), atol=1e-5, rtol=1e-5)
    last = convolve(inputs, taps[:, -1:].contiguous(), weight, bias[0])
    assert torch.equal(last[0], with_bias[-1])


def test_more_taps_than_there_is_room_for_are_refused() -> None:
    taps = torch.zeros(MOST_TAPS + 1, 1, dtype=torch.int64)
    with pytest.raises(library.NativeError):
        convolve(torch.zeros(1, 16), taps, torch.zeros(MOST_TAPS + 1, 16), None)
