"""What holds of the FlashInfer backends on any device.

A module that imports these tests has fixtures `device` and `make`, which makes a backend of a class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.flashinfer import FlashInferBackend
from backends.forward import ForwardMode
from backends.torch_native import TorchNativeBackend
from tests.backends.streams import Layer, Streams

Make = Callable[[Callable[..., Any]], Any]

LAYERS = {
    "grouped": Layer(num_heads=6, num_kv_heads=2, head_dim=64, v_head_dim=64, scale=0.125),
    "windowed": Layer(num_heads=2, num_kv_heads=2, head_dim=64, v_head_dim=64, sliding_window=37),
    "capped": Layer(num_heads=3, num_kv_heads=1, head_dim=128, v_head_dim=128, logit_softcap=3.0),
}
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
FP8 = torch.float8_e4m3fn

layers = st.sampled_from(sorted(LAYERS))
dtypes = st.sampled_from(sorted(TOLERANCE, key=str))


@settings(max_examples=12, deadline=None)
@given(name=layers, dtype=dtypes, cut=st.integers(1, 69), causal=st.booleans())
def test_equals_dense_attention(
    device: torch.device, make: Make, name: str, dtype: torch.dtype, cut: int, causal: bool
) -> None:
    """A prompt, then the rest of it beside a short prompt, as blocks that see each other or not, then decode."""
    fed = Streams(LAYERS[name], [71, 10], dtype, device=device)
    backend = make(FlashInferBackend)
    fed.feed(backend, {0: cut})
    passes = [
        (fed.feed(backend, {1: 9, 0: 70 - cut}, causal), causal),
        (fed.feed(backend, {0: 1, 1: 1}), True),
    ]
    for starts, (rows_of, causal_pass) in zip(({0: cut, 1: 0}, {0: 70, 1: 9}), passes, strict=True):
        for s, rows in rows_of.items():
            expected = fed.expected(s, starts[s], starts[s] + len(rows), causal_pass)
            assert rows.dtype == dtype
            torch.testing.assert_close(rows.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("mode", ["prefill", "decode"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_mixed_pass_equals_torch_native(device: torch.device, make: Make, name: str, mode: str) -> None:
    """A chunk of a prompt, rows to verify behind the end of one, a verified block and a decode row."""
    results = []
    for backend in (make(FlashInferBackend), TorchNativeBackend()):
        backend.stamp("one", "one", mode)
        fed = Streams(LAYERS[name], [60, 50, 45, 40], torch.float16, device=device)
        fed.cache({0: 20, 1: 30, 2: 36, 3: 39})
        batch = fed.batch({0: 40, 1: 20, 2: 9, 3: 1}, ForwardMode.MIXED, num_prompt_rows=(40, 12, 0, 0))
        results.append(torch.cat(list(fed.attend(backend, batch).values())))
    torch.testing.assert_close(*results, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("name", LAYERS)
def test_under_mode_decode_verified_rows_are_those_of_decode(
    device: torch.device, make: Make, name: str
) -> None:
    """Bit for bit, in any company."""
    one_by_one, verified = (
        Streams(LAYERS[name], [1300, 60], torch.bfloat16, device=device) for _ in range(2)
    )
    backend = make(FlashInferBackend)
    backend.stamp("flashinfer", "flashinfer", "decode")
    for fed in (one_by_one, verified):
        fed.cache({0: 1290, 1: 55})
    decoded = [one_by_one.feed(backend, {0: 1})[0] for _ in range(6)]
    block = verified.batch({1: 5, 0: 6}, ForwardMode.TARGET_VERIFY)
    assert torch.equal(verified.attend(backend, block)[0], torch.cat(decoded))


@pytest.mark.parametrize("name", LAYERS)
def test_an_fp8_cache_is_read_through_its_scales(device: torch.device, make: Make, name: str) -> None:
    results = []
    for backend in (make(FlashInferBackend), TorchNativeBackend()):
        fed = Streams(LAYERS[name], [50, 20], torch.bfloat16, FP8, device=device)
        fed.pool.key_scale[1], fed.pool.value_scale[1] = 2.0**-3, 2.0**-4
        rows = [fed.feed(backend, counts) for counts in ({0: 40}, {1: 19, 0: 9}, {0: 1, 1: 1})]
        results.append(torch.cat([row for passed in rows for row in passed.values()]))
    torch.testing.assert_close(*results, atol=3e-2, rtol=3e-2)


def test_a_float32_model_is_computed_in_the_format_of_its_cache(device: torch.device, make: Make) -> None:
    fed = Streams(LAYERS["grouped"], [30], torch.float32, torch.float16, device=device)
    rows = fed.feed(make(FlashInferBackend), {0: 30})[0]
    assert rows.dtype == torch.float32
    torch.testing.assert_close(rows.double(), fed.expected(0, 0, 30), atol=4e-3, rtol=4e-3)


def test_a_pass_without_tokens_gives_no_rows(device: torch.device, make: Make) -> None:
    fed = Streams(LAYERS["grouped"], [4], torch.float16, device=device)
    batch = fed.batch({0: 0}, ForwardMode.IDLE)
    assert fed.attend(make(FlashInferBackend), batch)[0].shape == (0, 6, 64)
