"""Hybrid, two-batch and PD-mux backends give what the plain one gives, each part of a pass by the right child."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import AttentionBackend
from backends.forward import ForwardBatch, ForwardMode
from backends.hybrid import HybridBackend
from backends.options import AttentionOptions
from backends.parts import Piece, cut, phases
from backends.setup import AttentionBackends, build_attention_backends
from backends.torch_native import TorchNativeBackend
from backends.two_batch import TwoBatchBackend
from tests.backends.fakes import CPU, NamedBackend, registry
from tests.backends.streams import Layer, Streams

VARIANTS = {
    "hybrid": AttentionOptions(prefill_attention_backend="one", decode_attention_backend="two"),
    "two-batch": AttentionOptions(enable_two_batch_overlap=True),
    "two-batch hybrid": AttentionOptions(enable_two_batch_overlap=True, decode_attention_backend="two"),
    "pd-mux": AttentionOptions(enable_pdmux=True, sm_group_num=2),
}
EXTEND, DECODE, VERIFY = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.TARGET_VERIFY


def build(options: AttentionOptions, streams: Streams) -> AttentionBackends:
    return build_attention_backends(
        options=options, role="target", device=CPU, layout=streams.pool.layout, specs=registry()
    )


@st.composite
def sequences(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """(cached before the pass, prompt rows in it, further rows in it) of one to five sequences."""
    rows = st.tuples(st.integers(0, 40), st.integers(0, 20), st.integers(0, 9))
    return draw(st.lists(rows.filter(lambda r: r[1] + r[2] > 0), min_size=1, max_size=5))


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=10, deadline=None)
@given(parts=sequences())
def test_equals_plain_bit_for_bit(variant: str, parts: list[tuple[int, int, int]]) -> None:
    outputs = []
    for options in (AttentionOptions(), VARIANTS[variant]):
        streams = Streams(Layer(sliding_window=30), [sum(lengths) for lengths in parts])
        built = build(options, streams)
        streams.cache({s: length for s, (length, _, _) in enumerate(parts)})
        counts = {s: prompt + further for s, (_, prompt, further) in enumerate(parts)}
        prompts = tuple(prompt for _, prompt, _ in parts)
        batch = streams.batch(counts, ForwardMode.MIXED, num_prompt_rows=prompts)
        outputs.append(streams.attend(built.for_pass(batch), batch))
    plain, other = outputs
    assert plain.keys() == other.keys()
    assert all(torch.equal(plain[s], other[s]) for s in plain)


def taken_by(backend: AttentionBackend) -> list[tuple[ForwardMode, tuple[int, ...], tuple[int, ...]]]:
    """The passes that a child attended for: mode, query lengths, context lengths."""
    assert isinstance(backend, NamedBackend)
    return [(batch.mode, batch.query_lens, batch.context_lens) for batch in backend.seen]


def mixed_pass(make: Callable[[Streams], AttentionBackend]) -> AttentionBackend:
    """A chunk of a prompt, a decode row, a block to verify, and a prompt recomputed with three tokens of output."""
    streams = Streams(Layer(), [12, 8, 9, 10])
    backend = make(streams)
    streams.done = [4, 7, 5, 0]
    batch = streams.batch({0: 8, 1: 1, 2: 4, 3: 10}, ForwardMode.MIXED, num_prompt_rows=(8, 0, 0, 7))
    streams.attend(backend, batch)
    return backend


def test_hybrid_halves_take_the_rows_of_their_phase_whoever_shares_the_pass() -> None:
    hybrid = mixed_pass(lambda streams: build(VARIANTS["hybrid"], streams).attn_backend)
    assert isinstance(hybrid, HybridBackend)
    # By default a block is verified by the prefill half; so are recomputed outputs, several rows at once.
    assert taken_by(hybrid.prefill) == [(EXTEND, (8, 7), (12, 7)), (VERIFY, (4, 3), (9, 10))]
    assert taken_by(hybrid.decode) == [(DECODE, (1,), (8,))]


def test_in_decode_mode_a_hybrid_verifies_and_recomputes_where_it_decodes() -> None:
    hybrid = mixed_pass(
        lambda _: HybridBackend(NamedBackend("one"), NamedBackend("two"), speculative_mode="decode")
    )
    assert isinstance(hybrid, HybridBackend)
    assert taken_by(hybrid.prefill) == [(EXTEND, (8, 7), (12, 7))]
    assert taken_by(hybrid.decode) == [(VERIFY, (4, 3), (9, 10)), (DECODE, (1,), (8,))]


@pytest.mark.parametrize("speculative_mode", ["prefill", "decode"])
@pytest.mark.parametrize("mode", [DECODE, EXTEND, VERIFY, ForwardMode.DRAFT_EXTEND, ForwardMode.MIXED])
def test_a_hybrid_gives_a_pass_of_one_phase_to_one_half_whole(
    mode: ForwardMode, speculative_mode: str
) -> None:
    hybrid = HybridBackend(NamedBackend("one"), NamedBackend("two"), speculative_mode)
    streams = Streams(Layer(), [5, 5])
    batch = streams.batch({0: 2, 1: 2}, mode)
    streams.attend(hybrid, batch)
    decodes = mode is DECODE or (mode in (VERIFY, ForwardMode.DRAFT_EXTEND) and speculative_mode == "decode")
    taker, other = (hybrid.decode, hybrid.prefill) if decodes else (hybrid.prefill, hybrid.decode)
    assert [id(seen) for seen in taker.seen] == [id(batch)]
    assert other.seen == []


def test_two_batch_halves_have_the_most_equal_work() -> None:
    two_batch = TwoBatchBackend(NamedBackend("whole"), NamedBackend("first"), NamedBackend("second"))
    streams = Streams(Layer(), [30, 5, 6, 7])
    streams.attend(two_batch, streams.batch({0: 30, 1: 5, 2: 6, 3: 7}))
    assert [batch.query_lens for batch in two_batch.halves[0].seen] == [(30,)]
    assert [batch.query_lens for batch in two_batch.halves[1].seen] == [(5, 6, 7)]
    assert two_batch.primary.seen == []


def test_two_batch_does_not_cut_a_sequence() -> None:
    two_batch = TwoBatchBackend(NamedBackend("whole"), NamedBackend("first"), NamedBackend("second"))
    streams = Streams(Layer(), [30])
    streams.attend(two_batch, streams.batch({0: 30}))
    assert len(two_batch.primary.seen) == 1


def test_pdmux_decodes_on_the_backend_of_the_group_and_nothing_is_written_for_it() -> None:
    streams = Streams(Layer(), [4])
    built = build(VARIANTS["pd-mux"], streams)
    decode, prefill = streams.batch({0: 1}, DECODE), streams.batch({0: 1}, EXTEND)
    assert built.for_pass(decode) is built.decode_attn_backend
    assert built.for_pass(decode, sm_group=1) is built.decode_attn_backend_group[1]
    assert built.for_pass(prefill, sm_group=1) is built.attn_backend


def test_a_part_is_a_batch_of_its_own() -> None:
    streams = Streams(Layer(), [6, 9])
    streams.done = [2, 3]
    batch = streams.batch({0: 4, 1: 6}, ForwardMode.MIXED, num_prompt_rows=(4, 2))
    part = cut(batch, [Piece(1, 1, 5), Piece(0, 0, 3)])
    assert part.batch.query_lens == (4, 3)
    assert part.batch.context_lens == (8, 5)
    assert part.batch.num_prompt_rows == (1, 3)
    assert part.batch.table_rows == (1, 0)
    assert part.batch.positions.tolist() == [4, 5, 6, 7, 2, 3, 4]
    assert part.take(torch.arange(10)).tolist() == [5, 6, 7, 8, 0, 1, 2]
    table = streams.slot_table
    assert part.batch.out_slots.tolist() == [*table[1, 4:8].tolist(), *table[0, 2:5].tolist()]


def test_a_batch_of_one_phase_is_not_cut() -> None:
    streams = Streams(Layer(), [6, 9])
    batch = streams.batch({0: 4, 1: 6}, ForwardMode.MIXED, num_prompt_rows=(0, 0))
    (part,) = phases(batch)
    assert part.rows is None
    assert part.batch.mode is VERIFY


class Recurrent(TorchNativeBackend):
    """Has state to commit after a verify."""

    def commit(self, *args: object) -> None: ...

    def mamba_commit(self) -> Callable[..., None]:
        return self.commit


@pytest.mark.parametrize(
    "wrap",
    [
        lambda b: HybridBackend(TorchNativeBackend(), b, "prefill"),
        lambda b: TwoBatchBackend(TorchNativeBackend(), b, TorchNativeBackend()),
    ],
)
def test_wrappers_answer_for_their_children_whether_there_is_state_to_commit(
    wrap: Callable[[AttentionBackend], AttentionBackend],
) -> None:
    recurrent = Recurrent()
    assert wrap(recurrent).mamba_commit() == recurrent.commit
    assert wrap(TorchNativeBackend()).mamba_commit() is None


def test_phases_keep_a_plain_batch() -> None:
    batch: ForwardBatch = Streams(Layer(), [3]).batch({0: 3})
    assert [part.batch for part in phases(batch)] == [batch]
