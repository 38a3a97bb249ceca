"""EAGLE-3 and MTP: what is proposed is what an eager drafter proposes that has seen all of the text, whatever came
from the cache and whoever computed it; and what is written is what plain decoding writes."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from backends.options import AttentionOptions
from engine.noise import gumbel_at
from engine.options import CacheOptions
from engine.request import Request, SamplingParams, SpeculationParams
from engine.runner import ModelRunner
from engine.worker import GenerationWorker
from models.loader import inspect_model, load_drafter
from models.options import ModelOptions
from speculative.feature_chain import MTP, Eagle3
from speculative.features import MAX_KEPT
from speculative.pairing import inspect_drafter, scratch_slots, target_layer_ids
from speculative.worker import SpeculativeWorker
from tests.engine.fakes import LetterTokenizer
from tests.lossless import ROWS, Answer, WorkerMaker, answer, drafting, plain
from tests.models.chain_reference import EAGLE3_SHAPE, ReferenceChain, make_eagle3, make_mtp
from tests.speculative.pair import SLOTS, Pair, Recording, Reply, serving, truth_of
from tests.tiny_model import save_tiny_model

LENGTH = 12  # tokens of an answer
NUM_DRAFT_TOKENS = 6
KINDS = ["eagle3", "deepseek", "qwen3-next", "qwen3-5"]
RANDOM = random.Random(0)
COMMON = [RANDOM.randrange(256) for _ in range(37)]
# The second goes the way of the first for a while, the third too, and the fourth begins as the first ends.
PROMPTS = [
    COMMON,
    [*COMMON[:25], *(RANDOM.randrange(256) for _ in range(20))],
    [*COMMON[:25], *(RANDOM.randrange(256) for _ in range(7))],
    [RANDOM.randrange(256) for _ in range(50)],
]


class RecordedEagle3(Recording, Eagle3):
    """What it proposes is noted, and in part corrected."""


class RecordedMTP(Recording, MTP):
    """What it proposes is noted, and in part corrected."""


@dataclass
class ChainPair(Pair):
    """A target, its drafter, and what that should have proposed. `truths` are plain decoding's answers."""

    chain: ReferenceChain
    truths: list[list[int]]
    known: dict[tuple[int, ...], list[int]]  # what the reference proposes, by text

    @classmethod
    def started(cls, kind: str, folder: Path, context: int = 512) -> ChainPair:
        target, drafter = folder / "target", folder / "drafter"
        target.mkdir()
        if kind == "eagle3":
            shape = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
            save_tiny_model(target, initializer_range=0.3, max_position_embeddings=context, **shape)
            reference: ReferenceChain = make_eagle3(
                drafter,
                LlamaForCausalLM.from_pretrained(target),
                eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
            )
        else:
            reference, drafter = make_mtp(kind, target), target
        options = ModelOptions(model=str(target), dtype="float32", device="cpu")
        of_drafter = ModelOptions(model=str(drafter), dtype="float32", device="cpu")
        files = inspect_model(options)
        draft_files = inspect_drafter(of_drafter, files, "eagle3" if kind == "eagle3" else "mtp")
        cache, attention = CacheOptions(max_total_tokens=SLOTS), AttentionOptions()
        runner = ModelRunner(
            "target", files, options, cache, attention, ROWS, capture_layers=target_layer_ids(draft_files)
        )
        draft = ModelRunner(
            "draft",
            draft_files,
            of_drafter,
            cache,
            attention,
            ROWS,
            target=runner,
            scratch_slots=scratch_slots(draft_files, NUM_DRAFT_TOKENS, ROWS),
            load_weights=load_drafter,
        )
        for one in (runner, draft):
            one.load()
        for one in (runner, draft):
            one.init_attention_backends()
        return cls(
            runner, draft, reference.target, drafter, LetterTokenizer(), cache, attention, reference, [], {}
        )

    def drafter(self, truths: Sequence[Sequence[int]] = ()) -> RecordedEagle3 | RecordedMTP:
        """Its drafts are corrected towards `truths`, by prompt."""
        kind = RecordedEagle3 if self.draft.files.eagle3 is not None else RecordedMTP
        made = kind(self.draft, NUM_DRAFT_TOKENS, self.target.files.config.vocab_size)
        made.truth = truth_of(PROMPTS, truths)
        return made


# What follows from the drafter alone, which is the same for all.
for_one = pytest.mark.parametrize("pair", ["eagle3"], indirect=True)


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ChainPair:
    made = ChainPair.started(request.param, tmp_path_factory.mktemp(request.param))
    with serving(made, caching=False, drafter=made.drafter()) as served:
        made.truths = [served.ask(prompt, "none", max_tokens=2 * LENGTH).token_ids for prompt in PROMPTS]
    return made


def serve(pair: ChainPair, **changes: object):  # type: ignore[no-untyped-def]
    algorithm = "eagle3" if pair.draft.files.eagle3 is not None else "mtp"
    return serving(pair, algorithm, drafter=pair.drafter(pair.truths), **changes)  # type: ignore[arg-type]


def hold_to_reference(pair: ChainPair, *replies: Reply) -> None:
    for reply in replies:
        assert len(reply.proposed) > 2
        features: torch.Tensor | None = None
        for text, proposed in reply.proposed:
            expected = pair.known.get(tuple(text), [])
            if len(expected) < len(proposed):
                features = pair.chain.read(reply.proposed[-1][0]) if features is None else features
                expected, _ = pair.chain.draft(text, len(proposed), features)
                pair.known[tuple(text)] = expected
            assert list(proposed) == expected[: len(proposed)]
        assert max(len(proposed) for _, proposed in reply.proposed) > 2


def test_proposals_are_those_of_the_eager_drafter(pair: ChainPair) -> None:
    with serve(pair) as served:
        reply = served.ask(PROMPTS[3], max_tokens=2 * LENGTH)
    hold_to_reference(pair, reply)
    assert reply.token_ids == pair.truths[3]
    assert reply.accept_length > 1.3


def test_prefixes_that_others_left_are_drafted_from_as_if_cold(pair: ChainPair) -> None:
    """Where two texts part, what the first left for its next token is not read for that of the second."""
    with serve(pair) as served:
        for index in (0, 1, 2, 0, 1):
            reply = served.ask(PROMPTS[index], max_tokens=LENGTH)
            assert reply.token_ids == pair.truths[index][:LENGTH]
            hold_to_reference(pair, reply)
        text = PROMPTS[0] + pair.truths[0][: LENGTH - 2]
        follow = served.ask(text, max_tokens=LENGTH)
        hold_to_reference(pair, follow)
        if pair.target.state_pool is None:
            assert follow.cached_tokens == len(text) - 2, (
                "a token more than the target itself is computed again"
            )


@for_one
def test_a_prefix_that_an_opted_out_request_computed_is_computed_again(pair: ChainPair) -> None:
    with serve(pair) as served:
        opted_out = served.ask(PROMPTS[0], "none", max_tokens=LENGTH)
        assert not opted_out.proposed
        hit = served.ask(PROMPTS[0], max_tokens=LENGTH)
        assert hit.cached_tokens == 0 and hit.token_ids == opted_out.token_ids
        hold_to_reference(pair, hit)


def test_requests_that_run_together_draft_as_each_alone(pair: ChainPair) -> None:
    """In chunks, beside each other, and two choices of one prompt."""
    with serve(pair, chunk=16) as served:
        asked = [served.start(prompt, max_tokens=LENGTH) for prompt in PROMPTS]
        twin = served.start(PROMPTS[0], choice=1, max_tokens=LENGTH)
        replies = served.ask_together(*asked, twin)
    for truth, reply in zip([*pair.truths, pair.truths[0]], replies, strict=True):
        assert reply.token_ids == truth[:LENGTH]
    if not pair.target.recomputes_exactly():  # not even for the drafter, what another request reads
        replies = [replies[0], replies[3]]
    hold_to_reference(pair, *replies)


@for_one
def test_preempted_and_aborted_requests_leave_what_others_can_use(pair: ChainPair) -> None:
    with serve(pair, slots=140) as served:
        replies = served.ask_together(*(served.start(prompt, max_tokens=2 * LENGTH) for prompt in PROMPTS))
        assert served.engine.stats().preemptions_total > 0
        aborted, receiver = served.start(PROMPTS[3], max_tokens=80)
        served.engine.submit(aborted)
        assert receiver.first.wait(60)
        served.engine.abort(aborted.request_id)
        receiver.wait()
        replies.append(served.ask(PROMPTS[3], max_tokens=2 * LENGTH))
    for truth, reply in zip([*pair.truths, pair.truths[3]], replies, strict=True):
        assert reply.token_ids == truth
        hold_to_reference(pair, reply)


@for_one
def test_a_long_prompt_is_read_in_parts(pair: ChainPair) -> None:
    """More tokens than are kept to be read at once, so that the features of a part's last one wait for the next."""
    prompt = [RANDOM.randrange(256) for _ in range(MAX_KEPT + 40)]
    with serve(pair, chunk=100) as served:
        hold_to_reference(pair, served.ask(prompt, max_tokens=6))


@for_one
def test_a_request_that_opts_in_midway_drafts_from_what_is_known_of_it(pair: ChainPair) -> None:
    with serve(pair) as served:
        request, receiver = served.start(PROMPTS[3], "none", max_tokens=2 * LENGTH)
        opted_in: list[int] = []

        def opt_in(event: object) -> None:
            receiver(event)  # type: ignore[arg-type]
            if len(request.output_ids) == 8:
                request.speculation = SpeculationParams()
                opted_in.append(request.cached_len)

        request.sink = opt_in
        served.engine.submit(request)
        reply = served.finish(request, receiver)
        assert reply.token_ids == pair.truths[3]
        (first,) = opted_in
        followed = [(text, proposed) for text, proposed in reply.proposed if len(text) > first + 1]
        assert len(followed) > 2
        for text, proposed in followed:
            assert list(proposed) == pair.chain.draft(text, len(proposed), known_from=first)[0]
        # Who comes next does not inherit the gap.
        hold_to_reference(pair, served.ask(PROMPTS[3] + pair.truths[3][:LENGTH], max_tokens=LENGTH))


@for_one
def test_a_shorter_chain_may_be_asked_for(pair: ChainPair) -> None:
    with serve(pair) as served:
        request, receiver = served.start(PROMPTS[0], max_tokens=LENGTH)
        request.speculation = SpeculationParams(num_draft_tokens=3)
        (reply,) = served.ask_together((request, receiver))
    assert reply.token_ids == pair.truths[0][:LENGTH]
    assert max(len(proposed) for _, proposed in reply.proposed) == 2


def test_drafting_ends_at_the_context_limit(tmp_path: Path) -> None:
    context = 64
    short = ChainPair.started("eagle3", tmp_path, context)
    with serve(short) as served:
        expected = served.ask(PROMPTS[3], "none", max_tokens=40)
        reply = served.ask(PROMPTS[3], max_tokens=40)
    assert reply.token_ids == expected.token_ids
    assert reply.finish_reason == "length"
    hold_to_reference(short, reply)


VARIATIONS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.4, "logprobs": 2},
    {"temperature": 0.9, "seed": 1, "top_p": 0.9},
    {"temperature": 1.2, "seed": 2, "top_k": 20, "frequency_penalty": 0.4},
]


@for_one
def test_a_sampled_request_is_drafted_for_with_its_own_noise(pair: ChainPair) -> None:
    temperature, seed = 0.7, 11
    ids = np.array([pair.chain.token(column) for column in range(EAGLE3_SHAPE["draft_vocab_size"])])

    def noise(position: int) -> torch.Tensor:
        """Of a draw at that temperature, on the scale of logits."""
        return torch.from_numpy(gumbel_at(seed, 0, position, ids)).float() * temperature

    with serve(pair) as served:
        reply = served.ask(PROMPTS[3], max_tokens=2 * LENGTH, temperature=temperature, seed=seed)
    features = pair.chain.read(reply.proposed[-1][0])
    for text, proposed in reply.proposed:
        expected, _ = pair.chain.draft(text, len(proposed), features, noise=noise)
        assert list(proposed) == expected
    likeliest = [pair.chain.draft(text, len(made), features)[0] for text, made in reply.proposed]
    assert likeliest != [list(made) for _, made in reply.proposed], "the noise decides some of them"


def detecting(make: WorkerMaker) -> WorkerMaker:
    """Workers that have gone through their start-up hook."""

    def made(runner: ModelRunner, eos: frozenset[int]) -> GenerationWorker:
        worker = make(runner, eos)
        assert isinstance(worker, SpeculativeWorker)
        worker.detect_mamba_commit()
        return worker

    return made


def token_ids(answers: Mapping[str, Answer]) -> dict[str, tuple[int, ...]]:
    return {name: one.token_ids for name, one in answers.items()}


def test_speculation_on_and_off_write_the_same(pair: ChainPair) -> None:
    """Greedy and seeded; the draft as it is, and corrected up to a random point."""
    asked = {
        f"{p}.{v}": (prompt, SamplingParams(max_tokens=LENGTH + 3 * v, **variation))  # type: ignore[arg-type]
        for p, prompt in enumerate(PROMPTS)
        for v, variation in enumerate(VARIATIONS)
    }
    expected, _, _ = answer(pair.target, pair.tokenizer, plain, asked, together=1, caching=False)
    for rate in (0.0, 0.8):
        drafter, draw = pair.drafter(), random.Random(1)

        def truth(
            request: Request, count: int, rate: float = rate, draw: random.Random = draw
        ) -> Sequence[int]:
            left = expected[request.request_id].token_ids[len(request.output_ids) :][:count]
            return left if draw.random() < rate else ()

        drafter.truth = truth
        drafter.prepare()
        make = detecting(drafting("eagle3" if pair.draft.files.eagle3 is not None else "mtp", drafter))
        answers, totals, _ = answer(pair.target, pair.tokenizer, make, asked)
        if pair.target.kv_layout.is_latent:
            # Its prompts differ in rounding with the chunks that they come in, which company decides.
            assert token_ids(answers) == token_ids(expected)
        else:
            assert answers == expected
        assert totals.drafted_tokens > 100
        assert totals.accepted_tokens > 30 or rate == 0.0
