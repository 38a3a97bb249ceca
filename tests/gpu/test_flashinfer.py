"""The FlashInfer backends on a GPU: what holds through the stand-in holds of the package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from backends.base import Workspace
from tests.backends.flashinfer_suite import (
    test_a_float32_model_is_computed_in_the_format_of_its_cache,
    test_a_mixed_pass_equals_torch_native,
    test_a_pass_without_tokens_gives_no_rows,
    test_an_fp8_cache_is_read_through_its_scales,
    test_equals_dense_attention,
    test_under_mode_decode_verified_rows_are_those_of_decode,
)

__all__ = [
    "test_a_float32_model_is_computed_in_the_format_of_its_cache",
    "test_a_mixed_pass_equals_torch_native",
    "test_a_pass_without_tokens_gives_no_rows",
    "test_an_fp8_cache_is_read_through_its_scales",
    "test_equals_dense_attention",
    "test_under_mode_decode_verified_rows_are_those_of_decode",
]


@pytest.fixture(scope="module")
def make(device: torch.device) -> Callable[..., Any]:
    """Makes backends over the installed package."""
    pytest.importorskip("flashinfer", reason="needs the package flashinfer-python")
    return lambda backend: backend(device, Workspace(device))
