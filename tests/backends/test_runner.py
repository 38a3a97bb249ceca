"""A runner's passes go through the backends that its worker resolved, and none of them changes a bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from backends.forward import ForwardMode
from backends.options import AttentionOptions
from backends.registry import BackendError
from backends.setup import build_attention_backends
from engine.options import CacheOptions
from engine.request import Request, SamplingParams
from engine.runner import ModelRunner, Role
from engine.worker import SequenceStep
from models.loader import inspect_model
from models.options import ModelOptions
from tests.backends.fakes import NamedBackend, registry
from tests.models.checkpoints import make_checkpoint

OPTIONS = {
    "plain": AttentionOptions(attention_backend="one"),
    "hybrid": AttentionOptions(prefill_attention_backend="one", decode_attention_backend="two"),
    "two-batch": AttentionOptions(attention_backend="one", enable_two_batch_overlap=True),
    "pd-mux": AttentionOptions(attention_backend="one", enable_pdmux=True, sm_group_num=2),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen2")
    make_checkpoint("qwen2-window", folder)
    return folder


def make_runner(
    model: Path,
    options: AttentionOptions,
    role: Role = "target",
    capture_layers: tuple[int, ...] = (),
    capture_graph: Callable[..., None] = lambda *_: None,
    slots: int = 256,
    requests: int = 4,
) -> ModelRunner:
    model_options = ModelOptions(model=str(model), dtype="float32", device="cpu")
    return ModelRunner(
        role,
        inspect_model(model_options),
        model_options,
        CacheOptions(max_total_tokens=slots),
        options,
        max_running_requests=requests,
        capture_layers=capture_layers,
        build_backends=partial(build_attention_backends, specs=registry()),
        capture_graph=capture_graph,
    )


def started(runner: ModelRunner) -> ModelRunner:
    runner.load()
    runner.init_attention_backends()
    return runner


def request(runner: ModelRunner, index: int, prompt: list[int]) -> Request:
    """A running request with slots of its own."""
    made = Request(str(index), prompt, SamplingParams(), lambda event: None)
    assert runner.slot_table is not None
    made.table_row = runner.slot_table.acquire()
    made.slots = list(range(index * 60, index * 60 + 60))
    runner.slot_table.write(made.table_row, 0, made.slots)
    return made


def passes(runner: ModelRunner) -> tuple[list[ForwardMode], list[torch.Tensor]]:
    """A prompt; a decode row beside another prompt's chunk; two rows to decode; a block to verify."""
    first, second = request(runner, 0, list(range(3, 25))), request(runner, 1, list(range(40, 60)))
    modes, logits = [], []

    def run(*steps: SequenceStep) -> None:
        batch = runner.batch(steps)
        modes.append(batch.mode)
        logits.append(runner.forward(batch).logits)
        for step in steps:
            step.request.cached_len += step.num_tokens
            if step.samples:
                step.request.output_ids.append(7)

    run(SequenceStep(first, 22, True))
    run(SequenceStep(first, 1, True), SequenceStep(second, 12, False))
    run(SequenceStep(first, 1, True), SequenceStep(second, 8, True))
    run(SequenceStep(first, 1, True), SequenceStep(second, 1, True))
    run(SequenceStep(first, 1, True, (9, 8, 7)), SequenceStep(second, 1, True))
    return modes, logits


@pytest.mark.parametrize("variant", OPTIONS)
def test_every_way_to_build_gives_the_same_logits(model: Path, variant: str) -> None:
    modes, expected = passes(started(make_runner(model, AttentionOptions())))
    assert modes == [
        ForwardMode.EXTEND,
        ForwardMode.MIXED,
        ForwardMode.MIXED,
        ForwardMode.DECODE,
        ForwardMode.TARGET_VERIFY,
    ]
    _, logits = passes(started(make_runner(model, OPTIONS[variant])))
    assert all(torch.equal(got, wanted) for got, wanted in zip(logits, expected, strict=True))


def test_pdmux_decodes_on_the_groups_backend(model: Path) -> None:
    runner = started(make_runner(model, OPTIONS["pd-mux"]))
    assert runner.decode_attn_backend is runner.decode_attn_backend_group[0]
    passes(runner)
    modes = []
    for backend in (runner.attn_backend, *runner.decode_attn_backend_group):
        assert isinstance(backend, NamedBackend)
        modes.append({batch.mode for batch in backend.seen})
    assert modes == [
        {ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.TARGET_VERIFY},
        {ForwardMode.DECODE},
        set(),
    ]


@pytest.mark.parametrize(("variant", "captures"), [("plain", 1), ("pd-mux", 0)])
def test_pdmux_captures_no_pass_since_that_would_be_bound_to_one_backend(
    model: Path, variant: str, captures: int
) -> None:
    captured: list[object] = []
    runner = started(
        make_runner(model, OPTIONS[variant], capture_graph=lambda *parts: captured.append(parts[2]))
    )
    runner.init_graphs()
    assert captured == [runner.attn_backend] * captures


def test_a_recomputed_output_is_no_prompt(model: Path) -> None:
    runner = started(make_runner(model, AttentionOptions()))
    preempted = request(runner, 0, list(range(3, 13)))
    preempted.output_ids = [5, 6, 7]
    batch = runner.batch([SequenceStep(preempted, 13, True)])
    assert batch.mode is ForwardMode.MIXED
    assert batch.num_prompt_rows == (10,)


@pytest.mark.parametrize("order", [("target", "draft"), ("draft", "target")])
def test_each_worker_describes_its_own_names(model: Path, order: tuple[Role, Role]) -> None:
    options = AttentionOptions(
        prefill_attention_backend="one",
        decode_attention_backend="two",
        speculative_draft_attention_backend="torch_native",
    )
    runners = {role: started(make_runner(model, options, role)) for role in order}
    names = {
        role: (runner.describe()["prefill_attention_backend"], runner.describe()["decode_attention_backend"])
        for role, runner in runners.items()
    }
    assert names == {"target": ("one", "two"), "draft": ("torch_native", "torch_native")}


@pytest.mark.parametrize("size", [10**15, 10**30])
@pytest.mark.parametrize("setting", ["slots", "requests"])
def test_what_memory_cannot_hold_is_said_by_the_settings(model: Path, setting: str, size: int) -> None:
    runner = make_runner(model, AttentionOptions(), **{setting: size})  # type: ignore[arg-type]
    runner.load()
    with pytest.raises(ValueError, match=f"{size} .*--max-total-tokens.*--max-running-requests"):
        runner.init_attention_backends()


def test_hidden_states_that_the_model_cannot_give_are_refused_before_backends_are_built(model: Path) -> None:
    able = started(make_runner(model, AttentionOptions(), capture_layers=(0, 1)))
    assert able.attn_backend is not None
    last = able.files.config.num_layers - 1
    runner = make_runner(model, AttentionOptions(), capture_layers=(last, last + 1))
    runner.load()
    with pytest.raises(BackendError, match=f"Qwen2.* cannot give .* layers {last + 1}: it captures"):
        runner.init_attention_backends()
    assert runner.attn_backend is None
