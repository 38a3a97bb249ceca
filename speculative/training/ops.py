"""The costly operations with their gradients written out.

What autograd would derive keeps more tensors and passes over memory more often, and on a CPU the passes cost as much
as the products. Master weights are float32; computation is in the dtype of the activations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_LOGITS_ROWS = 512  # at a time


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rows, weight = x.reshape(-1, x.shape[-1]), weight.to(x.dtype)
        ctx.save_for_backward(rows, weight)
        return torch.nn.functional.linear(rows, weight).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, Tensor]:
        rows, weight = ctx.saved_tensors
        gradient = outputs[0].reshape(-1, weight.shape[0])
        by_weight = (gradient.t() @ rows).float()
        if not ctx.needs_input_grad[0]:
            return None, by_weight
        # As a product with a transposed copy of the small matrix it runs at twice the speed.
        by_x = torch.nn.functional.linear(gradient, weight.t().contiguous())
        return by_x.view(*outputs[0].shape[:-1], -1), by_weight


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., K] times weight [N, K] (float32) transposed: [..., N] in x's dtype."""
    return _Linear.apply(x, weight)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.rsqrt(norm.square() / x.shape[-1] + eps).to(x.dtype)
        normed = x * scale
        ctx.save_for_backward(normed, scale, weight)
        return normed * weight.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, scale, weight = ctx.saved_tensors
        product = outputs[0] * normed
        by_weight = product.flatten(0, -2).sum(0, dtype=torch.float32)
        weight = weight.to(normed.dtype)
        # The part along x changes only its length, which the norm takes out again.
        along = (product @ weight / weight.shape[0]).unsqueeze(-1)
        return (outputs[0] * weight).addcmul_(normed, along, value=-1).mul_(scale), by_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight (float32 [K]) over the last dimension, in x's dtype."""
    return _RMSNorm.apply(x, weight, eps)


class _BlockAttention(torch.autograd.Function):
    """Two products, one with the context and one within the block, under one softmax. Large matrices of scores are
    changed in place and never transposed: that would cost as much as the products."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, far_key: Tensor, far_value: Tensor, bias: Tensor
    ) -> Tensor:
        blocks, length = query.shape[:4], far_key.shape[2]
        query, key, value = (x.flatten(0, 2) for x in (query, key, value))  # [blocks, R or B, D]
        far_key, far_value = far_key.flatten(0, 1), far_value.flatten(0, 1)  # [sequences, L, D]
        rows = _by_sequence(query, len(far_key))
        far = (
            torch.bmm(rows, far_key.mT)
            .view(*blocks, length)
            .add_(bias[:, None, :, None])
            .view(*rows.shape[:2], -1)
        )
        near = torch.bmm(query, key.mT)
        highest = torch.maximum(far.amax(-1).view(near.shape[:2]), near.amax(-1))
        far.sub_(highest.view(rows.shape[:2])[..., None]).exp_()
        near.sub_(highest[..., None]).exp_()
        total = far.sum(-1, dtype=torch.float32).view(near.shape[:2]) + near.sum(-1, dtype=torch.float32)
        scale = total.reciprocal_().unsqueeze(-1).to(query.dtype)
        out = torch.bmm(near, value).add_(torch.bmm(far, far_value).view_as(query)).mul_(scale)
        ctx.save_for_backward(query, key, value, far_key, far_value, far, near, scale, out)
        return out.view(*blocks, -1)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, far_key, far_value, far, near, scale, out = ctx.saved_tensors
        shape = outputs[0].shape
        gradient = outputs[0].reshape(query.shape) * scale  # `far` and `near` are not divided by their sum
        # d score = share * (d share - sum over keys of share * d share), and that sum is that of out * d out.
        along = (gradient * out).sum(-1, keepdim=True)
        sequences = len(far_key)
        wide, rows = _by_sequence(gradient, sequences), _by_sequence(query, sequences)
        by_near = torch.bmm(gradient, value.mT).sub_(along).mul_(near)
        by_far = torch.bmm(wide, far_value.mT).sub_(_by_sequence(along, sequences)).mul_(far)
        by_query = torch.bmm(by_near, key).add_(torch.bmm(by_far, far_key).view_as(query))
        pairs = (*shape[:3], -1, shape[-1])
        return (
            by_query.view(shape),
            torch.bmm(by_near.mT, query).view(pairs),
            torch.bmm(near.mT, gradient).view(pairs),
            torch.bmm(rows.mT, by_far).mT.unflatten(0, shape[:2]),
            torch.bmm(wide.mT, far).mT.unflatten(0, shape[:2]),
            None,
        )


def _by_sequence(x: Tensor, sequences: int) -> Tensor:
    """[blocks, R, D] to [sequences, rows, D]."""
    return x.view(sequences, -1, x.shape[-1])


def block_attention(
    query: Tensor, key: Tensor, value: Tensor, far_key: Tensor, far_value: Tensor, bias: Tensor
) -> Tensor:
    """Attention of each of G x A blocks to itself and to its sequence's context: [G, kv, A, R, D].

    query [G, kv, A, R, D], scaled; R rows are a block's queries of all heads that share a KV head.
    key, value [G, kv, A, B, D] of the blocks; far_key, far_value [G, kv, L, D] of the contexts.
    bias [G, A, L]: 0 where a block sees a position of its context, -inf where not.
    """
    return _BlockAttention.apply(query, key, value, far_key, far_value, bias)


class _HeadLoss(torch.autograd.Function):
    """The head is frozen, so the gradient by `hidden` is all there is, and is ready with the loss."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, wanted: Tensor, weights: Tensor) -> Tensor:
        gradient = torch.empty_like(hidden)
        loss = hidden.new_zeros((), dtype=torch.float32)
        for start in range(0, len(hidden), _LOGITS_ROWS):
            rows = slice(start, start + _LOGITS_ROWS)
            logits = hidden[rows] @ head.t()
            shares = logits.softmax(-1)
            highest, best = logits.max(-1, keepdim=True)
            log_total = (highest.float() - shares.gather(1, best).float().log())[:, 0]
            wanted_logit = torch.linalg.vecdot(hidden[rows].float(), wanted[rows].float())
            loss += weights[rows].dot(log_total - wanted_logit)
            gradient[rows] = ((shares @ head).sub_(wanted[rows]) * weights[rows, None]).to(hidden.dtype)
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * outputs[0].to(gradient.dtype), None, None, None


def head_loss(hidden: Tensor, head: Tensor, wanted: Tensor, weights: Tensor) -> Tensor:
    """Sum of weights * cross-entropy against distributions, float32.

    hidden [N, H], head [V, H], weights float32 [N]. wanted [N, H]: the mean row of the head under each distribution,
    which is all of it that the cross-entropy with a linear head depends on.
    """
    return _HeadLoss.apply(hidden, head, wanted, weights)


def mean_rows(hidden: Tensor, head: Tensor, finish_logits: Callable[[Tensor], Tensor]) -> Tensor:
    """The mean row of `head` [V, H] under the distribution that each row of `hidden` [N, H] gives: [N, H]."""
    parts = [finish_logits(rows @ head.t()).softmax(-1) @ head for rows in hidden.split(_LOGITS_ROWS)]
    return torch.cat(parts)
