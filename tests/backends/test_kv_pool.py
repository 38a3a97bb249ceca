"""What the KV pool stores comes back as close as its dtype allows, and no entry touches another."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.kv_pool import DTYPES, FP8, INT8, KVLayout, KVPool
from tests.backends.streams import CPU, stored

QUANTISED = [FP8, INT8]


def layout(dtype: torch.dtype, latent: bool = False) -> KVLayout:
    return KVLayout(num_layers=2, num_kv_heads=3, head_dim=24, v_head_dim=0 if latent else 16, dtype=dtype)


def pool_of(dtype: torch.dtype, latent: bool = False) -> KVPool:
    return KVPool(layout(dtype, latent), 40, CPU)


def entries(seed: int, std: float = 1.0, count: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(count, 3, dim, generator=random) * std for dim in (24, 16))  # type: ignore[return-value]


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("latent", [False, True])
def test_a_slot_costs_what_its_tensors_take(name: str, latent: bool) -> None:
    pool = pool_of(DTYPES[name], latent)
    tensors = [pool.key, pool.value, pool.key_slot_scales, pool.value_slot_scales]
    taken = sum(tensor.numel() * tensor.itemsize for tensor in tensors if tensor is not None)
    assert taken == pool.layout.bytes_per_slot * pool.num_slots


@settings(max_examples=20, deadline=None)
@given(
    dtype=st.sampled_from(sorted(set(DTYPES.values()), key=str)),
    latent=st.booleans(),
    seed=st.integers(0, 99),
)
def test_what_is_read_is_what_was_written_as_the_dtype_rounds_it(
    dtype: torch.dtype, latent: bool, seed: int
) -> None:
    pool, (key, value) = pool_of(dtype, latent), entries(seed)
    slots = torch.randperm(40)[:10]
    pool.write(1, slots, key, value)
    read_key, read_value = pool.gather(1, slots.view(2, 5))
    torch.testing.assert_close(read_key.double(), stored(key, dtype).view(2, 5, 3, 24), rtol=1e-6, atol=0)
    if latent:
        assert read_value.shape == (2, 5, 3, 0)
    else:
        torch.testing.assert_close(
            read_value.double(), stored(value, dtype).view(2, 5, 3, 16), rtol=1e-6, atol=0
        )
    assert not pool.gather(0, slots)[0].any()


@settings(max_examples=20, deadline=None)
@given(exponent=st.integers(-20, 20), seed=st.integers(0, 99))
def test_int8_errs_by_half_a_step_of_the_largest_number_of_a_token_and_head(exponent: int, seed: int) -> None:
    pool, (key, value) = pool_of(INT8), entries(seed, 2.0**exponent)
    pool.write(0, torch.arange(10), key, value)
    for read, wanted in zip(pool.gather(0, torch.arange(10)), (key, value), strict=True):
        step = wanted.abs().amax(-1, keepdim=True) / 127
        assert ((read - wanted).abs() <= step * 0.501).all()


@settings(max_examples=20, deadline=None)
@given(exponent=st.integers(-20, 20), seed=st.integers(0, 99))
def test_calibrated_fp8_errs_by_a_sixteenth_whatever_the_size_of_the_numbers(
    exponent: int, seed: int
) -> None:
    pool, (key, value) = pool_of(FP8), entries(seed, 2.0**exponent)
    with pool.calibrating():
        pool.write(0, torch.arange(10), key, value * 8)
    # What comes later may be a few times as large as what was seen.
    pool.write(0, torch.arange(10), key * 3, value * 24)
    for read, wanted in zip(pool.gather(0, torch.arange(10)), (key * 3, value * 24), strict=True):
        floor = wanted.abs().max() * 2.0**-13
        assert ((read - wanted).abs() <= wanted.abs() / 16 + floor).all()
    assert pool.key_scale[1] == pool.value_scale[1] == 1.0


def test_calibrating_changes_no_scale_of_a_slot_and_of_no_other_dtype() -> None:
    for dtype in (torch.float32, INT8):
        pool, (key, value) = pool_of(dtype), entries(0)
        with pool.calibrating():
            pool.write(0, torch.arange(10), key, value)
        assert pool.key_scale == pool.value_scale == [1.0, 1.0]
        torch.testing.assert_close(pool.gather(0, torch.arange(10))[0].double(), stored(key, dtype))


@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
@pytest.mark.parametrize("large", [1e4, 3e38, float("inf")])
def test_what_is_too_large_saturates(dtype: torch.dtype, large: float) -> None:
    pool, (key, value) = pool_of(dtype), entries(0)
    key[0, 0, 0], value[1, 2, 3] = large, -large
    pool.write(0, torch.arange(10), key, value)
    read_key, read_value = pool.gather(0, torch.arange(10))
    assert read_key.isfinite().all() and read_value.isfinite().all()
    assert read_key[0, 0, 0] == read_key.max() >= 448
    assert read_value[1, 2, 3] == read_value.min() <= -448


@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
@pytest.mark.parametrize("activations", [torch.float16, torch.bfloat16], ids=str)
def test_zeros_and_the_smallest_numbers_stay_finite(dtype: torch.dtype, activations: torch.dtype) -> None:
    pool = pool_of(dtype)
    key, value = torch.zeros(2, 3, 24, dtype=activations), torch.zeros(2, 3, 16, dtype=activations)
    key[1] = torch.finfo(activations).smallest_normal / 8
    pool.write(0, torch.arange(2), key, value)
    read_key, read_value = pool.gather(0, torch.arange(2))
    assert not read_key[0].any() and not read_value.any()
    assert read_key.isfinite().all()


@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
def test_writing_changes_no_other_entry(dtype: torch.dtype) -> None:
    pool, (key, value) = pool_of(dtype), entries(0)
    pool.write(0, torch.arange(10), key, value)
    before = pool.gather(0, torch.arange(10))
    pool.write(0, torch.arange(10, 20), *(1000 * large for large in entries(1)))
    pool.write(1, torch.arange(10), *entries(2))
    for now, then in zip(pool.gather(0, torch.arange(10)), before, strict=True):
        assert torch.equal(now, then)


def test_every_number_of_fp8_is_read_right() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    finite = codes[codes.view(FP8).float().isfinite()]
    assert len(finite) == 254
    pool = KVPool(KVLayout(1, 1, 254, 0, FP8), 1, CPU)
    pool.key.view(torch.uint8).copy_(finite)
    assert torch.equal(pool.gather(0, torch.tensor([0]))[0].flatten(), finite.view(FP8).float())


@pytest.mark.parametrize(("dtype", "name"), [(FP8, "fp8_e4m3"), (INT8, "int8"), (torch.float16, "float16")])
def test_a_dtype_has_the_name_that_settings_have_for_it(dtype: torch.dtype, name: str) -> None:
    assert layout(dtype).dtype_name == name
    assert DTYPES[name] is dtype
