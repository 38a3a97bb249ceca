"""Drives one loaded model with any worker, and a drafter that is right exactly as often as a test wants."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from backends.options import AttentionOptions
from engine.allocator import SlotAllocator
from engine.engine import Engine, EngineStats
from engine.graphs import StepGraph, capture
from engine.options import CacheOptions, KVCacheDtype, SchedulerOptions
from engine.plain_worker import PlainWorker
from engine.radix_cache import RadixCache
from engine.request import Request, SamplingParams, SpeculationStats, TokenLogprob
from engine.runner import ModelRunner
from engine.scheduler import Scheduler
from engine.slot_table import SlotTable
from engine.tokenizer import Tokenizer
from engine.worker import GenerationWorker
from models.loader import inspect_model, load_drafter
from models.options import Dtype, ModelOptions
from speculative.adaptive import PayoffController
from speculative.drafter import Drafter
from speculative.drafting_worker import DraftingWorker
from speculative.history import NgramHistory
from speculative.options import Algorithm, SpeculativeOptions
from speculative.worker import SpeculativeWorker
from tests.engine.fakes import Receiver

ROWS = 8


@dataclass(frozen=True)
class Answer:
    """All that a client can see of a request, and its counters."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str | None
    stop_reason: str | int | None
    completion_tokens: int


def load_runner(
    model: str,
    dtype: Dtype,
    slots: int,
    page_size: int = 1,
    interval: int = 16,
    capture_layers: Sequence[int] = (),
    capture_graph: Callable[..., StepGraph | None] = capture,
    kv_cache_dtype: KVCacheDtype = "auto",
) -> ModelRunner:
    """A runner that has gone through its start-up hooks."""
    options = ModelOptions(model=model, dtype=dtype, device="cpu")
    cache = CacheOptions(
        max_total_tokens=slots,
        page_size=page_size,
        mamba_track_interval=interval,
        kv_cache_dtype=kv_cache_dtype,
    )
    runner = ModelRunner(
        "target",
        inspect_model(options),
        options,
        cache,
        AttentionOptions(),
        ROWS,
        capture_layers,
        capture_graph=capture_graph,
    )
    runner.load()
    runner.init_attention_backends()
    runner.init_graphs()
    return runner


def load_drafting_runner(folder: str, target: ModelRunner, scratch_slots: int) -> ModelRunner:
    """The same for a drafter of `target`."""
    options = ModelOptions(model=folder, dtype="float32", device="cpu")
    runner = ModelRunner(
        "draft",
        inspect_model(options, drafter=True),
        options,
        CacheOptions(),
        AttentionOptions(),
        ROWS,
        target=target,
        scratch_slots=scratch_slots,
        load_weights=load_drafter,
    )
    runner.load()
    runner.init_attention_backends()
    return runner


class OracleWorker(SpeculativeWorker):
    """Drafts what plain decoding is known to emit, up to a random point, and nonsense after it."""

    def __init__(
        self, runner: ModelRunner, eos: frozenset[int], known: Mapping[str, Sequence[int]], rate: float
    ) -> None:
        super().__init__(runner, eos)
        self._known = known
        self._rate = rate
        self._random = random.Random(0)

    def max_draft_tokens(self, request: Request) -> int:
        return self._random.randint(0, 15)

    def draft(self, requests: Sequence[Request], limits: Sequence[int], rows: int) -> list[tuple[int, ...]]:
        return [self._draft(request, limit) for request, limit in zip(requests, limits, strict=True)]

    def _draft(self, request: Request, limit: int) -> tuple[int, ...]:
        future = list(self._known[request.request_id][len(request.output_ids) :])
        future += [3] * (limit - len(future))
        return tuple(
            token if self._random.random() < self._rate else (token + 1) % 200 for token in future[:limit]
        )


WorkerMaker = Callable[[ModelRunner, frozenset[int]], GenerationWorker]


def plain(runner: ModelRunner, eos: frozenset[int]) -> GenerationWorker:
    return PlainWorker(runner, eos)


class AlwaysPays(PayoffController):
    """Holds drafts to cost nothing, whatever is measured."""

    def __init__(self) -> None:
        super().__init__()
        for rows in (1, 2, 4, 8, 16, 64):
            for _ in range(9):
                super().observe_step(rows, 1.0)
                super().observe_drafting(rows, 1e-3)

    def observe_step(self, rows: int, seconds: float) -> None:
        pass

    def observe_drafting(self, requests: int, seconds: float) -> None:
        pass


def ngram(runner: ModelRunner, eos: frozenset[int]) -> GenerationWorker:
    return DraftingWorker(
        runner, eos, SpeculativeOptions(algorithm="ngram"), AlwaysPays(), NgramHistory(4096)
    )


def drafting(algorithm: Algorithm, drafter: Drafter) -> WorkerMaker:
    """Drafts of a model that has been started."""
    options = SpeculativeOptions(algorithm=algorithm)
    return lambda runner, eos: DraftingWorker(runner, eos, options, AlwaysPays(), NgramHistory(4096), drafter)


def oracle(known: Mapping[str, Sequence[int]], rate: float) -> WorkerMaker:
    return lambda runner, eos: OracleWorker(runner, eos, known, rate)


def answer(
    runner: ModelRunner,
    tokenizer: Tokenizer,
    make_worker: WorkerMaker,
    requests: Mapping[str, tuple[Sequence[int], SamplingParams]],
    together: int = ROWS,
    caching: bool = True,
    slots: int | None = None,
) -> tuple[dict[str, Answer], SpeculationStats, EngineStats]:
    """Submit all requests at once, `together` of which may run in one batch; what each one got, and the totals.

    `slots` makes the pool smaller than it is.
    """
    assert runner.kv_pool is not None and runner.slot_table is not None

    worker = make_worker(runner, tokenizer.eos_token_ids)

    def scheduler() -> Scheduler:
        assert runner.kv_pool is not None
        allocator = SlotAllocator(slots or runner.kv_pool.num_slots, 1)
        table = SlotTable(ROWS, runner.max_context_len, runner.device)
        runner.slot_table = table
        options = SchedulerOptions(max_running_requests=together, chunked_prefill_size=48)
        cache = RadixCache(allocator, caching, runner.make_checkpoints())
        return Scheduler(
            options,
            allocator,
            cache,
            table,
            worker.usable_prefix,
            worker.before_release,
            runner.resume_state,
            runner.recomputes_exactly,
        )

    engine = Engine(
        worker,
        scheduler,
        tokenizer,
        runner.files.config.vocab_size,
        lambda: runner.max_context_len,
        1000,
    )
    thread = threading.Thread(target=engine.run)
    thread.start()
    try:
        assert engine.started.wait(60)
        receivers = {name: Receiver() for name in requests}
        engine.submit(
            *(
                Request(name, list(prompt), params, receivers[name])
                for name, (prompt, params) in requests.items()
            )
        )
        answers, totals = {}, SpeculationStats()
        for name, receiver in receivers.items():
            last = receiver.wait()
            assert last.error is None, last.error
            answers[name] = Answer(
                receiver.text,
                tuple(receiver.token_ids),
                tuple(logprob for event in receiver.events for logprob in event.logprobs),
                last.finish_reason,
                last.stop_reason,
                last.completion_tokens,
            )
            stats = last.speculation
            assert stats is not None
            totals.drafted_tokens += stats.drafted_tokens
            totals.accepted_tokens += stats.accepted_tokens
            totals.verify_steps += stats.verify_steps
    finally:
        engine.stop()
        thread.join(60)
    stats_after = engine.stats()
    return answers, totals, stats_after
