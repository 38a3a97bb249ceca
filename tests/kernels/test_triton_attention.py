"""The Triton kernels in the interpreter."""

from __future__ import annotations

import pytest
import torch

from kernels.triton.attention import INTERPRETED
from kernels.triton.tiling import Blocks, tile
from tests.kernels.triton_suite import (
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

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def device() -> torch.device:
    if not INTERPRETED:
        pytest.skip("the kernels are compiled for the GPU in this process")
    return CPU


class TestTiling:
    blocks = Blocks(rows=16, keys=16, split=32, num_warps=4, num_stages=2)

    def test_prompts_go_whole_and_short_queries_of_long_contexts_are_split(self) -> None:
        tiling = tile((20, 1, 1), (20, 100, 32), (4, 5, 6), 4, 2, 16, self.blocks, CPU)
        assert tiling.sequences.tolist() == [[0, 20, 20, 4, 0], [20, 1, 100, 5, 0], [21, 1, 32, 6, 16]]
        assert tiling.whole_tiles.tolist() == [[0, 0], [0, 16], [0, 32], [2, 0]]
        assert tiling.split_tiles.tolist() == [[1, 0]]
        assert tiling.split_tokens.tolist() == [[20, 1]]
        assert (tiling.num_splits, tiling.num_partials) == (4, 4 * 4)

    def test_the_longest_are_split_first_where_memory_is_short(self) -> None:
        one = 4 * (16 + 2) * 4 * 4  # bytes of one token, four heads, four splits
        tiling = tile((1, 1, 1), (64, 128, 100), (0, 1, 2), 4, 2, 16, self.blocks, CPU, partial_bytes=2 * one)
        assert tiling.split_tokens.tolist() == [[1, 1], [2, 2]]
        assert tiling.whole_tiles.tolist() == [[0, 0]]

    def test_a_pass_without_tokens_has_no_tiles(self) -> None:
        tiling = tile((), (), (), 4, 2, 16, self.blocks, CPU)
        assert tiling.whole_tiles.shape == tiling.split_tiles.shape == (0, 2)
