"""A target and a drafter on FlashInfer's two backends in one process, through stand-ins for the package.

In the engine that the first seed is about, the drafter's start-up changed what the target ran, and an MLA target with a
drafter on `flashinfer` crashed at a prefix-cache hit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from dependency_injector import providers
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from app.lifecycle import Lifecycle
from app.settings import EngineSettings
from backends.flashinfer import FlashInferBackend
from backends.flashinfer_mla import MHA_ROWS, FlashInferMLABackend, handler
from backends.forward import ForwardMode, forward_context
from backends.kv_pool import KVLayout, KVPool
from backends.options import AttentionOptions
from backends.registry import BackendSpec, BackendSpecs, installed_specs
from backends.setup import AttentionBackends, Role, build_attention_backends
from backends.torch_native import TorchNativeBackend
from containers.application import ApplicationContainer
from engine.request import Request, SamplingParams
from models.base import CausalLM
from models.loader import inspect_model, load_model
from models.options import ModelOptions
from models.weights import Precision
from tests.backends.flashinfer_stand_in import StandIn
from tests.engine.fakes import Receiver
from tests.models.dflash_reference import make_drafter
from tests.models.harness import Sequences
from tests.tiny_model import save_tiny_model

CPU = torch.device("cpu")
OPTIONS = AttentionOptions(
    attention_backend="flashinfer_mla", speculative_draft_attention_backend="flashinfer"
)
MHA_CALLS = {"BatchPrefillWithRaggedKVCacheWrapper.run", "merge_state"}
MQA_CALLS = {"BatchMLAPagedAttentionWrapper.run"}
PAGED_CALLS = {"BatchPrefillWithPagedKVCacheWrapper.run", "BatchDecodeWithPagedKVCacheWrapper.run"}
SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
}


def save(reference: PreTrainedModel, folder: Path) -> None:
    """`reference` with weights drawn large enough to matter."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    reference.save_pretrained(folder)


def load(reference: PreTrainedModel, folder: Path) -> CausalLM:
    """`reference` as Tandem loads it."""
    save(reference, folder)
    files = inspect_model(ModelOptions(model=str(folder)))
    return load_model(files, CPU, Precision(torch.float32, False)).eval()


def latent_model(**changes: Any) -> PreTrainedModel:
    """With entries as wide as FlashInfer's kernels want them."""
    config = DeepseekV3Config(
        **{**SHAPE, **changes},
        moe_intermediate_size=32,
        q_lora_rank=32,
        kv_lora_rank=128,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
    )
    return DeepseekV3ForCausalLM(config)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    return load(latent_model(), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    config = Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=64)
    return load(Qwen3ForCausalLM(config), tmp_path_factory.mktemp("draft"))


def specs_over(stand_in: StandIn) -> BackendSpecs:
    """The installed backends, but FlashInfer's run here, over a stand-in."""
    return {
        **installed_specs(),
        "flashinfer": BackendSpec(
            lambda args: FlashInferBackend(args.device, args.workspace, stand_in, stand_in.Event),
            lambda device, layout: "no kernels" if layout.is_latent else None,
            inexact=installed_specs()["flashinfer"].inexact,
        ),
        "flashinfer_mla": BackendSpec(
            lambda args: FlashInferMLABackend(args.device, args.workspace, stand_in, stand_in.Event),
            lambda device, layout: None if layout.is_latent else "no kernels",
            handler,
        ),
    }


class Worker(Sequences):
    """A model on backends of its own, over a float16 cache. `called` is what it has called of FlashInfer."""

    def __init__(self, role: Role, model: CausalLM) -> None:
        super().__init__(model, rows=2, length=500)
        self.stand_in = StandIn()
        self.pool = KVPool(model.kv_layout(torch.float16), self.pool.num_slots, CPU)
        self.backends: AttentionBackends = build_attention_backends(
            options=OPTIONS,
            role=role,
            device=CPU,
            layout=self.pool.layout,
            specs=specs_over(self.stand_in),
        )
        self.native = TorchNativeBackend()

    def called(self) -> set[str]:
        names = {name for name, _ in self.stand_in.calls if name.endswith(".run") or name == "merge_state"}
        self.stand_in.calls.clear()
        return names

    def share(self, length: int) -> None:
        """Let the second row begin with the first one's slots, as a prefix-cache hit does."""
        self.slot_table[1, :length] = self.slot_table[0, :length]
        self.lengths[1] = length

    def step(
        self, tokens: Mapping[int, Sequence[int]], prompts: Mapping[int, int] | None = None
    ) -> torch.Tensor:
        """Logits of a pass, and the same through torch-native in a pool that holds the same: they must agree."""
        prompts = prompts or {}
        batch = self._batch(tokens)
        prompt_rows = tuple(prompts.get(row, 0) for row in tokens)
        mode = ForwardMode.EXTEND if prompt_rows == batch.query_lens else ForwardMode.MIXED
        batch = dataclasses.replace(batch, mode=mode, num_prompt_rows=prompt_rows)
        before = self.pool.key.clone(), self.pool.value.clone()
        results = []
        for backend in (self.native, self.backends.attn_backend):
            self.pool.key.copy_(before[0])
            self.pool.value.copy_(before[1])
            with torch.inference_mode(), forward_context(batch, backend):
                results.append(self.model.logits(self.model(batch).last))
        native, ours = results
        assert native.std() > 0.3, "a reference this flat would prove nothing"
        torch.testing.assert_close(ours, native, atol=2e-2, rtol=0)
        return ours


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(3, 250, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("order", [("target", "draft"), ("draft", "target")])
def test_an_mla_target_takes_its_own_kernels_at_a_prefix_hit(
    target: CausalLM, draft: CausalLM, order: tuple[Role, Role]
) -> None:
    """Whichever worker was built last, and with a pass of the drafter between any two of the target's."""
    models = {"target": target, "draft": draft}
    workers = {role: Worker(role, models[role]) for role in order}
    ours, drafter = workers["target"], workers["draft"]
    assert ours.backends.prefill_attention_backend_str == "flashinfer_mla"
    assert drafter.backends.prefill_attention_backend_str == "flashinfer"

    ours.step({0: tokens(90, 0)}, {0: 90})
    assert ours.called() == MHA_CALLS - {"merge_state"}
    drafter.step({0: tokens(90, 0)}, {0: 90})
    assert drafter.called() == {"BatchPrefillWithPagedKVCacheWrapper.run"}

    for worker in (ours, drafter):
        worker.share(80)
    many = tokens(MHA_ROWS, 1)
    ours.step({1: many}, {1: len(many)})
    assert ours.called() == MHA_CALLS
    drafter.step({1: many, 0: [7]}, {1: len(many)})
    assert drafter.called() == PAGED_CALLS

    ours.step({0: [7, 8, 9, 10], 1: [5]})
    assert ours.called() == MQA_CALLS
    drafter.step({0: [8], 1: [5]})
    assert drafter.called() == {"BatchDecodeWithPagedKVCacheWrapper.run"}


def test_a_few_rows_behind_a_hit_and_decode_beside_them_are_absorbed(target: CausalLM) -> None:
    worker = Worker("target", target)
    worker.step({0: tokens(90, 0)}, {0: 90})
    worker.share(80)
    worker.called()
    worker.step({1: tokens(12, 2), 0: [3]}, {1: 12})
    assert worker.called() == MQA_CALLS


def serve(container: ApplicationContainer, prompts: Sequence[str]) -> list[list[int]]:
    """Start everything up, serve one greedy request after another, and stop. Returns their tokens."""

    async def run() -> list[list[int]]:
        lifecycle = Lifecycle(container.startup(), container.engine)
        answers = []
        async with anyio.create_task_group() as tasks:
            await tasks.start(lifecycle.run)
            for number, prompt in enumerate(prompts):
                receiver = Receiver()
                sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
                ids = container.tokenizer().encode(prompt)
                container.engine().submit(Request(str(number), ids, sampling, receiver))
                await anyio.to_thread.run_sync(receiver.wait)
                answers.append(receiver.token_ids)
            lifecycle.stop()
        return answers

    return anyio.run(run)


def test_the_application_serves_the_seeds_case(tmp_path: Path) -> None:
    """MLA target, DFlash drafter on flashinfer, by flags; the second prompt begins with the first one."""
    model, drafter = tmp_path / "model", tmp_path / "drafter"
    model.mkdir()
    save_tiny_model(model)
    save(latent_model(vocab_size=257, bos_token_id=None, eos_token_id=256, pad_token_id=None), model)
    make_drafter(
        drafter,
        vocab_size=257,
        head_dim=64,
        num_target_layers=2,
        block_size=4,
        dflash_config={"target_layer_ids": [0, 1]},
    )
    settings: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "device": "cpu",
        "max_total_tokens": 600,
        "kv_cache_dtype": "float16",
    }
    prompts = ["a prompt of some tokens, and " * 3, "a prompt of some tokens, and " * 3 + "x" * MHA_ROWS]
    expected = serve(ApplicationContainer(settings=EngineSettings(**settings)), prompts)

    container = ApplicationContainer(
        settings=EngineSettings(
            **settings,
            attention_backend="flashinfer_mla",
            speculative_algorithm="dflash",
            speculative_draft_model_path=str(drafter),
            speculative_draft_attention_backend="flashinfer",
            speculative_draft_kv_cache_dtype="bfloat16",
        )
    )
    called: dict[str, StandIn] = {"target": StandIn(), "draft": StandIn()}
    for role, worker in (("target", container.target), ("draft", container.draft)):
        build = partial(build_attention_backends, specs=specs_over(called[role]))
        worker.attention_backends.override(providers.Callable(build))
    assert serve(container, prompts) == expected

    assert called["target"].named("BatchMLAPagedAttentionWrapper.run")
    assert called["target"].named("merge_state"), "no prefix was hit"
    assert not called["target"].named("BatchPrefillWithPagedKVCacheWrapper.run")
    assert not called["draft"].named("BatchMLAPagedAttentionWrapper.run")
    blocks = called["draft"].named("BatchPrefillWithPagedKVCacheWrapper.plan")
    assert blocks and not any(plan["causal"] for plan in blocks)


def test_start_up_says_that_a_targets_rows_depend_on_their_company(
    caplog: pytest.LogCaptureFixture,
) -> None:
    layout = KVLayout(1, 1, 64, 64, torch.float16)
    for role, expected in (("target", 1), ("draft", 0)):
        caplog.clear()
        build_attention_backends(
            options=AttentionOptions(attention_backend="flashinfer"),
            role=role,
            device=CPU,
            layout=layout,
            specs=specs_over(StandIn()),
        )
        assert sum("on 'flashinfer', prompts" in record.getMessage() for record in caplog.records) == expected
