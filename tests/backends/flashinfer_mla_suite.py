"""What holds of the FlashInfer backend for latent caches on any device. Fixtures as in flashinfer_suite."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import AttentionBackend
from backends.flashinfer_mla import FlashInferMLABackend
from backends.forward import ForwardMode, forward_context
from backends.torch_native import TorchNativeBackend
from tests.backends.flashinfer_suite import FP8, TOLERANCE, Make
from tests.backends.streams import Layer, Streams

NOPE, VALUE = 128, 128


@dataclass(frozen=True)
class LatentLayer(Layer):
    """Entries of 128 or 512 numbers and 64 rotated ones, of which keys of 192 and values of 128 are made."""

    num_heads: int = 4
    num_kv_heads: int = 1
    head_dim: int = 192
    v_head_dim: int = 128
    scale: float = 0.05

    def decompress(self, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape = self.num_heads * (NOPE + VALUE), self.v_head_dim
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(entries) / 8
        both = (entries[:, : self.v_head_dim] @ weight.T).unflatten(-1, (self.num_heads, -1))
        rope = entries[:, None, self.v_head_dim :].expand(-1, self.num_heads, -1)
        return torch.cat((both[..., :NOPE], rope), -1), both[..., NOPE:]


LAYER = LatentLayer()
WIDE = LatentLayer(head_dim=576, v_head_dim=512)


def streams(
    layer: LatentLayer, lengths: list[int], device: torch.device, pool: torch.dtype | None = None
) -> Streams:
    return Streams(layer, lengths, torch.bfloat16, pool, device=device, latent=True)


class Prompts:
    """Streams fed by MHA, whose queries are as wide as the decompressed keys."""

    def __init__(self, fed: Streams) -> None:
        self.fed = fed
        random = torch.Generator().manual_seed(2)
        shapes = [(length, fed.layer.num_heads, NOPE + 64) for length in fed.lengths]
        self.query = [
            torch.randn(shape, generator=random).to(fed.slot_table.device, torch.bfloat16) for shape in shapes
        ]

    def feed(self, backend: AttentionBackend, counts: Mapping[int, int]) -> dict[int, torch.Tensor]:
        fed, batch = self.fed, self.fed.batch(counts)
        with forward_context(batch, backend) as context:
            out = backend.forward_mha(
                fed.rows(self.query, batch), fed.rows(fed.key, batch), fed.layer, batch, context.plan
            )
        for s, count in counts.items():
            fed.done[s] += count
        return dict(zip(counts, out.split(batch.query_lens), strict=True))

    def expected(self, s: int, start: int, stop: int) -> torch.Tensor:
        """By the formula, in float64."""
        key, value = self.fed.layer.decompress(self.fed.key[s][:stop].squeeze(1).double())
        scores = torch.einsum("qhd,khd->hqk", self.query[s][start:stop].double(), key) * self.fed.layer.scale
        later = torch.arange(stop) > torch.arange(start, stop)[:, None]
        weights = scores.masked_fill(later.to(scores.device), float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[torch.bfloat16]
    torch.testing.assert_close(actual.double(), expected.double(), atol=tolerance, rtol=tolerance)


@settings(max_examples=6, deadline=None)
@given(cut=st.integers(1, 49), causal=st.booleans())
def test_mqa_equals_dense_attention(device: torch.device, make: Make, cut: int, causal: bool) -> None:
    """A prompt, then the rest of it beside a short one, then a block to verify beside a decode row."""
    fed = streams(LAYER, [53, 10], device)
    backend = make(FlashInferMLABackend)
    fed.feed(backend, {0: cut})
    fed.feed(backend, {1: 9, 0: 50 - cut}, causal)
    rows = fed.attend(backend, fed.batch({0: 3, 1: 1}, ForwardMode.TARGET_VERIFY))
    close(rows[0], fed.expected(0, 50, 53))
    close(rows[1], fed.expected(1, 9, 10))


@pytest.mark.parametrize("pool", [torch.bfloat16, FP8], ids=str)
def test_both_methods_equal_torch_native(device: torch.device, make: Make, pool: torch.dtype) -> None:
    """A prompt and a prefix hit by MHA, then blocks by MQA, over entries of real size; fp8 through its scale."""
    if pool == FP8 and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("FlashInfer reads fp8 latents on Hopper only")
    results = []
    for backend in (make(FlashInferMLABackend), TorchNativeBackend()):
        fed = streams(WIDE, [70, 40], device, pool)
        fed.pool.key_scale[1] = 2.0**-4
        prompts = Prompts(fed)
        passes = [prompts.feed(backend, {0: 40}), prompts.feed(backend, {1: 36, 0: 24})]
        passes.append(fed.attend(backend, fed.batch({0: 5, 1: 4}, ForwardMode.TARGET_VERIFY)))
        results.append([torch.cat(list(rows.values())) for rows in passes])
    for ours, native in zip(*results, strict=True):
        close(ours, native)


@pytest.mark.parametrize("chunk", [3, 7, 1000])
def test_a_prefix_is_merged_from_chunks(device: torch.device, make: Make, chunk: int) -> None:
    """With `chunk` positions of a sequence in each. One sequence has no prefix, and one a long one."""
    backend = make(FlashInferMLABackend, prefix_bytes=chunk * 2 * LAYER.num_heads * (NOPE + 64 + VALUE) * 2)
    fed = streams(LAYER, [30, 12, 25], device)
    prompts = Prompts(fed)
    prompts.feed(backend, {0: 20, 2: 3})
    rows = prompts.feed(backend, {1: 12, 0: 10, 2: 22})
    for s, start in ((0, 20), (1, 0), (2, 3)):
        close(rows[s], prompts.expected(s, start, fed.lengths[s]))


def test_a_latent_pass_without_tokens_gives_no_rows(device: torch.device, make: Make) -> None:
    fed = streams(LAYER, [4], device)
    backend = make(FlashInferMLABackend)
    assert fed.attend(backend, fed.batch({0: 0}, ForwardMode.IDLE))[0].shape == (0, 4, 128)
