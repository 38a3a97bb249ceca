"""Gradients that are written out equal those that autograd derives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import rms_norm as torch_rms_norm

from speculative.training.ops import block_attention, head_loss, linear, rms_norm

G, KV, A, R, B, L, D = 2, 3, 4, 10, 5, 11, 8
SHARES, WEIGHTS, HEAD = torch.randn(700, 50).softmax(-1), torch.linspace(0, 1, 700), torch.randn(50, D)
ANCHORS = torch.tensor([[1, 4, 11, 6], [2, 2, 9, 10]])
BIAS = torch.zeros(G, A, L).masked_fill(torch.arange(L) >= ANCHORS[..., None], -torch.inf)


def plain_attention(query: Tensor, key: Tensor, value: Tensor, far_key: Tensor, far_value: Tensor) -> Tensor:
    """One softmax over all that a block sees, block by block."""
    rows = []
    for g in range(G):
        for a in range(A):
            seen = int(ANCHORS[g, a])
            keys = torch.cat([far_key[g, :, :seen], key[g, :, a]], dim=1)
            values = torch.cat([far_value[g, :, :seen], value[g, :, a]], dim=1)
            rows.append((query[g, :, a] @ keys.mT).softmax(-1) @ values)
    return torch.stack(rows).unflatten(0, (G, A)).transpose(1, 2)


CASES = {
    "linear": (linear, torch_linear, [(3, 4, D), (6, D)]),
    "linear over a part of a larger tensor": (
        lambda x, w: linear(x[:, :, 1:], w),
        lambda x, w: torch_linear(x[:, :, 1:], w),
        [(2, 3, 4, D), (6, D)],
    ),
    "rms_norm": (
        lambda x, w: rms_norm(x, w, 1e-5),
        lambda x, w: torch_rms_norm(x, (D,), w, 1e-5),
        [(3, 4, D), (D,)],
    ),
    "block_attention": (
        lambda *tensors: block_attention(*tensors, BIAS),
        plain_attention,
        [(G, KV, A, R, D), (G, KV, A, B, D), (G, KV, A, B, D), (G, KV, L, D), (G, KV, L, D)],
    ),
    "head_loss": (
        lambda hidden: head_loss(hidden, HEAD, SHARES @ HEAD, WEIGHTS),
        lambda hidden: (WEIGHTS * cross_entropy(hidden @ HEAD.T, SHARES, reduction="none")).sum(),
        [(700, D)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients(name: str) -> None:
    own, plain, shapes = CASES[name]
    torch.manual_seed(0)
    values = [torch.randn(shape) for shape in shapes]

    def run(function: Callable[..., Tensor]) -> list[Tensor]:
        inputs = [value.clone().requires_grad_() for value in values]
        result = function(*inputs)
        (result * torch.linspace(-1, 1, result.numel()).view_as(result)).sum().backward()
        return [result.detach(), *(x.grad for x in inputs if x.grad is not None)]

    if name == "head_loss":  # a scalar, which the linspace above would multiply by its first value alone
        assert run(own)[0].item() == pytest.approx(run(plain)[0].item(), rel=1e-5)
    for mine, theirs in zip(run(own), run(plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_head_loss_where_the_wanted_token_has_no_probability_left() -> None:
    hidden = torch.tensor([[400.0]]).requires_grad_()
    shares = torch.tensor([[0.0, 1.0]])
    loss = head_loss(
        hidden, torch.tensor([[1.0], [-1.0]]), shares @ torch.tensor([[1.0], [-1.0]]), torch.tensor([1.0])
    )
    loss.backward()
    assert loss.item() == 800.0
    assert hidden.grad is not None and hidden.grad.item() == 2.0
