"""A model with recurrent state through the whole application: its commit is detected whatever is built first."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from dependency_injector import providers

from app.lifecycle import Lifecycle
from backends.linear_attention import HybridLinearBackend
from backends.setup import AttentionBackends, build_attention_backends
from containers.application import ApplicationContainer
from containers.startup import StartUp, StartUpError
from engine.runner import ModelRunner
from speculative.worker import SpeculativeWorker
from tests.containers.test_application import complete, complete_in_turn, make_container
from tests.lossless import AlwaysPays
from tests.models.checkpoints import make_checkpoint as make_plain_checkpoint
from tests.models.hybrid_checkpoints import make_checkpoint
from tests.tiny_model import save_tiny_model

PROMPT = "again and again and again and again and again and"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target with recurrent state and a drafter without, both with the tokenizer of the tiny model."""
    made = {name: tmp_path_factory.mktemp(name) for name in ("tiny", "target", "draft")}
    save_tiny_model(made["tiny"])
    make_checkpoint("granite-hybrid", made["target"])
    make_plain_checkpoint("llama", made["draft"])
    for name in ("target", "draft"):
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(made["tiny"] / file, made[name] / file)
    return made


def hybrid(folders: dict[str, Path], algorithm: str, **settings: Any) -> ApplicationContainer:
    container = make_container(folders["target"], speculative_algorithm=algorithm, **settings)
    container.controller.override(providers.Singleton(AlwaysPays))
    return container


def started(container: ApplicationContainer) -> SpeculativeWorker:
    """The worker, and what it has found out, while everything is up."""

    async def start() -> SpeculativeWorker:
        async with container.startup().run():
            worker = container.worker()
            assert isinstance(worker, SpeculativeWorker)
            return worker

    return anyio.run(start)


@pytest.mark.parametrize(
    "order",
    [
        ("worker", "target.runner", "startup", "engine"),
        ("engine", "worker", "startup", "target.runner"),
        ("startup", "target.runner", "engine", "worker"),
        ("draft.runner", "worker", "target.runner", "startup", "engine"),
    ],
    ids=lambda order: order[0],
)
def test_the_commit_is_detected_in_any_order_of_construction(
    folders: dict[str, Path], order: tuple[str, ...]
) -> None:
    container = hybrid(folders, "ngram")
    if "draft.runner" in order:
        container = hybrid(folders, "standalone", speculative_draft_model_path=str(folders["draft"]))
    for name in order:
        scope = container
        *scopes, part = name.split(".")
        for inner in scopes:
            scope = getattr(scope, inner)
        getattr(scope, part)()
    worker = container.worker()
    assert isinstance(worker, SpeculativeWorker)
    assert not worker.need_mamba_verify_commit
    assert started(container) is worker
    assert worker.need_mamba_verify_commit


def test_the_commit_of_a_backend_that_is_made_late_is_detected(folders: dict[str, Path]) -> None:
    built: list[AttentionBackends] = []

    def late(**arguments: Any) -> AttentionBackends:
        worker = container.worker()  # there long before its backend is
        assert isinstance(worker, SpeculativeWorker) and not worker.need_mamba_verify_commit
        built.append(build_attention_backends(**arguments))
        return built[-1]

    container = hybrid(folders, "ngram")
    container.worker()
    with container.target.attention_backends.override(providers.Callable(late)):
        assert started(container).need_mamba_verify_commit
    assert isinstance(built[0].attn_backend, HybridLinearBackend)


def test_a_target_that_only_attends_commits_nothing(folders: dict[str, Path]) -> None:
    assert not started(make_container(folders["tiny"])).need_mamba_verify_commit


class Noting:
    """A runner whose end is written down."""

    def __init__(self, runner: ModelRunner, log: list[str]) -> None:
        self._runner, self._log = runner, log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def close(self) -> None:
        self._log.append(self._runner.role)
        self._runner.close()


class Undetectable(HybridLinearBackend):
    def mamba_commit(self) -> Any:
        raise ValueError("no answer")


def undetectable(**arguments: Any) -> AttentionBackends:
    return build_attention_backends(**{**arguments, "wrap": Undetectable})


def failing(*_: Any, **__: Any) -> Any:
    raise ValueError("no answer")


@pytest.mark.parametrize(
    ("part", "made", "where", "closed"),
    [
        ("target.model", failing, "runner of the target", []),
        ("draft.model", failing, "runner of the draft", ["target"]),
        ("target.state_pool", failing, "attention_backends of the target", ["draft", "target"]),
        ("draft.attention_backends", failing, "attention_backends of the draft", ["draft", "target"]),
        ("target.attention_backends", undetectable, "mamba_commit of the generation", ["draft", "target"]),
        ("target.graphs", failing, "graphs of the target", ["draft", "target"]),
        ("draft.graphs", failing, "graphs of the draft", ["draft", "target"]),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value else "",
)
def test_readiness_says_at_which_hook_start_up_stopped_and_what_was_made_is_closed_in_reverse(
    folders: dict[str, Path], part: str, made: Callable[..., Any], where: str, closed: list[str]
) -> None:
    container = hybrid(folders, "standalone", speculative_draft_model_path=str(folders["draft"]))
    scope, name = part.split(".")
    log: list[str] = []

    getattr(getattr(container, scope), name).override(providers.Callable(made))
    startup = StartUp(lambda: [Noting(runner, log) for runner in container.runners()], container.worker)
    lifecycle = Lifecycle(startup, container.engine)
    with pytest.raises(StartUpError):
        anyio.run(lifecycle.run)
    assert log == closed
    assert all(container.runners()[role == "draft"].stage == "closed" for role in closed)
    assert (lifecycle.ready, lifecycle.stage) == (False, "failed")
    assert lifecycle.error == f"start-up failed at {where} worker: no answer"
    assert startup.stage == where.split()[0]


def test_a_second_request_goes_on_from_a_checkpoint_of_the_first(folders: dict[str, Path]) -> None:
    container = hybrid(folders, "ngram", mamba_track_interval=16)
    text = PROMPT * 2
    sampled = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, "logprobs": 1}
    first, second = complete_in_turn(container, [text, text], **sampled)
    assert second.events[-1].cached_tokens == (second.events[-1].prompt_tokens - 1) // 16 * 16 > 0
    assert first.token_ids == second.token_ids
    logprobs, again = (
        [logprob for event in answer.events for logprob in event.logprobs] for answer in (first, second)
    )
    assert logprobs == again


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_speculation_changes_nothing(folders: dict[str, Path], temperature: float) -> None:
    sampled = {"max_tokens": 30, "temperature": temperature, "seed": 5, "ignore_eos": True}
    expected = complete(hybrid(folders, "none"), PROMPT, **sampled).token_ids
    assert len(expected) == 30
    assert complete(hybrid(folders, "ngram"), PROMPT, **sampled).token_ids == expected
    standalone = hybrid(folders, "standalone", speculative_draft_model_path=str(folders["draft"]))
    standalone.controller.override(AlwaysPays())
    answered = complete(standalone, PROMPT, **sampled)
    assert answered.token_ids == expected
    speculation = answered.events[-1].speculation
    assert speculation is not None and speculation.drafted_tokens > 0
