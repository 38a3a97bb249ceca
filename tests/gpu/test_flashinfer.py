"""The FlashInfer backends on a GPU: what holds through the stand-in holds of the package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from backends.base import Workspace
from tests.backends.flashinfer_mla_suite import (
    test_a_latent_pass_without_tokens_gives_no_rows,
    test_a_prefix_is_merged_from_chunks,
    test_both_methods_equal_torch_native,
    test_mqa_equals_dense_attention,
)
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
    "test_a_latent_pass_without_tokens_gives_no_rows",
    "test_a_mixed_pass_equals_torch_native",
    "test_a_pass_without_tokens_gives_no_rows",
    "test_a_prefix_is_merged_from_chunks",
    "test_an_fp8_cache_is_read_through_its_scales",
    "test_both_methods_equal_torch_native",
    "test_equals_dense_attention",
    "test_mqa_equals_dense_attention",
    "test_under_mode_decode_verified_rows_are_those_of_decode",
]


@pytest.fixture(scope="module")
def make(device: torch.device) -> Callable[..., Any]:
    """Makes backends over the installed package."""
    pytest.importorskip("flashinfer", reason="needs the package flashinfer-python")
    return lambda backend, **options: backend(device, Workspace(device), **options)
