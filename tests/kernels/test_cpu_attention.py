"""Native paged attention of one layer: that of float64, and bits that no company, cut, thread or page layout changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.cpu import library
from kernels.cpu.attention import PagedAttention
from kernels.cpu.kv import KV_DTYPES, KVTensors
from tests.backends.streams import stored
from tests.native import BF16_ATTENTION, needs_native

pytestmark = needs_native

WIDTH, ROWS = 300, 3  # contexts may be longer than two splits of 128
SLOTS = WIDTH * ROWS + 9
FP8, FP8_SCALES = torch.float8_e4m3fn, (0.5, 0.03125)
LAYERS, LAYER = 2, 1


@dataclass(frozen=True)
class Shape:
    """heads, KV heads, their width, a sliding window, and whether values are keys, as in a latent cache."""

    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    window: int | None = None
    latent: bool = False


SHAPES = [
    Shape(),
    Shape(heads=3, kv_heads=3, head_dim=16, window=1),
    Shape(heads=5, kv_heads=1, head_dim=80, window=37),
    Shape(heads=40, kv_heads=1, head_dim=48, latent=True),  # more heads than a short run has queries
    Shape(heads=16, kv_heads=2, head_dim=144, window=200),
]


class Cache:
    """WIDTH tokens of each of ROWS sequences, drawn of a fixed seed; a pool whose slots lie in the order of `seed`."""

    def __init__(self, shape: Shape, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        self.shape, self.dtype = shape, dtype
        contents = torch.Generator().manual_seed(0)
        size = (ROWS, WIDTH, shape.kv_heads, shape.head_dim)
        self.query = torch.randn(ROWS, WIDTH, shape.heads, shape.head_dim, generator=contents)
        self.key, self.value = torch.randn(size, generator=contents), torch.randn(size, generator=contents)
        pools = [torch.zeros(LAYERS, SLOTS, *size[2:], dtype=dtype) for _ in range(2)]
        scales: list[torch.Tensor | None] = [None, None]
        if dtype == torch.int8:
            scales = [torch.zeros(LAYERS, SLOTS, shape.kv_heads) for _ in range(2)]
        if dtype == FP8:
            scales = [torch.tensor((7.0, scale)) for scale in FP8_SCALES]
        if shape.latent:
            pools[1], scales[1] = pools[0], scales[0]
        self.kv = KVTensors(key=pools[0], value=pools[1], key_scales=scales[0], value_scales=scales[1])
        shuffled = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(seed))
        self.table = shuffled[: ROWS * WIDTH].view(ROWS, WIDTH).int()

    def attend(self, parts: Sequence[tuple[int, int, int]], causal: bool = True) -> torch.Tensor:
        """A pass over tokens [start, stop) of each (row, start, stop): the rows of all, one after another."""

        def rows(of: torch.Tensor) -> torch.Tensor:
            return torch.cat([of[row, start:stop] for row, start, stop in parts])

        attention = PagedAttention(
            [stop - start for _, start, stop in parts],
            [stop for *_, stop in parts],
            [row for row, *_ in parts],
            self.table,
            rows(self.table).long(),
            self.kv,
            causal,
        )
        value = self.key if self.shape.latent else self.value
        return attention.attend(LAYER, rows(self.query), rows(self.key), rows(value), 0.2, self.shape.window)

    def held(self, which: int, entries: torch.Tensor) -> torch.Tensor:
        """Keys (0) or values (1) as the pool rounds them, float64."""
        scale = FP8_SCALES[which] if self.dtype == FP8 else 1.0
        return stored(entries / scale, self.dtype) * scale

    def expected(self, row: int, start: int, stop: int, causal: bool = True) -> torch.Tensor:
        """Tokens [start, stop) of a row, dense and in float64, keys and values as the pool rounds them."""
        shape, group = self.shape, self.shape.heads // self.shape.kv_heads
        key, value = self.held(0, self.key[row, :stop]), self.held(1, self.value[row, :stop])
        value = key if shape.latent else value
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", self.query[row, start:stop].double(), key) * 0.2
        distance = torch.arange(start, stop)[:, None] - torch.arange(stop)
        hidden = (distance < 0) & causal
        if shape.window is not None:
            hidden |= distance >= shape.window
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)


def error_bound(isa: str, dtype: torch.dtype) -> float:
    """Of one number."""
    return 2e-2 if dtype != torch.float32 and isa in BF16_ATTENTION else 2e-5


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", KV_DTYPES, ids=str)
def test_it_is_attention(isa: str, shape: Shape, dtype: torch.dtype) -> None:
    cache = Cache(shape, dtype)
    bound = error_bound(isa, dtype)
    for parts in ([(1, 0, 270)], [(1, 270, 271), (0, 0, 45), (2, 0, 1)], [(1, 271, WIDTH)]):
        expected = torch.cat([cache.expected(*part) for part in parts])
        torch.testing.assert_close(cache.attend(parts).double(), expected, atol=bound, rtol=bound)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", KV_DTYPES, ids=str)
def test_queries_see_each_other_both_ways_when_not_causal(isa: str, shape: Shape, dtype: torch.dtype) -> None:
    cache = Cache(shape, dtype)
    cache.attend([(0, 0, 150)])
    parts = [(2, 0, 30), (0, 150, 166)]
    expected = torch.cat([cache.expected(*part, causal=False) for part in parts])
    bound = error_bound(isa, dtype)
    torch.testing.assert_close(cache.attend(parts, causal=False).double(), expected, atol=bound, rtol=bound)


def test_the_pool_holds_what_was_given_rounded_as_torch_rounds(isa: str) -> None:
    cache = Cache(Shape(), torch.bfloat16)
    cache.attend([(0, 0, 50), (2, 0, 20)])
    for pool, given_ in ((cache.kv.key, cache.key), (cache.kv.value, cache.value)):
        for row, count in ((0, 50), (2, 20)):
            assert torch.equal(pool[LAYER, cache.table[row, :count].long()], given_[row, :count].bfloat16())
        assert pool[LAYER].any(2).any(1).sum() == 70
        assert not pool[0].any()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@settings(deadline=None, max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_cuts_company_threads_and_pages_change_no_bit(isa: str, shape: Shape, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(list(KV_DTYPES)))
    ends = data.draw(st.lists(st.integers(1, WIDTH), min_size=ROWS, max_size=ROWS))
    expected = [Cache(shape, dtype).attend([(row, 0, end)]) for row, end in enumerate(ends)]
    cache, done = Cache(shape, dtype, data.draw(st.integers(0, 99))), [0] * ROWS
    before = library.threads()
    try:
        while left := [row for row in range(ROWS) if done[row] < ends[row]]:
            library.set_threads(data.draw(st.integers(1, 4)))
            parts = []
            for row in data.draw(st.lists(st.sampled_from(left), min_size=1, unique=True)):
                count = data.draw(st.sampled_from([1, 2, 5, 16, 33, 130, WIDTH]))
                parts.append((row, done[row], min(done[row] + count, ends[row])))
                done[row] = parts[-1][2]
            found = cache.attend(parts).split([stop - start for _, start, stop in parts])
            for (row, start, stop), rows in zip(parts, found, strict=True):
                assert torch.equal(rows, expected[row][start:stop])
    finally:
        library.set_threads(before)


def test_a_pass_without_tokens_gives_no_rows() -> None:
    assert Cache(Shape()).attend([(0, 0, 0)]).shape == (0, 6, 32)


@pytest.mark.parametrize(
    ("query_lens", "context_lens", "slot", "text"),
    [
        ([2], [2], SLOTS, "slot"),
        ([2], [2], -1, "slot"),
        ([3], [3], 0, "lengths"),
        ([2], [1], 0, "lengths"),
        ([2], [WIDTH + 1], 0, "lengths"),
    ],
)
def test_a_pass_out_of_range_is_refused(
    query_lens: list[int], context_lens: list[int], slot: int, text: str
) -> None:
    cache = Cache(Shape())
    out_slots = torch.tensor([0, slot])
    attention = PagedAttention(query_lens, context_lens, [0], cache.table, out_slots, cache.kv, True)
    query, key = cache.query[0, :2], cache.key[0, :2]
    with pytest.raises(library.NativeError, match=text):
        attention.attend(LAYER, query, key, key, 0.2, None)


def test_shapes_that_do_not_fit_the_pool_are_refused() -> None:
    cache = Cache(Shape())
    query, key = cache.query[0, :2], cache.key[0, :2]
    attention = PagedAttention([2], [2], [0], cache.table, torch.tensor([0, 1]), cache.kv, True)
    with pytest.raises(ValueError, match="keys are"):
        attention.attend(LAYER, query, key[:, :1], key[:, :1], 0.2, None)
    with pytest.raises(ValueError, match="queries are"):
        attention.attend(LAYER, query[:, :5], key, key, 0.2, None)
    with pytest.raises(ValueError, match="queries are"):
        attention.attend(LAYERS, query, key, key, 0.2, None)
    narrow = torch.zeros(1, SLOTS, 2, 24)
    with pytest.raises(ValueError, match="head_dim 24"):
        PagedAttention(
            [2], [2], [0], cache.table, torch.tensor([0, 1]), KVTensors(key=narrow, value=narrow), True
        )
