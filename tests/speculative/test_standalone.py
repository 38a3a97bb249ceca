"""A small model as drafter: the target's twin, whose drafts are all right as long as it has read all of the text."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from speculative.standalone import MAX_EXTEND
from tests.speculative.pair import Pair, Reply, Served, serving, twin_of_the_target

LENGTH = 24
RANDOM = random.Random(0)
PROMPTS = [[RANDOM.randrange(256) for _ in range(length)] for length in (40, 53, 66)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair.make(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def served(pair: Pair) -> Iterator[Served]:
    with serving(pair, "standalone", drafter=twin_of_the_target(pair)) as running:
        yield running


def hold_to_be_right(reply: Reply) -> None:
    assert reply.stats.accepted_tokens == reply.stats.drafted_tokens > 0


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.1, "seed": 3}, {"repetition_penalty": 1.3}])
def test_all_drafts_of_the_twin_are_accepted(served: Served, sampling: dict[str, float]) -> None:
    for prompt in PROMPTS:
        hold_to_be_right(served.ask(prompt, max_tokens=LENGTH, **sampling))


def test_also_after_a_hit_and_after_opted_out_requests(served: Served) -> None:
    """It reads for itself what it lacks, so nothing is computed again for it."""
    plain = served.ask(PROMPTS[0], "none", max_tokens=LENGTH)
    text = PROMPTS[0] + plain.token_ids
    for _ in range(2):
        hit = served.ask(text, max_tokens=LENGTH)
        assert hit.cached_tokens == len(text) - 1
        hold_to_be_right(hit)
        text += hit.token_ids


def test_also_beside_each_other_and_for_choices_of_one_prompt(pair: Pair) -> None:
    with serving(pair, "standalone", drafter=twin_of_the_target(pair), chunk=24) as served:
        asked = [served.start(prompt, max_tokens=LENGTH) for prompt in PROMPTS]
        asked += [
            served.start(PROMPTS[1], "none" if choice % 2 else None, choice, max_tokens=LENGTH)
            for choice in range(3)
        ]
        for (request, _), reply in zip(asked, served.ask_together(*asked), strict=True):
            if request.speculation.algorithm is None:
                hold_to_be_right(reply)


def test_a_long_prompt_is_read_in_several_steps(served: Served) -> None:
    prompt = [RANDOM.randrange(256) for _ in range(MAX_EXTEND + 70)]
    reply = served.ask(prompt, max_tokens=LENGTH)
    hold_to_be_right(reply)
    drafted = reply.stats.accepted_tokens + reply.stats.verify_steps
    assert drafted <= LENGTH - 2, (
        "the prompt's pass gave a token, and the step that read the most of it another"
    )


@pytest.mark.parametrize("context", [1, 2, 16])
def test_a_context_may_be_shorter_than_a_draft(tmp_path: Path, context: int) -> None:
    short = Pair.make(tmp_path, context)
    with serving(short, "standalone", drafter=twin_of_the_target(short)) as served:
        served.worker.warm_up()
        reply = served.ask([1] * (context - 1) or [1], max_tokens=min(1, context - 1))
    assert reply.finish_reason == "length"


def test_drafting_goes_up_to_the_context_limit(pair: Pair, served: Served) -> None:
    prompt = [RANDOM.randrange(256) for _ in range(620)]
    reply = served.ask(prompt, max_tokens=200)
    assert len(prompt) + len(reply.token_ids) == pair.target.max_context_len
    hold_to_be_right(reply)
