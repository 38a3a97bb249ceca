"""What holds of the Triton kernels on any device: each equals its reference, and a row's bits are its own.

A module that imports these tests has a fixture `device`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kernels.triton import reference
from kernels.triton.attention import attend_splits, constants, launch_options, merge_splits, paged_attention
from kernels.triton.tiling import Blocks, Tiling, tile

BLOCKS = Blocks(rows=32, keys=16, split=32, num_warps=4, num_stages=2)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    latent: bool = False


HEADS = (
    Heads(2, 2, 16, 16),
    Heads(6, 2, 32, 32),  # three heads a group: no power of two
    Heads(8, 1, 48, 24),  # keys and values of unequal width, neither a power of two
    Heads(5, 1, 40, 40),
    Heads(36, 1, 48, 32, latent=True),  # more heads than a tile has rows
    Heads(4, 1, 40, 24, latent=True),
)


class Pass:
    """`query_lens` tokens of sequences with `context_lens`, drawn by `seed`, over slots in shuffled order."""

    def __init__(
        self,
        device: torch.device,
        heads: Heads,
        query_lens: Sequence[int],
        context_lens: Sequence[int],
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        self.heads, self.query_lens, self.context_lens = heads, list(query_lens), list(context_lens)
        count, width = len(self.query_lens), max(context_lens)
        random = torch.Generator().manual_seed(seed)
        num_slots = count * width + 9
        draw = lambda *shape: torch.randn(*shape, generator=random)  # noqa: E731
        self.query = draw(sum(query_lens), heads.num_heads, heads.head_dim).to(device, dtype)
        self.key = draw(num_slots, heads.num_kv_heads, heads.head_dim).to(device).to(cache_dtype or dtype)
        self.value = draw(num_slots, heads.num_kv_heads, heads.v_head_dim).to(device).to(cache_dtype or dtype)
        slots = torch.randperm(num_slots, generator=random)[: count * width].int()
        self.slot_table = slots.view(count, width).to(device)
        self.table_rows = list(reversed(range(count)))

    def tiling(self, partial_bytes: int, blocks: Blocks = BLOCKS) -> Tiling:
        heads = self.heads
        return tile(
            self.query_lens, self.context_lens, self.table_rows, heads.num_heads, heads.num_kv_heads,
            heads.v_head_dim, blocks, self.query.device, partial_bytes,
        )  # fmt: skip

    def attend(self, split: bool, blocks: Blocks = BLOCKS, **mask: Any) -> torch.Tensor:
        """By the kernels; all sequences go through their keys whole, or those that can are split."""
        tiling = self.tiling(1 << 40 if split else 0, blocks)
        value = None if self.heads.latent else self.value
        shape = dict(v_head_dim=self.heads.v_head_dim, scale=self.heads.head_dim**-0.5)
        return paged_attention(self.query, self.key, value, self.slot_table, tiling, blocks, **shape, **mask)

    def expected(self, **mask: Any) -> torch.Tensor:
        value = None if self.heads.latent else self.value
        shape = dict(v_head_dim=self.heads.v_head_dim, scale=self.heads.head_dim**-0.5)
        return reference.paged_attention(
            self.query, self.key, value, self.slot_table, self.query_lens, self.context_lens, self.table_rows,
            **shape, **mask,
        )  # fmt: skip


masks = st.fixed_dictionaries(
    {
        "causal": st.booleans(),
        "window": st.sampled_from([None, None, 1, 7, 40]),
        "softcap": st.sampled_from([None, 2.0]),
    }
)
dtypes = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])


@st.composite
def lengths(draw: st.DrawFn, largest_query: int) -> tuple[list[int], list[int]]:
    """Query and context lengths of one or two sequences: prompts, chunks, blocks to verify, decodes."""
    queries = draw(st.lists(st.integers(1, largest_query), min_size=1, max_size=2))
    return queries, [count + draw(st.sampled_from([0, 5, 27, 32, 50])) for count in queries]


@settings(max_examples=12, deadline=None)
@given(heads=st.sampled_from(HEADS), lens=lengths(12), mask=masks, dtype=dtypes)
def test_extend_equals_its_reference(
    device: torch.device,
    heads: Heads,
    lens: tuple[list[int], list[int]],
    mask: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    case = Pass(device, heads, *lens, dtype)
    out = case.attend(split=False, **mask)
    assert out.dtype == dtype
    torch.testing.assert_close(
        out.double(), case.expected(**mask), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


@settings(max_examples=8, deadline=None)
@given(heads=st.sampled_from(HEADS), queries=st.integers(1, 5), context=st.integers(33, 90), mask=masks)
def test_a_split_equals_its_reference(
    device: torch.device, heads: Heads, queries: int, context: int, mask: dict[str, Any]
) -> None:
    """Each split that a row sees any of, as attention over its positions alone and their log-sum-exp."""
    case = Pass(device, heads, [queries], [context])
    tiling = case.tiling(1 << 40)
    value = case.key[..., : heads.v_head_dim] if heads.latent else case.value
    sizes = constants(**vars(heads), dtype=torch.float32, blocks=BLOCKS, **mask)
    scale = heads.head_dim**-0.5
    totals, peaks = attend_splits(
        case.query, case.key, value, (case.query, case.query), case.slot_table, tiling, scale * LOG2_E, sizes,
        launch_options(BLOCKS),
    )  # fmt: skip
    shape = (queries, heads.num_heads, -(-context // BLOCKS.split))
    totals, peak, weight = totals.view(*shape, -1), peaks[:, 0].view(shape), peaks[:, 1].view(shape)

    slots = case.slot_table[case.table_rows[0], :context].long()
    group = heads.num_heads // heads.num_kv_heads
    seen = reference.mask(queries, context, mask["causal"], mask["window"]).to(device)
    for split in range(shape[2]):
        keys = slice(split * BLOCKS.split, min(context, (split + 1) * BLOCKS.split))
        out, lse = reference.attend(
            case.query.double(),
            case.key[slots[keys]].double().repeat_interleave(group, 1),
            value[slots[keys]].double().repeat_interleave(group, 1),
            seen[:, keys],
            scale,
            mask["softcap"],
        )
        rows = seen[:, keys].any(1)
        mean = totals[rows, :, split].double() / weight[rows, :, split, None].double()
        torch.testing.assert_close(mean, out[rows], atol=2e-5, rtol=2e-5)
        found = (peak[rows, :, split].double() + weight[rows, :, split].double().log2()) / LOG2_E
        torch.testing.assert_close(found, lse[rows], atol=2e-5, rtol=2e-5)


@settings(max_examples=8, deadline=None)
@given(
    heads=st.sampled_from(HEADS),
    queries=st.integers(1, 3),
    context=st.integers(33, 130),
    window=st.sampled_from([None, 1, 40]),
    causal=st.booleans(),
    seed=st.integers(0, 9),
)
def test_a_merge_equals_its_reference(
    device: torch.device,
    heads: Heads,
    queries: int,
    context: int,
    window: int | None,
    causal: bool,
    seed: int,
) -> None:
    """Over the splits that a row sees; the rest of the partial results may hold anything."""
    case = Pass(device, heads, [queries], [context])
    tiling = case.tiling(1 << 40)
    random = torch.Generator().manual_seed(seed)
    totals = torch.randn(tiling.num_partials, heads.v_head_dim, generator=random)
    peaks = torch.randn(tiling.num_partials, 2, generator=random) * 3
    peaks[:, 1] = peaks[:, 1].exp()
    shape = (queries, heads.num_heads, -(-context // BLOCKS.split))
    seen = reference.mask(queries, context, causal, window)
    seen = torch.stack([part.any(1) for part in seen.split(BLOCKS.split, 1)], 1)  # [queries, splits]
    unset = ~seen.unsqueeze(1).expand(shape).reshape(-1)
    totals[unset] = float("nan")
    peaks[unset] = float("nan")

    out = torch.empty(queries, heads.num_heads, heads.v_head_dim, device=device)
    sizes = constants(**vars(heads), dtype=torch.float32, blocks=BLOCKS, causal=causal, window=window)
    merge_splits(totals.to(device), peaks.to(device), out, tiling, 1.5, sizes, launch_options(BLOCKS))
    for row in range(queries):
        parts = [
            (
                (
                    totals.view(*shape, -1)[row, :, split] / peaks[:, 1].view(shape)[row, :, split, None]
                ).double(),
                (
                    peaks.view(*shape, 2)[row, :, split, 0] / LOG2_E
                    + peaks[:, 1].view(shape)[row, :, split].log()
                ).double(),
            )
            for split in seen[row].nonzero().flatten().tolist()
        ]
        expected = reference.merge(parts) * 1.5
        torch.testing.assert_close(out[row].cpu().double(), expected, atol=2e-5, rtol=2e-5)


@settings(max_examples=8, deadline=None)
@given(heads=st.sampled_from(HEADS), lens=lengths(6), mask=masks, dtype=dtypes)
@example(  # a window that begins within a split, which is cut no other way for that
    heads=HEADS[0],
    lens=([2], [62]),
    mask={"causal": True, "window": 40, "softcap": None},
    dtype=torch.float32,
)
def test_splitting_changes_no_bit(
    device: torch.device,
    heads: Heads,
    lens: tuple[list[int], list[int]],
    mask: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    query_lens, context_lens = lens
    case = Pass(device, heads, [*query_lens, 2], [*context_lens, 70], dtype)
    assert len(case.tiling(1 << 40).split_tiles) > 0
    assert torch.equal(case.attend(split=True, **mask), case.attend(split=False, **mask))


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_scales_of_a_quantised_cache_apply_to_keys_and_values(
    device: torch.device, cache_dtype: torch.dtype, split: bool
) -> None:
    if (
        device.type == "cuda"
        and cache_dtype.is_floating_point
        and torch.cuda.get_device_capability() < (8, 9)
    ):
        pytest.skip("this GPU has no fp8")
    pair = Pass(device, Heads(4, 2, 32, 32), [3, 1], [40, 70], cache_dtype=cache_dtype)
    scales = dict(k_scale=0.7, v_scale=1.9)
    torch.testing.assert_close(
        pair.attend(split, **scales).double(), pair.expected(**scales), atol=2e-5, rtol=2e-5
    )
    latent = Pass(device, Heads(4, 1, 48, 32, latent=True), [2], [50], cache_dtype=cache_dtype)
    torch.testing.assert_close(
        latent.attend(split, k_scale=0.7).double(), latent.expected(k_scale=0.7), atol=2e-5, rtol=2e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_scales_of_slots_and_heads_apply_to_keys_and_values(
    device: torch.device, dtype: torch.dtype, split: bool, softcap: float | None
) -> None:
    for heads in (Heads(6, 2, 32, 32), Heads(4, 1, 48, 32, latent=True), Heads(4, 1, 40, 24)):
        case = Pass(device, heads, [3, 1], [40, 70], dtype, cache_dtype=torch.int8)
        case.key.copy_(torch.randn(case.key.shape) * 40)
        case.value.copy_(torch.randn(case.value.shape) * 40)
        shape = case.key.shape[:2]
        scales = dict(
            k_slot_scales=torch.rand(shape).to(device) / 20, v_slot_scales=torch.rand(shape).to(device) / 20
        )
        torch.testing.assert_close(
            case.attend(split, softcap=softcap, **scales).double(),
            case.expected(softcap=softcap, **scales),
            atol=TOLERANCE[dtype],
            rtol=TOLERANCE[dtype],
        )
