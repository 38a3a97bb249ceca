"""Element-wise functions by row: the same bits alone and in any batch, whatever the width and the threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.nn.functional import silu, softplus

from kernels.rowwise import rowwise


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("function", [torch.exp, torch.sigmoid, silu, softplus])
@pytest.mark.parametrize("width", [1, 5, 33, 160, 1000])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    function: Callable[[torch.Tensor], torch.Tensor], width: int, threads: int
) -> None:
    x = torch.randn(97, width, generator=torch.Generator().manual_seed(0))
    alone = torch.cat([rowwise(function, x[row : row + 1]) for row in range(len(x))])
    torch.testing.assert_close(alone, function(x))
    for rows in (2, 16, 34, 97):
        assert torch.equal(rowwise(function, x[:rows]), alone[:rows])


def test_no_rows_give_no_rows() -> None:
    assert rowwise(torch.exp, torch.empty(0, 7)).shape == (0, 7)
