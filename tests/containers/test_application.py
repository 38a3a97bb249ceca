"""The wiring: each worker has parts of its own, any part can be replaced, and the whole serves a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from dependency_injector import providers

from app.lifecycle import Lifecycle
from app.settings import EngineSettings
from backends.setup import AttentionBackends, build_attention_backends
from containers.application import ApplicationContainer
from engine.plain_worker import PlainWorker
from engine.request import Request, SamplingParams
from speculative.ngram_worker import NgramWorker
from tests.engine.fakes import Receiver
from tests.tiny_model import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


def make_container(model: Path, **settings: Any) -> ApplicationContainer:
    chosen = {"dtype": "float32", "device": "cpu", "max_total_tokens": 512, **settings}
    return ApplicationContainer(settings=EngineSettings(model=str(model), **chosen))


@pytest.fixture
def container(model: Path) -> Iterator[ApplicationContainer]:
    yield make_container(model)


def complete(container: ApplicationContainer, prompt: str, **sampling: Any) -> Receiver:
    """Start everything up, serve one request, and stop."""

    async def serve() -> Receiver:
        lifecycle = Lifecycle(container.startup(), container.engine)
        receiver = Receiver()
        async with anyio.create_task_group() as tasks:
            await tasks.start(lifecycle.run)
            prompt_ids = container.tokenizer().encode(prompt)
            request = Request("r", prompt_ids, SamplingParams(**sampling), receiver)
            container.engine().submit(request)
            await anyio.to_thread.run_sync(receiver.wait)
            lifecycle.stop()
        return receiver

    return anyio.run(serve)


def test_a_worker_has_one_of_each_part(container: ApplicationContainer) -> None:
    assert container.target.runner() is container.target.runner()
    assert container.runners() == [container.target.runner()]


def test_no_two_workers_share_a_part(container: ApplicationContainer) -> None:
    container.draft_model_files.override(container.model_files)
    target, draft = container.target.runner(), container.draft.runner()
    assert (target.role, draft.role) == ("target", "draft")
    for runner in (draft, target):
        runner.load()
        runner.init_attention_backends()
    for part in ("model", "kv_pool", "slot_table", "attn_backend"):
        assert getattr(target, part) is not getattr(draft, part)


@pytest.mark.parametrize(("algorithm", "kind"), [("none", PlainWorker), ("ngram", NgramWorker)])
def test_the_algorithm_selects_the_worker(model: Path, algorithm: str, kind: type) -> None:
    assert type(make_container(model, speculative_algorithm=algorithm).worker()) is kind


def test_constructing_the_parts_loads_nothing_in_whatever_order(model: Path) -> None:
    parts = ("engine", "worker", "tokenizer", "startup", "runners")
    for order in (parts, tuple(reversed(parts))):
        container = make_container(model)
        for part in order:
            getattr(container, part)()
        assert container.target.runner().model is None
        assert container.target.runner().attn_backend is None


def test_it_starts_serves_and_stops(container: ApplicationContainer) -> None:
    receiver = complete(container, "abcabcabc", max_tokens=24, ignore_eos=True)
    assert len(receiver.token_ids) == 24
    assert receiver.events[-1].finish_reason == "length"
    assert container.target.runner().stage == "closed"


def test_the_algorithm_changes_no_token(model: Path) -> None:
    answers = [
        complete(
            make_container(model, speculative_algorithm=algorithm),
            "abcabcabc",
            max_tokens=40,
            temperature=0.0,
        ).token_ids
        for algorithm in ("none", "ngram")
    ]
    assert answers[0] == answers[1]


def test_a_workers_backends_can_be_replaced(container: ApplicationContainer) -> None:
    built: list[AttentionBackends] = []

    def build(**arguments: Any) -> AttentionBackends:
        built.append(build_attention_backends(**arguments))
        return built[-1]

    with container.target.attention_backends.override(providers.Callable(build)):
        complete(container, "abc", max_tokens=2)
    assert len(built) == 1


def test_the_pool_has_the_slots_that_settings_ask_for(model: Path) -> None:
    container = make_container(model, max_total_tokens=96, page_size=16)
    complete(container, "abc", max_tokens=2)
    assert container.engine().stats().slots_total == 96
    assert container.engine().max_context_len == 96
