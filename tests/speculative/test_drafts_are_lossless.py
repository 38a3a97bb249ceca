"""Whatever drafts, and however well: a request gets what plain decoding alone would have given it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from engine.request import Request, SamplingParams
from tests.lossless import Answer, answer, drafting, plain
from tests.speculative.pair import Pair, Recorded, twin_of_the_target

Requests = dict[str, tuple[Sequence[int], SamplingParams]]

VARIATIONS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.4, "logprobs": 2},
    {"temperature": 0.0, "frequency_penalty": 0.9, "presence_penalty": 0.5, "min_tokens": 6},
    {"temperature": 0.8, "seed": 1, "top_p": 0.9},
    {"temperature": 1.0, "seed": 2, "logprobs": 0},
    {"temperature": 1.3, "seed": 3, "top_k": 20, "min_p": 0.02, "repetition_penalty": 1.1},
    {"temperature": 0.7, "seed": 4, "stop": ("e", "\n"), "logit_bias": {28: 3.0}},
    {"temperature": 0.9, "seed": 5, "stop_token_ids": tuple(range(30, 50)), "ignore_eos": True},
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair.make(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def requests() -> Requests:
    """Prompts that share beginnings, so that some hit what others left."""
    draw = random.Random(0)
    common = [draw.randrange(256) for _ in range(60)]
    made: Requests = {}
    for p, length in enumerate((5, 30, 60)):
        for v, variation in enumerate(VARIATIONS):
            prompt = common[:length] + [draw.randrange(256) for _ in range(v)]
            made[f"{p}.{v}"] = (prompt, SamplingParams(max_tokens=8 + (7 * p + 5 * v) % 23, **variation))
    return made


@pytest.fixture(scope="module")
def expected(pair: Pair, requests: Requests) -> dict[str, Answer]:
    answers, _, _ = answer(pair.target, pair.tokenizer, plain, requests, together=1, caching=False)
    assert {a.finish_reason for a in answers.values()} == {"stop", "length"}
    assert len({a.token_ids for a in answers.values()}) > 20
    return answers


class Knowing(Recorded):
    """Corrects drafts by what plain decoding wrote: always, up to a random point, or never."""

    def __init__(self, pair: Pair, expected: dict[str, Answer], rate: float) -> None:
        super().__init__(pair)
        draw = random.Random(1)

        def truth(request: Request, count: int) -> Sequence[int]:
            left = expected[request.request_id].token_ids[len(request.output_ids) :][:count]
            return left if rate == 1.0 else left[: draw.randint(0, count) if draw.random() < rate else 0]

        self.truth = truth


@pytest.mark.parametrize(("rate", "least"), [(1.0, 60), (0.7, 30), (0.0, 0)])
@pytest.mark.parametrize("slots", [None, 150])
def test_dflash(
    pair: Pair,
    requests: Requests,
    expected: dict[str, Answer],
    rate: float,
    least: int,
    slots: int | None,
) -> None:
    """With room for all, and with so little that requests are preempted."""
    drafter = Knowing(pair, expected, rate)
    drafter.prepare()
    answers, totals, stats = answer(
        pair.target, pair.tokenizer, drafting("dflash", drafter), requests, slots=slots
    )
    assert answers == expected
    assert totals.drafted_tokens > 100 and totals.accepted_tokens >= least
    assert (stats.preemptions_total > 0) == (slots is not None)


@pytest.mark.parametrize("slots", [None, 150])
def test_standalone(pair: Pair, requests: Requests, expected: dict[str, Answer], slots: int | None) -> None:
    drafter = twin_of_the_target(pair)
    drafter.prepare()
    answers, totals, _ = answer(
        pair.target, pair.tokenizer, drafting("standalone", drafter), requests, slots=slots
    )
    assert answers == expected
    # Sampled and penalised requests too: the same logits, noise, filters and penalties choose the same tokens. What
    # is not accepted was drafted past the end of its request.
    ends = len(requests) * 15
    assert totals.accepted_tokens > 150
    assert totals.drafted_tokens - totals.accepted_tokens <= ends


@pytest.mark.parametrize("kind", ["dflash", "standalone"])
def test_auto(pair: Pair, requests: Requests, expected: dict[str, Answer], kind: str) -> None:
    """Lookup and model side by side: some of these texts repeat themselves."""
    drafter = Knowing(pair, expected, 0.7) if kind == "dflash" else twin_of_the_target(pair)
    drafter.prepare()
    answers, totals, _ = answer(pair.target, pair.tokenizer, drafting("auto", drafter), requests)
    assert answers == expected
    assert totals.accepted_tokens > 30
