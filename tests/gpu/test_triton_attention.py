"""The Triton kernels, compiled for the GPU: what holds in the interpreter, and passes of real size."""

from __future__ import annotations

import pytest
import torch

from kernels.triton.tiling import block_sizes
from tests.kernels.triton_suite import (
    TOLERANCE,
    Heads,
    Pass,
    test_a_merge_equals_its_reference,
    test_a_split_equals_its_reference,
    test_extend_equals_its_reference,
    test_scales_of_a_quantised_cache_apply_to_keys_and_values,
    test_scales_of_slots_and_heads_apply_to_keys_and_values,
    test_splitting_changes_no_bit,
)

__all__ = [
    "test_a_merge_equals_its_reference",
    "test_a_split_equals_its_reference",
    "test_extend_equals_its_reference",
    "test_scales_of_a_quantised_cache_apply_to_keys_and_values",
    "test_scales_of_slots_and_heads_apply_to_keys_and_values",
    "test_splitting_changes_no_bit",
]


@pytest.mark.parametrize(
    "heads",
    [
        Heads(9, 3, 64, 64),
        Heads(32, 8, 128, 128),
        Heads(16, 16, 192, 128),
        Heads(8, 4, 256, 256),
        Heads(128, 1, 576, 512, latent=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_passes_of_real_size(device: torch.device, heads: Heads, dtype: torch.dtype) -> None:
    """A prompt, a chunk, a block to verify and a decode in one pass, with the block sizes that are served with."""
    blocks = block_sizes(heads.head_dim, heads.v_head_dim, dtype)
    case = Pass(device, heads, [130, 40, 8, 1], [130, 400, 2100, 3000], dtype)
    whole = case.attend(split=False, blocks=blocks)
    torch.testing.assert_close(whole.double(), case.expected(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(whole, case.attend(split=True, blocks=blocks))
