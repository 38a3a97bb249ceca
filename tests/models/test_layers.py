"""Shared layers: rows that do not depend on their company, and stacked matrices of unlike formats."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.nn.functional import silu

from kernels.packed import pack_float
from models.gemma3 import GemmaRMSNorm
from models.layers import Linear, RMSNorm, activate, gelu_tanh
from models.rotary import rotate


@pytest.fixture(params=[1, 3, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def rotated(x: torch.Tensor) -> torch.Tensor:
    angles = torch.linspace(-3, 3, 1024)
    return rotate(x.view(len(x), 1, -1), (angles.cos(), angles.sin())).flatten(1)


WEIGHT = torch.linspace(-2, 2, 2048)


@pytest.mark.parametrize(
    "layer",
    [
        lambda x: activate(silu, x),
        lambda x: activate(gelu_tanh, x),
        RMSNorm(WEIGHT, 1e-6),
        GemmaRMSNorm(WEIGHT, 1e-6),
        rotated,
    ],
    ids=["silu", "gelu", "rms-norm", "gemma-rms-norm", "rotate"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(
    layer: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, threads: int
) -> None:
    # Half of a wider tensor, as gate is of gate_up; 97 rows are enough for torch to divide the work unevenly.
    x = torch.randn(97, 4096, generator=torch.Generator().manual_seed(0)).to(dtype).chunk(2, dim=-1)[0]
    alone = [layer(x[row : row + 1])[0] for row in range(len(x))]
    for rows in (2, 16, 34, 97):
        assert torch.equal(layer(x[:rows]), torch.stack(alone[:rows]))


def test_stacked_matrices_of_unlike_formats_equal_one_matrix() -> None:
    generator = torch.Generator().manual_seed(0)
    upper, lower = (torch.randn(n, 32, generator=generator).bfloat16() for n in (16, 24))
    bias, x = torch.randn(40, generator=generator), torch.randn(3, 32, generator=generator)
    mixed = Linear((pack_float(upper), pack_float(lower.float())), bias)
    expected = x @ torch.cat([upper, lower]).float().T + bias
    torch.testing.assert_close(mixed(x), expected)
