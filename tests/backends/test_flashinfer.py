"""The FlashInfer backends through a stand-in for the package: their calls, their tables, their results."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

import pytest
import torch

from backends.base import Workspace
from backends.flashinfer import FlashInferBackend, unusable
from backends.flashinfer_staging import WORKSPACE_BYTES
from backends.forward import ForwardMode
from backends.kv_pool import KVLayout
from backends.registry import BackendError, installed_specs, usable_spec
from tests.backends.flashinfer_signatures import read, recorded
from tests.backends.flashinfer_stand_in import PagedDecode, StandIn
from tests.backends.flashinfer_suite import (
    LAYERS,
    test_a_float32_model_is_computed_in_the_format_of_its_cache,
    test_a_mixed_pass_equals_torch_native,
    test_a_pass_without_tokens_gives_no_rows,
    test_an_fp8_cache_is_read_through_its_scales,
    test_equals_dense_attention,
    test_under_mode_decode_verified_rows_are_those_of_decode,
)
from tests.backends.streams import Layer, Streams

__all__ = [
    "test_a_float32_model_is_computed_in_the_format_of_its_cache",
    "test_a_mixed_pass_equals_torch_native",
    "test_a_pass_without_tokens_gives_no_rows",
    "test_an_fp8_cache_is_read_through_its_scales",
    "test_equals_dense_attention",
    "test_under_mode_decode_verified_rows_are_those_of_decode",
]

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


@pytest.fixture(scope="module")
def device() -> torch.device:
    return CPU


@pytest.fixture(scope="module")
def stand_in() -> StandIn:
    return StandIn()


@pytest.fixture(scope="module")
def make(stand_in: StandIn) -> Callable[..., Any]:
    return lambda backend: backend(CPU, Workspace(CPU), stand_in, stand_in.Event)


@pytest.fixture
def fresh() -> StandIn:
    """One whose calls are those of the test."""
    return StandIn()


def backend_on(stand_in: StandIn) -> FlashInferBackend:
    return FlashInferBackend(CPU, Workspace(CPU), stand_in, stand_in.Event)


class TestSignatures:
    def test_the_file_is_that_of_the_installed_package(self) -> None:
        try:
            package = distribution("flashinfer-python")
        except PackageNotFoundError:
            pytest.skip("flashinfer-python is not installed")
        of_package = read(lambda path: package.locate_file(path).read_text())
        if package.version == recorded()["version"]:
            assert of_package == {
                name: [tuple(p) for p in ps] for name, ps in recorded()["callables"].items()
            }
        for name, parameters in recorded()["callables"].items():
            assert {p[0] for p in parameters} <= {p[0] for p in of_package[name]}, name

    def test_a_call_that_the_package_does_not_take_fails(self, fresh: StandIn) -> None:
        with pytest.raises(TypeError, match="unexpected keyword argument 'page'"):
            fresh.BatchPrefillWithPagedKVCacheWrapper(torch.empty(16, dtype=torch.uint8), page=1)
        with pytest.raises(TypeError, match="missing a required argument"):
            fresh.merge_state(torch.empty(1))


class TestTables:
    """Two sequences, of 5 and 3 tokens, in a slot table whose rows are known."""

    @pytest.fixture
    def fed(self) -> Streams:
        fed = Streams(LAYERS["grouped"], [5, 3], torch.bfloat16)
        fed.slot_table.copy_(torch.tensor([[9, 4, 7, 2, 8], [1, 12, 3, 0, 0]]))
        return fed

    def test_of_a_prefill_say_where_queries_and_keys_are(self, fresh: StandIn, fed: Streams) -> None:
        backend = backend_on(fresh)
        fed.feed(backend, {0: 3})
        fed.feed(backend, {1: 3, 0: 2})
        call = fresh.named("BatchPrefillWithPagedKVCacheWrapper.plan")[-1]
        assert call["qo_indptr"].tolist() == [0, 3, 5]
        assert call["paged_kv_indptr"].tolist() == [0, 3, 8]
        assert call["paged_kv_indices"].tolist() == [1, 12, 3, 9, 4, 7, 2, 8]
        assert call["paged_kv_last_page_len"].tolist() == [1, 1]
        assert (call["num_qo_heads"], call["num_kv_heads"], call["head_dim_qk"], call["page_size"]) == (
            6,
            2,
            64,
            1,
        )
        assert call["causal"] and call["custom_mask"] is None
        assert call["q_data_type"] == call["kv_data_type"] == call["o_data_type"] == torch.bfloat16
        assert call["sm_scale"] == 0.125

    def test_of_decode_have_a_request_a_row(self, fresh: StandIn, fed: Streams) -> None:
        fed.cache({0: 4, 1: 2})
        fed.feed(backend_on(fresh), {0: 1, 1: 1})
        call = fresh.named("BatchDecodeWithPagedKVCacheWrapper._plan_impl")[-1]
        assert call["indptr"].tolist() == [0, 5, 8]
        assert call["indices"].tolist() == [9, 4, 7, 2, 8, 1, 12, 3]
        assert call["last_page_len"].tolist() == [1, 1]
        assert call["fixed_split_size"] is not None and not call["disable_split_kv"]

    @pytest.mark.parametrize("mode", ["prefill", "decode"])
    def test_of_a_verify_are_those_of_its_mode(self, fresh: StandIn, fed: Streams, mode: Any) -> None:
        backend = backend_on(fresh)
        backend.stamp("flashinfer", "flashinfer", mode)
        fed.cache({0: 3, 1: 1})
        fed.attend(backend, fed.batch({0: 2, 1: 2}, ForwardMode.TARGET_VERIFY))
        prefills = fresh.named("BatchPrefillWithPagedKVCacheWrapper.plan")
        decodes = fresh.named("BatchDecodeWithPagedKVCacheWrapper._plan_impl")
        assert (len(prefills), len(decodes)) == ((1, 0) if mode == "prefill" else (0, 1))
        if mode == "decode":
            assert decodes[0]["indptr"].tolist() == [0, 4, 9, 11, 14]
            assert decodes[0]["indices"].tolist() == [9, 4, 7, 2, 9, 4, 7, 2, 8, 1, 12, 1, 12, 3]

    def test_a_block_that_sees_itself_both_ways_is_not_causal(self, fresh: StandIn, fed: Streams) -> None:
        fed.cache({0: 2})
        fed.feed(backend_on(fresh), {0: 3}, causal=False)
        call = fresh.named("BatchPrefillWithPagedKVCacheWrapper.plan")[-1]
        assert not call["causal"] and call["custom_mask"] is None

    def test_a_window_over_such_a_block_is_a_mask(self, fresh: StandIn) -> None:
        layer = Layer(num_heads=2, num_kv_heads=2, head_dim=64, v_head_dim=64, sliding_window=3)
        fed = Streams(layer, [5, 2], torch.bfloat16)
        fed.cache({0: 3})
        fed.feed(backend_on(fresh), {0: 2, 1: 2}, causal=False)
        mask = fresh.named("BatchPrefillWithPagedKVCacheWrapper.plan")[-1]["custom_mask"]
        assert mask.int().tolist() == [0, 1, 1, 1, 1, *[0, 0, 1, 1, 1], 1, 1, 1, 1]

    def test_a_window_leaves_out_the_row_itself(self, fresh: StandIn) -> None:
        layer = Layer(num_heads=2, num_kv_heads=2, head_dim=64, v_head_dim=64, sliding_window=3)
        Streams(layer, [9], torch.bfloat16).feed(backend_on(fresh), {0: 9})
        assert fresh.named("BatchPrefillWithPagedKVCacheWrapper.plan")[-1]["window_left"] == 2


class TestPlanning:
    def test_layers_that_are_alike_share_a_plan(self, fresh: StandIn) -> None:
        backend = backend_on(fresh)
        fed = Streams(LAYERS["grouped"], [8], torch.bfloat16)
        batch = fed.batch({0: 8})
        plan = backend.plan(batch)
        windowed = Layer(
            num_heads=6, num_kv_heads=2, head_dim=64, v_head_dim=64, scale=0.125, sliding_window=4
        )
        rows = [fed.rows(tensors, batch) for tensors in (fed.query, fed.key, fed.value)]
        for layer in (fed.layer, windowed, fed.layer, windowed):
            backend.forward(*rows, layer, batch, plan)
        assert len(fresh.named("BatchPrefillWithPagedKVCacheWrapper.plan")) == 2
        assert len(fresh.named("BatchPrefillWithPagedKVCacheWrapper.run")) == 4

    def test_passes_take_turns_on_two_sets_of_wrappers(self, fresh: StandIn) -> None:
        """So that the copies of one pass may still be under way when the next one plans."""
        backend = backend_on(fresh)
        fed = Streams(LAYERS["grouped"], [40], torch.bfloat16)
        for _ in range(5):
            fed.feed(backend, {0: 2})
        assert len(fresh.named("BatchPrefillWithPagedKVCacheWrapper.__init__")) == 2
        assert len(fresh.in_flight) == 2

    def test_plans_under_way_at_once_share_nothing(self, fresh: StandIn) -> None:
        backend = backend_on(fresh)
        fed = Streams(LAYERS["grouped"], [12, 12, 12, 12], torch.bfloat16)
        batches = [fed.batch({s: 12}) for s in range(4)]
        plans = [backend.plan(batch) for batch in batches]
        for _ in range(2):  # two layers, each run for all four passes in turn
            for s, (batch, plan) in enumerate(zip(batches, plans, strict=True)):
                rows = (fed.rows(tensors, batch) for tensors in (fed.query, fed.key, fed.value))
                out = backend.forward(*rows, fed.layer, batch, plan)
                torch.testing.assert_close(out.double(), fed.expected(s, 0, 12), atol=3e-2, rtol=3e-2)
        assert len(fresh.named("BatchPrefillWithPagedKVCacheWrapper.plan")) == 4

    def test_staging_grows_with_the_batch(self, fresh: StandIn) -> None:
        count = 4000
        fed = Streams(LAYERS["grouped"], [3] * count, torch.bfloat16)
        fed.cache(dict.fromkeys(range(count), 2))
        rows = fed.feed(backend_on(fresh), dict.fromkeys(range(count), 1))
        for s in (0, count - 1):
            torch.testing.assert_close(rows[s].double(), fed.expected(s, 2, 3), atol=3e-2, rtol=3e-2)

    def test_decode_has_a_workspace_for_all_its_partial_results(self, fresh: StandIn) -> None:
        class Idle(PagedDecode):
            """Checks at planning that its workspace is large enough, and computes nothing."""

            def run(self, q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
                return torch.zeros_like(q)

        fresh.BatchDecodeWithPagedKVCacheWrapper = partial(Idle, fresh)
        backend = backend_on(fresh)
        backend.stamp("flashinfer", "flashinfer", "decode")
        fed = Streams(
            Layer(num_heads=64, num_kv_heads=16, head_dim=64, v_head_dim=64), [5000], torch.bfloat16
        )
        sizes = []
        for rows in (1, 1, 1000):  # the third pass has the wrapper of the first
            fed.done[0] = 5000 - rows
            fed.attend(backend, fed.batch({0: rows}, ForwardMode.TARGET_VERIFY))
            sizes.append(
                fresh.named("BatchDecodeWithPagedKVCacheWrapper.__init__")[-1][
                    "float_workspace_buffer"
                ].numel()
            )
        assert sizes == [WORKSPACE_BYTES, WORKSPACE_BYTES, 4 * WORKSPACE_BYTES]


class TestUnusable:
    def layout(
        self, head_dim: int = 64, v_head_dim: int = 64, dtype: torch.dtype = torch.bfloat16
    ) -> KVLayout:
        return KVLayout(num_layers=1, num_kv_heads=1, head_dim=head_dim, v_head_dim=v_head_dim, dtype=dtype)

    def test_a_cpu(self) -> None:
        assert unusable(CPU, self.layout()) == "it needs CUDA"

    def test_a_latent_cache(self) -> None:
        assert "flashinfer_mla" in (unusable(CUDA, self.layout(576, 0)) or "")

    @pytest.mark.parametrize(("head_dim", "v_head_dim"), [(80, 80), (192, 128)])
    def test_heads_without_kernels(self, head_dim: int, v_head_dim: int) -> None:
        assert "64, 128, 256" in (unusable(CUDA, self.layout(head_dim, v_head_dim)) or "")

    def test_asked_for_on_a_cpu_it_is_listed_with_the_reason(self) -> None:
        with pytest.raises(BackendError, match="'flashinfer' cannot run on cpu.*flashinfer: it needs CUDA"):
            usable_spec("flashinfer", CPU, self.layout(), installed_specs())
