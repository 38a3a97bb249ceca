"""The torch-native backend computes attention, and a row's bits depend on nothing but the row and its context."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.forward import ForwardMode, forward_context
from backends.kv_pool import FP8, INT8
from backends.torch_native import BLOCK, TILE, TorchNativeBackend
from tests.backends.streams import Layer, Streams

layers = st.builds(
    lambda kv, group, dims, window, cap: Layer(
        num_heads=kv * group,
        num_kv_heads=kv,
        head_dim=dims[0],
        v_head_dim=dims[1],
        scale=dims[0] ** -0.5,
        sliding_window=window,
        logit_softcap=cap,
    ),
    kv=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 3, 4]),
    dims=st.sampled_from([(16, 16), (64, 64), (24, 8)]),
    window=st.sampled_from([None, 1, 5, BLOCK - 1, BLOCK + 40]),
    cap=st.sampled_from([None, 3.0]),
)
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
pool_dtypes = st.sampled_from([torch.float32, torch.bfloat16, FP8, INT8])
lengths = st.lists(st.integers(1, 2 * BLOCK + 30), min_size=1, max_size=4)
COUNTS = [1, 2, 7, 8, 9, 16, 33, 100, BLOCK, 3 * BLOCK]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def tolerance(native: bool, dtype: torch.dtype, pool_dtype: torch.dtype) -> float:
    """Beside a narrow cache, native kernels may round queries and weights to bfloat16, for products of tiles."""
    return TOLERANCE[torch.bfloat16 if native and pool_dtype != torch.float32 else dtype]


@st.composite
def schedules(draw: st.DrawFn, ends: list[int]) -> list[dict[int, int]]:
    """Passes that together feed every sequence to its end, each with any of them in any order."""
    left = dict(enumerate(ends))
    passes = []
    while left:
        chosen = draw(st.lists(st.sampled_from(sorted(left)), min_size=1, unique=True))
        counts = {s: min(left[s], draw(st.sampled_from(COUNTS))) for s in chosen}
        for s, count in counts.items():
            left[s] -= count
        left = {s: rest for s, rest in left.items() if rest}
        passes.append(counts)
    return passes


@pytest.mark.parametrize("native", [True, False])
@settings(max_examples=15, deadline=None)
@given(layer=layers, dtype=dtypes, pool_dtype=pool_dtypes, ends=lengths, data=st.data())
def test_equals_dense_attention(
    native: bool,
    layer: Layer,
    dtype: torch.dtype,
    pool_dtype: torch.dtype,
    ends: list[int],
    data: st.DataObject,
) -> None:
    streams = Streams(layer, ends, dtype, pool_dtype)
    backend = TorchNativeBackend(native)
    dense = [streams.expected(s, 0, end) for s, end in enumerate(ends)]
    for counts in data.draw(schedules(ends)):
        for s, rows in streams.feed(backend, counts).items():
            expected = dense[s][streams.done[s] - counts[s] : streams.done[s]]
            bound = tolerance(native, dtype, pool_dtype)
            assert rows.dtype == dtype
            torch.testing.assert_close(rows.double(), expected, atol=bound, rtol=bound)


@pytest.mark.parametrize("native", [True, False])
@settings(max_examples=15, deadline=None)
@given(layer=layers, dtype=dtypes, pool_dtype=pool_dtypes, ends=lengths, data=st.data())
def test_a_row_is_the_same_in_every_cut_company_and_slot_layout(
    native: bool,
    layer: Layer,
    dtype: torch.dtype,
    pool_dtype: torch.dtype,
    ends: list[int],
    data: st.DataObject,
) -> None:
    backend = TorchNativeBackend(native)
    alone = Streams(layer, ends, dtype, pool_dtype)
    whole = [alone.feed(backend, {s: end})[s] for s, end in enumerate(ends)]
    together = Streams(layer, ends, dtype, pool_dtype)
    for counts in data.draw(schedules(ends)):
        for s, rows in together.feed(backend, counts).items():
            stop = together.done[s]
            assert torch.equal(rows, whole[s][stop - counts[s] : stop])


@pytest.mark.parametrize("native", [True, False])
@settings(max_examples=12, deadline=None)
@given(
    layer=layers,
    dtype=dtypes,
    pool_dtype=pool_dtypes,
    prefix=st.integers(BLOCK - 20, BLOCK + 4),
    rows=st.integers(2, 16),
    data=st.data(),
)
def test_verified_blocks_of_2_to_16_rows_equal_decode(
    native: bool,
    layer: Layer,
    dtype: torch.dtype,
    pool_dtype: torch.dtype,
    prefix: int,
    rows: int,
    data: st.DataObject,
) -> None:
    backend = TorchNativeBackend(native)
    ends = [prefix + rows] * data.draw(st.integers(1, 8), label="sequences")
    everyone = dict.fromkeys(range(len(ends)), prefix)
    decoded, verified = (Streams(layer, ends, dtype, pool_dtype) for _ in range(2))
    decoded.cache(everyone)
    verified.cache(everyone)
    expected = torch.cat([decoded.feed(backend, {0: 1})[0] for _ in range(rows)])
    block = verified.feed(backend, dict.fromkeys(reversed(range(len(ends))), rows))
    assert torch.equal(block[0], expected)


@pytest.mark.parametrize("native", [True, False])
@settings(max_examples=15, deadline=None)
@given(layer=layers, dtype=dtypes, prefix=st.integers(0, BLOCK + 10), block=st.integers(1, 2 * TILE + 1))
def test_rows_of_a_block_without_causal_order_see_each_other(
    native: bool, layer: Layer, dtype: torch.dtype, prefix: int, block: int
) -> None:
    streams = Streams(layer, [prefix + block, 40], dtype)
    backend = TorchNativeBackend(native)
    streams.cache({0: prefix})
    rows = streams.feed(backend, {1: 40, 0: block}, causal=False)
    for s, start, stop in ((0, prefix, prefix + block), (1, 0, 40)):
        expected = streams.expected(s, start, stop, causal=False)
        torch.testing.assert_close(rows[s].double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


LATENT = Layer(num_heads=8, num_kv_heads=1, head_dim=48, v_head_dim=32)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16, FP8, INT8], ids=str)
def test_over_a_latent_cache_values_are_the_first_columns_of_keys(
    native: bool, pool_dtype: torch.dtype
) -> None:
    backend = TorchNativeBackend(native)
    prompt, block = BLOCK + 30, 5
    whole, parts = (
        Streams(LATENT, [prompt + block], torch.float32, pool_dtype, latent=True) for _ in range(2)
    )
    rows = whole.feed(backend, {0: prompt + block})[0]
    bound = tolerance(native, torch.float32, pool_dtype)
    torch.testing.assert_close(rows.double(), whole.expected(0, 0, prompt + block), atol=bound, rtol=bound)
    parts.feed(backend, {0: prompt})
    assert torch.equal(parts.feed(backend, {0: block})[0], rows[prompt:])


@pytest.mark.parametrize(
    ("pool_dtype", "bound"), [(torch.bfloat16, 0.01), (INT8, 0.02), (FP8, 0.08)], ids=str
)
@pytest.mark.parametrize("latent", [False, True])
def test_the_error_of_a_narrow_cache_is_bounded(pool_dtype: torch.dtype, bound: float, latent: bool) -> None:
    """Against unquantised attention over the same keys and values, which are of normal distribution."""
    layer, length = LATENT if latent else Layer(num_heads=6, num_kv_heads=2), 300
    narrow = Streams(layer, [length], torch.float32, pool_dtype, latent=latent)
    wide = Streams(layer, [length], torch.float32, latent=latent)
    out, expected = narrow.feed(TorchNativeBackend(), {0: length})[0].double(), wide.expected(0, 0, length)
    error = (out - expected).norm() / expected.norm()
    assert 0 < error < bound


def test_what_is_read_grows_with_a_requests_own_context_only() -> None:
    backend = TorchNativeBackend(native=False)
    streams = Streams(Layer(), [1, 5 * BLOCK])
    streams.cache({1: 5 * BLOCK - 1})
    alone = streams.batch({1: 1}, ForwardMode.DECODE)
    both = streams.batch({0: 1, 1: 1}, ForwardMode.DECODE)

    def slots_read(batch: object) -> int:
        return sum(part.slots.numel() for part in backend.plan(batch).parts_for(None))

    assert slots_read(alone) == 5 * BLOCK
    assert slots_read(both) == 6 * BLOCK


def test_a_sliding_window_reads_only_the_blocks_it_touches() -> None:
    backend = TorchNativeBackend(native=False)
    streams = Streams(Layer(sliding_window=10), [5 * BLOCK])
    streams.cache({0: 5 * BLOCK - 1})
    plan = backend.plan(streams.batch({0: 1}, ForwardMode.DECODE))
    assert sum(part.slots.numel() for part in plan.parts_for(10)) == BLOCK


@pytest.mark.parametrize("mode", [ForwardMode.IDLE, ForwardMode.EXTEND])
def test_a_pass_without_tokens_gives_no_rows(mode: ForwardMode) -> None:
    streams = Streams(Layer(), [4])
    batch = streams.batch({0: 0}, mode)
    with forward_context(batch, TorchNativeBackend()) as context:
        out = context.backend.forward(
            torch.empty(0, 6, 16),
            torch.empty(0, 2, 16),
            torch.empty(0, 2, 16),
            streams.layer,
            batch,
            context.plan,
        )
    assert out.shape == (0, 6, 16)
