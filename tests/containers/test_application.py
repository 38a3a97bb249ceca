"""The wiring: each worker has parts of its own, any part can be replaced, and the whole serves a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from dependency_injector import providers

from app.lifecycle import Lifecycle
from app.settings import EngineSettings, SettingsError
from backends.setup import AttentionBackends, build_attention_backends
from containers.application import ApplicationContainer
from engine.plain_worker import PlainWorker
from engine.request import Request, SamplingParams, SpeculationParams
from engine.runner import ModelRunner
from models.base import ModelError
from speculative.drafting_worker import DraftingWorker
from speculative.history import LONGEST_CONTEXT, NgramHistory
from tests.engine.fakes import Receiver
from tests.models.dflash_reference import make_drafter
from tests.tiny_model import save_tiny_model

SAMPLED = {"max_tokens": 40, "temperature": 0.8, "seed": 5}
BLOCKS_OF_FOUR = {"block_size": 4, "dflash_config": {"target_layer_ids": [0]}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


def make_container(model: Path, **settings: Any) -> ApplicationContainer:
    chosen = {"dtype": "float32", "device": "cpu", "max_total_tokens": 512, **settings}
    return ApplicationContainer(settings=EngineSettings(model=str(model), **chosen))


@pytest.fixture
def container(model: Path) -> Iterator[ApplicationContainer]:
    yield make_container(model)


def complete_in_turn(
    container: ApplicationContainer, prompts: Sequence[str], **sampling: Any
) -> list[Receiver]:
    """Start everything up, serve one request after another, and stop."""

    async def serve() -> list[Receiver]:
        lifecycle = Lifecycle(container.startup(), container.engine)
        receivers = [Receiver() for _ in prompts]
        async with anyio.create_task_group() as tasks:
            await tasks.start(lifecycle.run)
            for prompt, receiver in zip(prompts, receivers, strict=True):
                prompt_ids = container.tokenizer().encode(prompt)
                container.engine().submit(Request("r", prompt_ids, SamplingParams(**sampling), receiver))
                await anyio.to_thread.run_sync(receiver.wait)
            lifecycle.stop()
        return receivers

    return anyio.run(serve)


def complete(container: ApplicationContainer, prompt: str, **sampling: Any) -> Receiver:
    """The same for one request."""
    return complete_in_turn(container, [prompt], **sampling)[0]


def test_a_worker_has_one_of_each_part(container: ApplicationContainer) -> None:
    assert container.target.runner() is container.target.runner()
    assert container.runners() == [container.target.runner()]


def with_drafter(model: Path, drafter: Path, algorithm: str, **settings: Any) -> ApplicationContainer:
    chosen = {"speculative_algorithm": algorithm, "speculative_draft_model_path": str(drafter)}
    return make_container(model, **chosen, **settings)


def start_both(container: ApplicationContainer) -> tuple[ModelRunner, ModelRunner]:
    """The target's runner and the drafter's, as start-up brings them up together."""
    both = container.target.runner(), container.draft.runner()
    with container.runners.override(providers.Object(both)):
        for runner in both:
            runner.load()
        for runner in both:
            runner.init_attention_backends()
    return both


def test_no_two_workers_share_a_part(model: Path) -> None:
    target, draft = start_both(with_drafter(model, model, "standalone"))
    assert (target.role, draft.role) == ("target", "draft")
    for part in ("model", "kv_pool", "slot_table", "attn_backend"):
        assert getattr(target, part) is not getattr(draft, part)


def test_a_drafters_pool_has_the_targets_slots_and_scratch_behind_them(model: Path, tmp_path: Path) -> None:
    make_drafter(tmp_path, vocab_size=257, hidden_size=32, num_target_layers=1, **BLOCKS_OF_FOUR)
    container = with_drafter(model, tmp_path, "dflash", max_running_requests=3)
    target, draft = start_both(container)
    assert target.kv_pool is not None and draft.kv_pool is not None and target.model is not None
    assert target.kv_pool.num_slots == 512
    assert draft.kv_pool.num_slots == 512 + 3 * 4
    assert draft.model is not None
    assert draft.model.lm_head is target.model.lm_head
    assert draft.model.embed_tokens is target.model.embed_tokens


def test_the_target_sizes_its_pool_with_the_drafters_in_mind(model: Path) -> None:
    assert make_container(model).target.draft_layouts() == []
    container = with_drafter(model, model, "standalone")
    with container.runners.override(providers.List(container.target.runner, container.draft.runner)):
        container.draft.runner().load()
        assert container.target.draft_layouts() == [container.draft.runner().kv_layout]


@pytest.mark.parametrize(("algorithm", "kind"), [("none", PlainWorker), ("ngram", DraftingWorker)])
def test_the_algorithm_selects_the_worker(model: Path, algorithm: str, kind: type) -> None:
    assert type(make_container(model, speculative_algorithm=algorithm).worker()) is kind


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafter")
    make_drafter(folder, vocab_size=257, hidden_size=32, num_target_layers=1, **BLOCKS_OF_FOUR)
    return folder


def test_a_drafter_starts_and_its_drafts_change_no_token(model: Path, drafter: Path) -> None:
    plain = complete(make_container(model, speculative_algorithm="none"), "abcabcabc", **SAMPLED)
    for algorithm, path in (
        ("dflash", drafter),
        ("auto", drafter),
        ("standalone", model),
        ("auto", model),
        ("auto", None),
    ):
        named = {} if path is None else {"speculative_draft_model_path": str(path)}
        container = make_container(model, speculative_algorithm=algorithm, **named)
        assert len(container.runners()) == 1 + (path is not None)
        receiver = complete(container, "abcabcabc", **SAMPLED)
        assert receiver.token_ids == plain.token_ids


def test_what_is_loaded_can_be_asked_for(model: Path, drafter: Path) -> None:
    assert make_container(model, speculative_algorithm="none").algorithms() == ("none",)
    assert make_container(model, speculative_algorithm="ngram").algorithms() == ("none", "ngram")
    assert with_drafter(model, drafter, "dflash").algorithms() == ("none", "dflash")
    assert with_drafter(model, drafter, "auto").algorithms() == ("none", "ngram", "dflash", "auto")
    assert with_drafter(model, model, "auto").algorithms() == ("none", "ngram", "standalone", "auto")
    assert make_container(model, speculative_algorithm="auto").algorithms() == ("none", "ngram", "auto")


def test_an_algorithm_needs_a_drafter_of_its_kind(model: Path, drafter: Path) -> None:
    with pytest.raises(SettingsError, match="--speculative-draft-model-path"):
        make_container(model, speculative_algorithm="dflash").worker()
    with pytest.raises(ModelError, match="--speculative-algorithm standalone"):
        with_drafter(model, model, "dflash").worker()
    with pytest.raises(ModelError, match="--speculative-algorithm dflash"):
        with_drafter(model, drafter, "standalone").worker()


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


def test_what_earlier_answers_tell_can_be_replaced(model: Path) -> None:
    """By one that only listens: it hears of each answer once that has ended."""
    told: list[tuple[list[int], list[int]]] = []

    class Listening(NgramHistory):
        def learn(self, token_ids: Sequence[int], start: int) -> None:
            told.append((list(token_ids[:start]), list(token_ids[start:])))

    container = make_container(model, speculative_algorithm="ngram")
    container.history.override(providers.Object(Listening(0)))
    prompts = ["a prompt of more than sixteen tokens", "short", "last"]
    answers = complete_in_turn(container, prompts, max_tokens=24, temperature=0.0, ignore_eos=True)
    prompt_ids = [container.tokenizer().encode(prompt) for prompt in prompts]
    assert told == [
        (ids[-LONGEST_CONTEXT:], answer.token_ids)
        for ids, answer in list(zip(prompt_ids, answers, strict=True))[:2]
    ]


def test_a_request_may_ask_for_shorter_drafts_or_for_none(model: Path) -> None:
    worker = make_container(model, speculative_num_draft_tokens=8).worker()

    def most_drafts(**wishes: Any) -> int:
        asked = SpeculationParams(**wishes)
        return worker.max_draft_tokens(Request("r", [1], SamplingParams(), Receiver(), speculation=asked))

    assert most_drafts() == 7  # verified rows count the last token too
    assert most_drafts(num_draft_tokens=3) == 2
    assert most_drafts(num_draft_tokens=1) == 0
    assert most_drafts(algorithm="none") == 0


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
