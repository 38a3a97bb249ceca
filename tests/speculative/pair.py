"""A tiny target and a random DFlash drafter, the engine around them, and what the drafter should have proposed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from backends.options import AttentionOptions
from engine.allocator import SlotAllocator
from engine.engine import Engine
from engine.options import CacheOptions, SchedulerOptions
from engine.radix_cache import RadixCache
from engine.request import Request, SamplingParams, SpeculationParams, SpeculationStats
from engine.runner import ModelRunner
from engine.scheduler import Scheduler
from engine.slot_table import SlotTable
from engine.tokenizer import Tokenizer, load_tokenizer
from models.loader import inspect_model, load_drafter
from models.options import ModelOptions
from speculative.adaptive import Choice, PayoffController, Prospect
from speculative.dflash import DFlash
from speculative.drafter import Drafter
from speculative.drafting_worker import DraftingWorker
from speculative.history import NgramHistory
from speculative.options import Algorithm, SpeculativeOptions
from speculative.proposal import MakeSamplingRow, Proposal
from speculative.standalone import Standalone
from tests.engine.fakes import Receiver
from tests.lossless import ROWS
from tests.models.dflash_reference import ReferenceDrafter, make_drafter
from tests.tiny_model import save_tiny_model

SLOTS = 2048
BLOCK = 6


@dataclass
class Pair:
    """Both models, started, and where they are saved."""

    target: ModelRunner
    draft: ModelRunner
    reference: LlamaForCausalLM
    draft_folder: Path
    tokenizer: Tokenizer
    cache: CacheOptions
    attention: AttentionOptions

    @classmethod
    def make(
        cls,
        folder: Path,
        context: int = 640,
        draft_context: int = 640,
        short_block_size: int | None = None,
        successor: bool = False,
    ) -> Pair:
        shape = {
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "initializer_range": 0.3,  # what it writes is to depend on what it has read
        }
        (folder / "target").mkdir()
        target = save_tiny_model(folder / "target", max_position_embeddings=context, **shape)
        make_drafter(
            folder / "draft",
            successor=successor,
            vocab_size=257,
            block_size=BLOCK,
            max_position_embeddings=draft_context,
            dflash_config={"short_block_size": short_block_size},
        )
        cache, attention = CacheOptions(max_total_tokens=SLOTS), AttentionOptions()

        def options(model: Path) -> ModelOptions:
            return ModelOptions(model=str(model), dtype="float32", device="cpu")

        runner = ModelRunner(
            "target", inspect_model(options(target)), options(target), cache, attention, ROWS
        )
        drafting = options(folder / "draft")
        draft = ModelRunner(
            "draft",
            inspect_model(drafting, drafter=True),
            drafting,
            cache,
            attention,
            ROWS,
            target=runner,
            scratch_slots=ROWS * BLOCK,
            load_weights=load_drafter,
        )
        for one in (runner, draft):
            one.load()
        for one in (runner, draft):
            one.init_attention_backends()
        reference = LlamaForCausalLM.from_pretrained(target)
        return cls(runner, draft, reference, folder / "draft", load_tokenizer(runner.files), cache, attention)

    def proposals_of_reference(
        self, token_ids: Sequence[int], known: range | None = None, block_size: int = BLOCK
    ) -> tuple[int, ...]:
        """What a drafter proposes after `token_ids` that knows the positions `known` (None: all before the last)."""
        model, reference = self.reference, ReferenceDrafter(self.draft_folder)
        reference.config["dflash_config"]["block_size"] = block_size
        last = len(token_ids) - 1
        known = range(last) if known is None else known
        with torch.inference_mode():
            states = model(input_ids=torch.tensor([token_ids]), output_hidden_states=True).hidden_states
            reference.learn([state[0][known.start : known.stop] for state in states], known.start)
            return tuple(reference.choose(model, token_ids[-1], last)[0])


class Recording(Drafter):
    """Notes what a drafter proposes, and then corrects some of it: which tokens depends on what they are.

    Thereby drafts of a random drafter are accepted, and how many are depends on the drafter alone.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.proposed: dict[str, list[tuple[list[int], tuple[int, ...]]]] = {}
        self.truth: Callable[[Request, int], Sequence[int]] = lambda request, count: ()

    def propose(
        self, requests: Sequence[Request], limits: Sequence[int], sampling_row: MakeSamplingRow
    ) -> list[Proposal]:
        proposals = super().propose(requests, limits, sampling_row)
        for request, proposal in zip(requests, proposals, strict=True):
            text = request.token_ids(0, request.num_tokens)
            self.proposed.setdefault(request.request_id, []).append((text, proposal.token_ids))
        return [self._corrected(*each) for each in zip(requests, proposals, strict=True)]

    def _corrected(self, request: Request, proposal: Proposal) -> Proposal:
        right = self.truth(request, len(proposal.token_ids))
        tokens = [
            right[j] if j < len(right) and (token + j) % 3 else token
            for j, token in enumerate(proposal.token_ids)
        ]
        return Proposal(tuple(tokens), proposal.levels)


def truth_of(
    prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> Callable[[Request, int], Sequence[int]]:
    """A `truth`: how the prompt goes on that a request's text is of, if it has gone on so up to now."""

    def truth(request: Request, count: int) -> Sequence[int]:
        text = request.token_ids(0, request.num_tokens)
        for prompt, answer in zip(prompts, answers, strict=False):
            whole = [*prompt, *answer]
            if whole[: len(text)] == text:
                return whole[len(text) : len(text) + count]
        return ()

    return truth


def twin_of_the_target(pair: Pair) -> Standalone:
    """The target itself as a drafting model, whose drafts are all right."""
    options = ModelOptions(model=str(pair.target.files.path), dtype="float32", device="cpu")
    runner = ModelRunner(
        "draft",
        pair.target.files,
        options,
        pair.cache,
        pair.attention,
        ROWS,
        target=pair.target,
        scratch_slots=ROWS * 16,
        load_weights=lambda files, device, precision, target: target,
    )
    runner.load()
    runner.init_attention_backends()
    return Standalone(runner, 16, pair.target.files.config.vocab_size)


class Recorded(Recording, DFlash):
    """A DFlash drafter so."""

    def __init__(self, pair: Pair, window: int | None = None) -> None:
        super().__init__(pair.draft, 16, pair.target.files.config.vocab_size, window)


class Everything(PayoffController):
    """Has everything drafted and verified."""

    def choose(self, prospects: Sequence[Prospect], rows: int, pass_rows: int = 1) -> Choice:
        return Choice([i for i, prospect in enumerate(prospects) if prospect.worth is not None], True)

    def plan(self, drafts: Sequence[Sequence[float]], rows: int, drafting: int = 0) -> list[int]:
        return [len(draft) for draft in drafts]


@dataclass
class Reply:
    token_ids: list[int]
    text: str
    finish_reason: str | None
    stats: SpeculationStats
    cached_tokens: int
    proposed: list[tuple[list[int], tuple[int, ...]]]

    @property
    def accept_length(self) -> float:
        return self.stats.verify_emitted_tokens / self.stats.verify_steps


@dataclass
class Served:
    """An engine with a DFlash worker. `truth` is what plain decoding writes, by prompt."""

    engine: Engine
    scheduler: Scheduler
    worker: DraftingWorker
    drafter: Drafter
    names: int = 0
    waiting: dict[str, Receiver] = field(default_factory=dict)

    def start(
        self, prompt: Sequence[int], algorithm: str | None = None, choice: int = 0, **sampling: object
    ) -> tuple[Request, Receiver]:
        self.names += 1
        receiver = Receiver()
        params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **sampling})
        request = Request(
            f"r{self.names}",
            list(prompt),
            params,
            receiver,
            choice,
            SpeculationParams(algorithm=algorithm),
        )
        return request, receiver

    def finish(self, request: Request, receiver: Receiver) -> Reply:
        last = receiver.wait()
        assert last.error is None, last.error
        return Reply(
            receiver.token_ids,
            receiver.text,
            last.finish_reason,
            request.stats,
            last.cached_tokens,
            self.drafter.proposed.get(request.request_id, []) if isinstance(self.drafter, Recording) else [],
        )

    def ask(self, prompt: Sequence[int], algorithm: str | None = None, **sampling: object) -> Reply:
        request, receiver = self.start(prompt, algorithm, **sampling)
        self.engine.submit(request)
        return self.finish(request, receiver)

    def ask_together(self, *asked: tuple[Request, Receiver]) -> list[Reply]:
        self.engine.submit(*(request for request, _ in asked))
        return [self.finish(*each) for each in asked]


@contextmanager
def serving(
    pair: Pair,
    algorithm: Algorithm = "dflash",
    controller: PayoffController | None = None,
    slots: int = SLOTS,
    window: int | None = None,
    chunk: int = 48,
    caching: bool = True,
    page: int = 1,
    drafter: Drafter | None = None,
) -> Iterator[Served]:
    drafter = drafter or Recorded(pair, window)
    drafter.prepare()
    worker = DraftingWorker(
        pair.target,
        pair.tokenizer.eos_token_ids,
        SpeculativeOptions(algorithm=algorithm),
        controller or Everything(),
        NgramHistory(0),
        drafter,
    )
    worker.detect_mamba_commit()
    allocator = SlotAllocator(slots, page)
    table = pair.target.slot_table = SlotTable(ROWS, pair.target.max_context_len, torch.device("cpu"))
    options = SchedulerOptions(max_running_requests=ROWS, chunked_prefill_size=chunk)
    scheduler = Scheduler(
        options,
        allocator,
        RadixCache(allocator, caching, pair.target.make_checkpoints()),
        table,
        worker.usable_prefix,
        worker.before_release,
        pair.target.resume_state,
        pair.target.recomputes_exactly,
    )
    engine = Engine(
        worker,
        lambda: scheduler,
        pair.tokenizer,
        pair.target.files.config.vocab_size,
        lambda: pair.target.max_context_len,
        1000,
    )
    thread = threading.Thread(target=engine.run)
    thread.start()
    try:
        assert engine.started.wait(60)
        yield Served(engine, scheduler, worker, drafter)
    finally:
        engine.stop()
        thread.join(60)
