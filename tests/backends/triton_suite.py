"""What holds of the Triton backend on any device. A module that imports these tests has a fixture `device`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.forward import ForwardMode
from backends.kv_pool import FP8, INT8
from backends.triton import TritonBackend
from kernels.triton.tiling import Blocks
from tests.backends.streams import Layer, Streams

BLOCKS = Blocks(rows=32, keys=32, split=64, num_warps=4, num_stages=2)
LAYERS = {
    "grouped": Layer(num_heads=6, num_kv_heads=2, head_dim=32, v_head_dim=32),
    "windowed": Layer(num_heads=2, num_kv_heads=2, sliding_window=37),
    "capped": Layer(num_heads=3, num_kv_heads=1, head_dim=24, v_head_dim=40, logit_softcap=3.0),
    "latent": Layer(num_heads=8, num_kv_heads=1, head_dim=48, v_head_dim=32),
}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}

layers = st.sampled_from(sorted(LAYERS))
dtypes = st.sampled_from([torch.float32, torch.bfloat16])
pool_dtypes = st.sampled_from([torch.float32, torch.bfloat16, FP8, INT8])


def runs(pool_dtype: torch.dtype, device: torch.device) -> bool:
    return device.type == "cpu" or pool_dtype != FP8 or torch.cuda.get_device_capability(device) >= (8, 9)


def backend() -> TritonBackend:
    return TritonBackend(lambda *shape: BLOCKS)


def streams(
    name: str,
    lengths: list[int],
    dtype: torch.dtype,
    device: torch.device,
    pool_dtype: torch.dtype | None = None,
) -> Streams:
    return Streams(LAYERS[name], lengths, dtype, pool_dtype, device=device, latent=name == "latent")


@settings(max_examples=8, deadline=None)
@given(name=layers, dtype=dtypes, pool_dtype=pool_dtypes, cut=st.integers(1, 69), causal=st.booleans())
def test_equals_dense_attention(
    device: torch.device, name: str, dtype: torch.dtype, pool_dtype: torch.dtype, cut: int, causal: bool
) -> None:
    """A prompt, then the rest of it beside a short prompt, as blocks that see each other or not."""
    if not runs(pool_dtype, device):
        pool_dtype = dtype
    fed = streams(name, [70, 9], dtype, device, pool_dtype)
    kernels = backend()
    fed.feed(kernels, {0: cut})
    for s, rows in fed.feed(kernels, {1: 9, 0: 70 - cut}, causal).items():
        expected = fed.expected(s, 0 if s else cut, fed.lengths[s], causal)
        assert rows.dtype == dtype
        torch.testing.assert_close(rows.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("name", "dtype", "pool_dtype"),
    [
        *((name, dtype, dtype) for name in LAYERS for dtype in (torch.float32, torch.bfloat16)),
        ("grouped", torch.float32, INT8),
        ("latent", torch.bfloat16, FP8),
    ],
    ids=str,
)
def test_a_row_is_the_same_in_every_cut_and_company(
    device: torch.device, name: str, dtype: torch.dtype, pool_dtype: torch.dtype
) -> None:
    """Prefill, chunks, decode (over its keys in splits, where they are many) and verified blocks."""
    if not runs(pool_dtype, device):
        pytest.skip("this GPU has no fp8")
    kernels = backend()
    whole = streams(name, [90, 20], dtype, device, pool_dtype).feed(kernels, {0: 90})[0]
    together = streams(name, [90, 20], dtype, device, pool_dtype)
    rows = []
    for counts in ({0: 40}, {1: 19, 0: 30}, {0: 1, 1: 1}, {0: 1}, {0: 2}, {0: 16}):
        rows.append(together.feed(kernels, counts)[0])
    assert torch.equal(torch.cat(rows), whole)


def test_a_pass_without_tokens_gives_no_rows(device: torch.device) -> None:
    fed = streams("grouped", [4], torch.float32, device)
    assert fed.attend(backend(), fed.batch({0: 0}, ForwardMode.IDLE))[0].shape == (0, 6, 32)
