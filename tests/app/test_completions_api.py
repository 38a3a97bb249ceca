"""POST /v1/completions as the openai client sees it, over a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.app.fakes import CONTEXT_LEN, FakeEngine, http_server, logprob_of

REPLY = "naïve 🐈‍⬛ 世界, é"  # many characters of several tokens: one token is one byte here


@pytest.fixture(scope="module", params=[1, 5], ids=lambda tokens: f"interval {tokens}")
def server(request: pytest.FixtureRequest) -> Iterator[tuple[openai.OpenAI, FakeEngine]]:
    with http_server(REPLY, request.param, tokens_per_step=2) as (http, engine):
        yield openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0), engine


@pytest.fixture
def client(server: tuple[openai.OpenAI, FakeEngine]) -> openai.OpenAI:
    return server[0]


@pytest.fixture
def engine(server: tuple[openai.OpenAI, FakeEngine]) -> FakeEngine:
    return server[1]


def test_an_answer_has_the_shape_of_the_openai_api(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="abcd", max_tokens=100)
    assert answer.id.startswith("cmpl-")
    assert (answer.object, answer.model) == ("text_completion", "tiny")
    [choice] = answer.choices
    assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (0, REPLY, "stop", None)


def test_usage_says_what_was_emitted_cached_and_speculated(client: openai.OpenAI) -> None:
    usage = client.completions.create(model="tiny", prompt="abcd", max_tokens=4).usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (4, 4, 8)
    assert usage.prompt_tokens_details.cached_tokens == 2
    # Two steps of two tokens; the fake drafts 4 and accepts 3 in each.
    assert usage.model_dump()["speculation"] == {"drafted_tokens": 8, "accepted_tokens": 6, "verify_steps": 2}


def test_sixteen_tokens_are_the_default(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="x")
    assert answer.usage is not None and answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("ab", 1), (["ab", "cde"], 2), ([65, 66], 1), ([[65, 66], [67]], 2)],
    ids=["text", "texts", "token ids", "lists of token ids"],
)
def test_prompts_come_in_four_forms(client: openai.OpenAI, prompt: Any, count: int) -> None:
    answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=100)
    assert [choice.index for choice in answer.choices] == list(range(count))
    assert {choice.text for choice in answer.choices} == {REPLY}


def test_n_choices_of_each_prompt_are_numbered_prompt_by_prompt(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    answer = client.completions.create(model="tiny", prompt=["abcd", "ef"], n=3, max_tokens=100)
    texts = [REPLY, "+" + REPLY, "++" + REPLY]
    assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(texts * 2))
    assert [request.choice for request in engine.requests[-6:]] == [0, 1, 2, 0, 1, 2]
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    tokens = len(REPLY.encode())
    assert answer.usage.completion_tokens == 2 * (tokens + tokens + 1 + tokens + 2)
    assert answer.usage.prompt_tokens == 4 + 2, "a prompt counts once, not once a choice"
    assert answer.usage.prompt_tokens_details.cached_tokens == 2 + 1


@pytest.mark.parametrize(
    "options", [{}, {"n": 3}, {"echo": True}, {"logprobs": 2}, {"echo": True, "logprobs": 0}]
)
def test_a_stream_concatenated_equals_the_unstreamed_answer(client: openai.OpenAI, options: dict) -> None:
    request: dict[str, Any] = {"model": "tiny", "prompt": ["é1", "two"], "max_tokens": 100, **options}
    whole = client.completions.create(**request)
    texts: dict[int, str] = {}
    logprobs: dict[int, dict[str, list]] = {}
    reasons: dict[int, list[str]] = {}
    for chunk in client.completions.create(**request, stream=True):
        assert chunk.id.startswith("cmpl-") and chunk.usage is None
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            assert "\ufffd" not in choice.text
            if choice.finish_reason:
                reasons.setdefault(choice.index, []).append(choice.finish_reason)
            if choice.logprobs:
                lists = logprobs.setdefault(choice.index, {})
                for name, values in choice.logprobs.model_dump().items():
                    lists.setdefault(name, []).extend(values)
    for choice in whole.choices:
        assert texts[choice.index] == choice.text
        assert reasons[choice.index] == [choice.finish_reason], "each choice ends once"
        assert logprobs.get(choice.index) == (choice.logprobs and choice.logprobs.model_dump())


def test_usage_closes_a_stream_that_asked_for_it(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True}
    chunks = list(
        client.completions.create(
            model="tiny", prompt=["abcd", "ef"], n=2, max_tokens=4, stream=True, stream_options=options
        )
    )
    *others, last = chunks
    assert all(chunk.usage is None for chunk in others)
    assert last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (6, 16)
    assert last.usage.model_dump()["speculation"]["verify_steps"] == 8


def test_echo_repeats_the_prompt_first(client: openai.OpenAI) -> None:
    assert (
        client.completions.create(model="tiny", prompt="é: ", echo=True, max_tokens=2).choices[0].text
        == "é: na"
    )
    ids = client.completions.create(model="tiny", prompt=[0, 256], echo=True, max_tokens=2)
    assert ids.choices[0].text == "!</s>na", "an echo of token ids shows special tokens too"


def test_echo_without_generating_scores_the_prompt(client: openai.OpenAI, engine: FakeEngine) -> None:
    answer = client.completions.create(model="tiny", prompt="aéb", echo=True, max_tokens=0, logprobs=1)
    ids = engine.tokenizer.encode("aéb")
    [choice] = answer.choices
    assert choice.text == "aéb" and choice.finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 0
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["a", "bytes:\\xc3", "bytes:\\xa9", "b"]
    assert choice.logprobs.token_logprobs == [None, *map(logprob_of, ids[1:])]
    assert choice.logprobs.text_offset == [0, 1, 1, 2], "offsets count characters"
    assert choice.logprobs.top_logprobs == [
        None,
        {"bytes:\\xc3": logprob_of(ids[1]), "!": 0.0},
        {"bytes:\\xa9": logprob_of(ids[2]), "!": 0.0},
        {"b": logprob_of(ids[3]), "!": 0.0},
    ]


def test_logprobs_are_of_the_emitted_tokens(client: openai.OpenAI) -> None:
    [choice] = client.completions.create(model="tiny", prompt="x", max_tokens=2, logprobs=2).choices
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["n", "a"]
    assert choice.logprobs.text_offset == [0, 1]
    assert [set(top) for top in choice.logprobs.top_logprobs or []] == [{"n", "!", '"'}, {"a", "!", '"'}]


def test_every_sampling_field_reaches_the_engine(client: openai.OpenAI, engine: FakeEngine) -> None:
    own: dict[str, Any] = {
        "top_k": 7,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "min_tokens": 2,
        "stop_token_ids": [5, 6],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "speculation": {"algorithm": "none", "num_draft_tokens": 3},
    }
    standard: dict[str, Any] = {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.75,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
        "seed": -3,
    }
    client.completions.create(
        model="tiny", prompt="ab", stop=["S", "T"], logit_bias={"7": -100}, **standard, extra_body=own
    )
    request = engine.requests[-1]
    assert request.prompt_ids == engine.tokenizer.encode("ab")
    speculation = own.pop("speculation")
    for name, value in {**standard, **own, "stop": ("S", "T"), "logit_bias": {7: -100.0}}.items():
        sampled = getattr(request.sampling, name)
        assert (list(sampled) if name == "stop_token_ids" else sampled) == value, name
    assert (request.speculation.algorithm, request.speculation.num_draft_tokens) == tuple(
        speculation.values()
    )


def test_null_is_the_default(client: openai.OpenAI, engine: FakeEngine) -> None:
    names = ["temperature", "top_p", "n", "stop", "seed", "logit_bias", "max_tokens", "suffix", "speculation"]
    client.completions.create(model="tiny", prompt="ab")
    plain = engine.requests[-1].sampling
    client.completions.create(model="tiny", prompt="ab", extra_body=dict.fromkeys(names))
    assert engine.requests[-1].sampling == plain


def test_speculation_can_be_turned_off_for_a_request(client: openai.OpenAI) -> None:
    off = {"speculation": {"algorithm": "none"}}
    usage = client.completions.create(model="tiny", prompt="ab", extra_body=off).usage
    assert usage is not None
    assert usage.model_dump()["speculation"] == {"drafted_tokens": 0, "accepted_tokens": 0, "verify_steps": 0}


def test_a_prompt_may_fill_the_context_but_for_what_is_asked(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="x" * (CONTEXT_LEN - 5), max_tokens=5)
    assert answer.usage is not None and answer.usage.total_tokens == CONTEXT_LEN
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="x" * (CONTEXT_LEN - 5), max_tokens=6)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "max_tokens")
    assert all(str(number) in caught.value.message for number in (CONTEXT_LEN, CONTEXT_LEN - 5, 6))


def test_a_prompt_longer_than_the_context_is_refused_with_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="x" * 1000)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    assert "1000" in caught.value.message and str(CONTEXT_LEN) in caught.value.message


def test_a_long_prompt_is_encoded_like_a_short_one(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="40000 tokens"):
        client.completions.create(model="tiny", prompt="x" * 40_000)
