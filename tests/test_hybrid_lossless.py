"""What a request to a model with recurrent state gets does not depend on drafts, company, earlier prompts or preemption.

The bits of its logprobs, too: a hit goes on from a checkpoint of the state, and computes what a cold prompt does.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import pytest

from engine.request import Request, SamplingParams
from engine.runner import ModelRunner
from engine.worker import GenerationWorker
from speculative.dflash import DFlash
from speculative.options import Algorithm
from speculative.proposal import Proposal
from speculative.standalone import Standalone
from speculative.worker import SpeculativeWorker
from tests.engine.fakes import LetterTokenizer
from tests.lossless import (
    ROWS,
    Answer,
    WorkerMaker,
    answer,
    drafting,
    load_drafting_runner,
    load_runner,
    ngram,
    oracle,
    plain,
)
from tests.models.checkpoints import make_checkpoint as make_plain_checkpoint
from tests.models.dflash_reference import make_drafter
from tests.models.hybrid_checkpoints import make_checkpoint
from tests.speculative.pair import Recording

FAMILIES = [
    "qwen3-next",
    "qwen3-5",
    "lfm2",
    "mamba2",
    "nemotron-h",
    "granite-hybrid",
]
VARIATIONS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 0.9, "seed": 1, "top_p": 0.9, "logprobs": 1},
    {"temperature": 1.2, "seed": 2, "stop_token_ids": tuple(range(40))},
]
BLOCK = 6
Right = Literal["always", "to a random point", "never"]
Requests = dict[str, tuple[Sequence[int], SamplingParams]]


def make_requests() -> Requests:
    """Prompts of 1 to 60 tokens, of which each second one begins like that before it."""
    rng = random.Random(0)
    made: Requests = {}
    prompt: list[int] = []
    for index, length in enumerate((1, 17, 40, 60, 15, 32, 33, 5)):
        shared = prompt[: length // 2] if index % 2 else []
        prompt = shared + [rng.randrange(3, 240) for _ in range(length - len(shared))]
        variation = VARIATIONS[index % len(VARIATIONS)]
        made[str(index)] = prompt, SamplingParams(max_tokens=12 + 3 * index, ignore_eos=True, **variation)
    return made


REQUESTS = make_requests()


@pytest.fixture(scope="module", params=FAMILIES)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder: Path = tmp_path_factory.mktemp(request.param)
    make_checkpoint(request.param, folder)
    return load_runner(str(folder), "float32", slots=800, capture_layers=(0, 1, 2))


@pytest.fixture(scope="module")
def expected(runner: ModelRunner) -> dict[str, Answer]:
    """Plain decoding, one request at a time."""
    answers, _, _ = answer(runner, LetterTokenizer(), plain, REQUESTS, together=1, caching=False)
    assert len({a.token_ids for a in answers.values()}) == len(REQUESTS)
    return answers


def detecting(make: WorkerMaker) -> WorkerMaker:
    """Workers that have gone through their start-up hook."""

    def made(runner: ModelRunner, eos: frozenset[int]) -> GenerationWorker:
        worker = make(runner, eos)
        assert isinstance(worker, SpeculativeWorker)
        worker.detect_mamba_commit()
        assert worker.need_mamba_verify_commit
        return worker

    return made


def known(expected: Mapping[str, Answer]) -> dict[str, tuple[int, ...]]:
    return {name: a.token_ids for name, a in expected.items()}


@pytest.mark.parametrize("rate", [1.0, 0.8, 0.0])
def test_no_drafter_changes_anything(runner: ModelRunner, expected: dict[str, Answer], rate: float) -> None:
    make = detecting(oracle(known(expected), rate))
    answers, totals, _ = answer(runner, LetterTokenizer(), make, REQUESTS)
    assert totals.drafted_tokens > 100
    assert (totals.accepted_tokens > 50) == (rate > 0)
    assert answers == expected


def test_ngram_speculation_changes_nothing(runner: ModelRunner, expected: dict[str, Answer]) -> None:
    answers, totals, _ = answer(runner, LetterTokenizer(), detecting(ngram), REQUESTS)
    assert totals.drafted_tokens > 0
    assert answers == expected


def test_preemption_and_earlier_prompts_change_nothing(
    runner: ModelRunner, expected: dict[str, Answer]
) -> None:
    make = detecting(oracle(known(expected), 0.8))
    answers, _, stats = answer(runner, LetterTokenizer(), make, REQUESTS, slots=90)
    assert stats.preemptions_total > 0
    assert stats.cached_tokens_total > 0
    assert answers == expected


class Knowing(Recording):
    """Drafts `truth` as far as that goes, and what it likes from there on."""

    def _corrected(self, request: Request, proposal: Proposal) -> Proposal:
        right = self.truth(request, len(proposal.token_ids))
        return Proposal((*right, *proposal.token_ids[len(right) :]), proposal.levels)


class KnowingDFlash(Knowing, DFlash):
    """A block a pass."""


class KnowingStandalone(Knowing, Standalone):
    """A token a pass."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Drafters by algorithm. They are random, and serve any target of their shape."""
    made = {name: tmp_path_factory.mktemp(name) for name in ("dflash", "standalone")}
    make_drafter(made["dflash"], block_size=BLOCK)
    make_plain_checkpoint("llama", made["standalone"])
    return made


def knowing(
    runner: ModelRunner,
    folders: Mapping[str, Path],
    algorithm: Algorithm,
    expected: Mapping[str, Answer],
    right: Right = "to a random point",
) -> WorkerMaker:
    """A drafter that is so often right about what plain decoding wrote."""
    kind = KnowingDFlash if algorithm == "dflash" else KnowingStandalone
    draft = load_drafting_runner(str(folders[algorithm]), runner, scratch_slots=ROWS * BLOCK)
    drafter = kind(draft, BLOCK, runner.files.config.vocab_size)
    draw = random.Random(1)

    def truth(request: Request, count: int) -> Sequence[int]:
        left = expected[request.request_id].token_ids[len(request.output_ids) :][:count]
        if right == "never":
            return [(token + 1) % 200 for token in left]
        return left if right == "always" else left[: draw.randint(0, count)]

    drafter.truth = truth
    drafter.prepare()
    return drafting(algorithm, drafter)


@pytest.mark.parametrize(
    ("algorithm", "right", "slots"),
    [
        ("dflash", "always", None),
        ("dflash", "to a random point", None),
        ("dflash", "to a random point", 90),
        ("dflash", "never", None),
        ("standalone", "always", None),
        ("standalone", "to a random point", 90),
        ("standalone", "never", None),
    ],
)
def test_drafting_models_change_nothing(
    runner: ModelRunner,
    expected: dict[str, Answer],
    folders: dict[str, Path],
    algorithm: Algorithm,
    right: Right,
    slots: int | None,
) -> None:
    """With room for all, and with so little that requests are preempted."""
    make = detecting(knowing(runner, folders, algorithm, expected, right))
    answers, totals, stats = answer(runner, LetterTokenizer(), make, REQUESTS, slots=slots)
    assert answers == expected
    drafted, accepted = totals.drafted_tokens, totals.accepted_tokens
    assert drafted > 50
    if right == "to a random point":
        assert drafted > accepted > 20
    else:
        assert accepted == (drafted if right == "always" else 0)
    assert (stats.preemptions_total > 0) == (slots is not None)


@pytest.fixture(scope="module")
def conversation(runner: ModelRunner) -> tuple[Requests, dict[str, Answer]]:
    """Turns, each with all that was said before and something new, and another prompt that begins like them. And what
    each one gets that is the first."""
    rng = random.Random(3)
    turns: Requests = {}
    cold: dict[str, Answer] = {}
    said: list[int] = []
    for turn in range(4):
        said += [rng.randrange(3, 240) for _ in range(9 + 24 * (turn == 0))]
        variation = {**VARIATIONS[turn % 3], "logprobs": 1}
        turns[str(turn)] = list(said), SamplingParams(max_tokens=21, ignore_eos=True, **variation)
        cold |= answer(runner, LetterTokenizer(), plain, {str(turn): turns[str(turn)]}, caching=False)[0]
        said += cold[str(turn)].token_ids
    sampling = SamplingParams(max_tokens=21, temperature=0.7, seed=4, ignore_eos=True, logprobs=1)
    turns["other"] = [*said[:50], 7, 8, 9], sampling
    cold |= answer(runner, LetterTokenizer(), plain, {"other": turns["other"]}, caching=False)[0]
    return turns, cold


@pytest.mark.parametrize("algorithm", ["none", "oracle", "dflash"])
def test_a_turn_goes_on_from_a_checkpoint_with_the_bits_of_a_cold_one(
    runner: ModelRunner,
    conversation: tuple[Requests, dict[str, Answer]],
    folders: dict[str, Path],
    algorithm: str,
) -> None:
    turns, cold = conversation
    make = {
        "none": lambda: plain,
        "oracle": lambda: detecting(oracle(known(cold), 0.8)),
        "dflash": lambda: detecting(knowing(runner, folders, "dflash", cold)),
    }[algorithm]()
    answers, _, stats = answer(runner, LetterTokenizer(), make, turns, together=1)
    assert answers == cold
    assert stats.cached_tokens_total == known_before(turns, 16)


def test_checkpoints_may_lie_several_chunks_apart(
    runner: ModelRunner, conversation: tuple[Requests, dict[str, Answer]]
) -> None:
    turns, cold = conversation
    wide = load_runner(str(runner.files.path), "float32", slots=800, interval=48)
    make = detecting(oracle(known(cold), 0.8))
    answers, _, stats = answer(wide, LetterTokenizer(), make, turns, together=1)
    assert answers == cold
    assert stats.cached_tokens_total == known_before(turns, 48) > 0


def known_before(turns: Requests, stride: int) -> int:
    """How many tokens of them there are up to the nearest checkpoint in what came before."""
    lengths = [len(prompt) + 20 for prompt, _ in turns.values()][:3]  # the last token has no state
    return sum(length // stride * stride for length in (*lengths, 50))
