"""The FlashInfer backend for latent caches through a stand-in for the package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from backends.base import Workspace
from backends.flashinfer_mla import MHA_ROWS, FlashInferMLABackend, handler, unusable
from backends.forward import ForwardMode
from backends.handlers import AttnForwardMethod
from backends.kv_pool import KVLayout
from tests.backends.flashinfer_mla_suite import (
    LAYER,
    Prompts,
    streams,
    test_a_latent_pass_without_tokens_gives_no_rows,
    test_a_prefix_is_merged_from_chunks,
    test_both_methods_equal_torch_native,
    test_mqa_equals_dense_attention,
)
from tests.backends.flashinfer_stand_in import StandIn
from tests.backends.streams import Streams

__all__ = [
    "test_a_latent_pass_without_tokens_gives_no_rows",
    "test_a_prefix_is_merged_from_chunks",
    "test_both_methods_equal_torch_native",
    "test_mqa_equals_dense_attention",
]

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def device() -> torch.device:
    return CPU


@pytest.fixture(scope="module")
def make() -> Callable[..., Any]:
    stand_in = StandIn()
    return lambda backend, **options: backend(CPU, Workspace(CPU), stand_in, stand_in.Event, **options)


class TestCalls:
    """Two sequences, of 5 and 3 tokens, in a slot table whose rows are known."""

    @pytest.fixture
    def fed(self) -> Streams:
        fed = streams(LAYER, [5, 3], CPU)
        fed.slot_table.copy_(torch.tensor([[9, 4, 7, 2, 8], [1, 12, 3, 0, 0]]))
        return fed

    @pytest.fixture
    def stand_in(self) -> StandIn:
        return StandIn()

    @pytest.fixture
    def backend(self, stand_in: StandIn) -> FlashInferMLABackend:
        return FlashInferMLABackend(CPU, Workspace(CPU), stand_in, stand_in.Event)

    def test_mqa_has_a_page_for_each_slot(
        self, stand_in: StandIn, backend: FlashInferMLABackend, fed: Streams
    ) -> None:
        fed.cache({0: 3, 1: 2})
        fed.attend(backend, fed.batch({0: 2, 1: 1}, ForwardMode.TARGET_VERIFY))
        (tables,) = stand_in.named("MLAPlanMetadata.csr")
        assert tables["qo_indptr"].tolist() == [0, 2, 3]
        assert tables["kv_indptr"].tolist() == [0, 5, 8]
        assert tables["kv_indices"].tolist() == [9, 4, 7, 2, 8, 1, 12, 3]
        assert tables["kv_len_arr"].tolist() == [5, 3]
        (plan,) = stand_in.named("BatchMLAPagedAttentionWrapper.plan")
        assert (plan["num_heads"], plan["head_dim_ckv"], plan["head_dim_kpe"]) == (4, 128, 64)
        assert plan["causal"] and plan["page_size"] == 1 and plan["scale_mode"] == "default"

    def test_mha_without_a_prefix_is_one_ragged_call(
        self, stand_in: StandIn, backend: FlashInferMLABackend, fed: Streams
    ) -> None:
        Prompts(fed).feed(backend, {1: 3, 0: 5})
        (plan,) = stand_in.named("BatchPrefillWithRaggedKVCacheWrapper.plan")
        assert plan["qo_indptr"].tolist() == plan["kv_indptr"].tolist() == [0, 3, 8]
        assert (plan["num_qo_heads"], plan["num_kv_heads"]) == (4, 4)
        assert (plan["head_dim_qk"], plan["head_dim_vo"], plan["causal"]) == (192, 128, True)
        assert not stand_in.named("merge_state")

    def test_mha_with_a_prefix_sees_all_of_that(
        self, stand_in: StandIn, backend: FlashInferMLABackend, fed: Streams
    ) -> None:
        fed.cache({0: 3})
        Prompts(fed).feed(backend, {1: 3, 0: 2})
        own, prefix = stand_in.named("BatchPrefillWithRaggedKVCacheWrapper.plan")
        assert own["causal"] and own["kv_indptr"].tolist() == [0, 3, 5]
        assert not prefix["causal"] and prefix["qo_indptr"].tolist() == [0, 3, 5]
        assert prefix["kv_indptr"].tolist() == [0, 0, 3]
        assert len(stand_in.named("merge_state")) == 1

    def test_layers_share_what_is_planned(
        self, stand_in: StandIn, backend: FlashInferMLABackend, fed: Streams
    ) -> None:
        fed.cache({0: 3})
        prompts, batch = Prompts(fed), fed.batch({0: 2})
        plan = backend.plan(batch)
        for _ in range(3):
            backend.forward_mha(fed.rows(prompts.query, batch), fed.rows(fed.key, batch), LAYER, batch, plan)
        assert len(stand_in.named("BatchPrefillWithRaggedKVCacheWrapper.plan")) == 2
        assert len(stand_in.named("BatchPrefillWithRaggedKVCacheWrapper.run")) == 6


class TestHandler:
    """Which method a pass over one sequence takes."""

    def method(self, cached: int, queries: int, mode: ForwardMode = ForwardMode.EXTEND) -> AttnForwardMethod:
        fed = streams(LAYER, [600], CPU)
        fed.done = [cached]
        return handler(fed.batch({0: queries}, mode))

    def test_a_cold_prompt_is_decompressed(self) -> None:
        assert self.method(0, 3) is AttnForwardMethod.MHA

    def test_a_prefix_is_decompressed_for_many_rows_only(self) -> None:
        assert self.method(300, MHA_ROWS) is AttnForwardMethod.MHA
        assert self.method(300, MHA_ROWS - 1) is AttnForwardMethod.MQA

    @pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.MIXED])
    def test_what_is_no_prompt_is_absorbed(self, mode: ForwardMode) -> None:
        assert self.method(0, 300, mode) is AttnForwardMethod.MQA


class TestUnusable:
    @pytest.mark.parametrize(
        ("head_dim", "v_head_dim", "reason"),
        [(64, 64, "latent KV caches only"), (40, 0, "multiple of 128"), (160, 0, "multiple of 128")],
    )
    def test_a_layout_without_kernels(self, head_dim: int, v_head_dim: int, reason: str) -> None:
        layout = KVLayout(1, 1, head_dim, v_head_dim, torch.bfloat16)
        assert reason in (unusable(torch.device("cuda"), layout) or "")

    def test_a_cpu(self) -> None:
        assert unusable(CPU, KVLayout(1, 1, 576, 0, torch.bfloat16)) == "it needs CUDA"
