"""POST /v1/chat/completions as the openai client sees it, over a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.app.fakes import CONTEXT_LEN, ByteTokenizer, FakeEngine, http_server, make_app, serving

REPLY = "Grüße 👩‍🚀!"
HI: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module", params=[1, 5], ids=lambda tokens: f"interval {tokens}")
def server(request: pytest.FixtureRequest) -> Iterator[tuple[openai.OpenAI, FakeEngine]]:
    with http_server(REPLY, request.param, tokens_per_step=3) as (http, engine):
        yield openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0), engine


@pytest.fixture
def client(server: tuple[openai.OpenAI, FakeEngine]) -> openai.OpenAI:
    return server[0]


@pytest.fixture
def engine(server: tuple[openai.OpenAI, FakeEngine]) -> FakeEngine:
    return server[1]


def prompt_of(engine: FakeEngine) -> str:
    return engine.tokenizer.decode(engine.requests[-1].prompt_ids, skip_special_tokens=False)


def test_an_answer_has_the_shape_of_the_openai_api(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=HI)
    assert answer.id.startswith("chatcmpl-")
    assert (answer.object, answer.model) == ("chat.completion", "tiny")
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", REPLY, "stop")
    assert choice.logprobs is None
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(REPLY.encode())
    assert answer.usage.model_dump()["speculation"]["verify_steps"] > 0


@pytest.mark.parametrize("options", [{}, {"n": 3}, {"logprobs": True, "top_logprobs": 2}, {"max_tokens": 4}])
def test_a_stream_concatenated_equals_the_unstreamed_answer(client: openai.OpenAI, options: dict) -> None:
    whole = client.chat.completions.create(model="tiny", messages=HI, **options)
    contents: dict[int, str] = {}
    logprobs: dict[int, list] = {}
    reasons: dict[int, list] = {}
    for chunk in client.chat.completions.create(model="tiny", messages=HI, stream=True, **options):
        [choice] = chunk.choices
        if choice.index not in contents:
            assert (choice.delta.role, choice.delta.content) == ("assistant", ""), "the role comes first"
        contents[choice.index] = contents.get(choice.index, "") + (choice.delta.content or "")
        if choice.logprobs:
            logprobs.setdefault(choice.index, []).extend(choice.logprobs.content)
        if choice.finish_reason:
            reasons.setdefault(choice.index, []).append(choice.finish_reason)
    for choice in whole.choices:
        assert contents[choice.index] == choice.message.content
        assert reasons[choice.index] == [choice.finish_reason]
        assert logprobs.get(choice.index) == (choice.logprobs and choice.logprobs.content)


def test_usage_closes_a_stream_that_asked_for_it(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=HI, n=2, stream=True, stream_options={"include_usage": True}
    )
    *others, last = list(stream)
    assert all(chunk.usage is None for chunk in others)
    assert last.choices == [] and last.usage is not None
    assert last.usage.completion_tokens == 2 * len(REPLY.encode()) + 1


def test_logprobs_carry_the_exact_bytes(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=HI, logprobs=True, top_logprobs=3)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    assert bytes(byte for entry in content for byte in entry.bytes or []).decode() == REPLY
    assert all(len(entry.top_logprobs) == 3 for entry in content)


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        (HI, "<user>hi</s><assistant>"),
        (
            [{"role": "system", "content": "be"}, *HI, {"role": "assistant", "content": "yo"}, *HI],
            "<system>be</s><user>hi</s><assistant>yo</s><user>hi</s><assistant>",
        ),
        ([{"role": "developer", "content": "be"}, *HI], "<system>be</s><user>hi</s><assistant>"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
            "<user>a\nb</s><assistant>",
        ),
        (
            [
                *HI,
                {
                    "role": "assistant",
                    "tool_calls": [
                        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 5}'}}
                    ],
                },
                {"role": "tool", "tool_call_id": "1", "content": "42"},
            ],
            "<user>hi</s><assistant>f(5)</s><tool>42</s><assistant>",
        ),
    ],
    ids=["user", "turns", "developer is system where the template has none", "text parts", "tool calls"],
)
def test_messages_go_through_the_template(
    client: openai.OpenAI, engine: FakeEngine, messages: Any, prompt: str
) -> None:
    client.chat.completions.create(model="tiny", messages=messages)
    assert prompt_of(engine) == prompt


def test_a_template_that_knows_developers_gets_them() -> None:
    tokenizer = ByteTokenizer(
        "{% for m in messages %}{{ m.role }}{% if m.role == 'developer' %}!{% endif %}{% endfor %}"
    )
    engine = FakeEngine(tokenizer)
    with (
        engine,
        serving(make_app(engine)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client,
    ):
        client.chat.completions.create(model="tiny", messages=[{"role": "developer", "content": "x"}])
        assert prompt_of(engine) == "developer!"


CALL: list[Any] = [
    {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 5}'}},
]


@pytest.mark.parametrize(
    ("template", "turn", "prompt"),
    [
        pytest.param(
            "{% for m in messages %}{% if m['content'] is none %}call{% else %}[{{ m.content }}]{% endif %}{% endfor %}",
            {"content": "", "tool_calls": CALL},
            "[hi]call",
            id="a call is told by its content",
        ),
        pytest.param(
            "{% for m in messages %}{% if m['content'] is none %}call{% else %}[{{ m.content }}]{% endif %}{% endfor %}",
            {"content": ""},
            "[hi][]",
            id="an answer without text is no call",
        ),
        pytest.param(
            "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ '(' + c.function.arguments + ')' }}"
            "{% endfor %}{% endfor %}",
            {"tool_calls": CALL},
            'hi({"x": 5})',
            id="arguments are appended as text",
        ),
        pytest.param(
            "{% for m in messages %}{{ m.content }}{% if 'tool_calls' in m %}call{% endif %}{% endfor %}",
            {"content": "no", "tool_calls": []},
            "hino",
            id="no calls are none",
        ),
    ],
)
def test_calls_are_shown_as_the_template_wants_them(template: str, turn: Any, prompt: str) -> None:
    engine = FakeEngine(ByteTokenizer(template))
    with (
        engine,
        serving(make_app(engine)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client,
    ):
        client.chat.completions.create(model="tiny", messages=[*HI, {"role": "assistant", **turn}])
        assert prompt_of(engine) == prompt


TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}},
]


def test_tools_that_the_template_does_not_show_are_refused() -> None:
    engine = FakeEngine(ByteTokenizer("{% for m in messages %}{{ m.content }}{% endfor %}"))
    with (
        engine,
        serving(make_app(engine)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client,
    ):
        with pytest.raises(openai.BadRequestError, match="no place for tools") as caught:
            client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS)
        assert caught.value.param == "tools"
        client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS, tool_choice="none")
        client.chat.completions.create(model="tiny", messages=HI, tools=[])


def test_tools_reach_the_template_unless_none_may_be_chosen(
    client: openai.OpenAI, engine: FakeEngine
) -> None:
    client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS, tool_choice="auto")
    assert prompt_of(engine).startswith("[look]")
    client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS, tool_choice="none")
    assert "look" not in prompt_of(engine)


@pytest.mark.parametrize(
    ("extra", "prompt"),
    [
        ({"add_generation_prompt": False}, "<user>hi</s>"),
        ({"add_generation_prompt": False, "continue_final_message": True}, "<user>hi"),
        ({"chat_template_kwargs": {"mood": "!"}}, "<user>hi</s><assistant>!"),
    ],
)
def test_template_options_of_vllm(
    client: openai.OpenAI, engine: FakeEngine, extra: dict, prompt: str
) -> None:
    client.chat.completions.create(model="tiny", messages=HI, extra_body=extra)
    assert prompt_of(engine) == prompt


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, CONTEXT_LEN - len("<user>hi") - 1 - len("<assistant>")),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
    ],
    ids=["the rest of the context", "max_tokens", "max_completion_tokens", "max_completion_tokens wins"],
)
def test_how_many_tokens_may_be_generated(
    client: openai.OpenAI, engine: FakeEngine, limits: dict, expected: int
) -> None:
    client.chat.completions.create(model="tiny", messages=HI, **limits)
    assert engine.requests[-1].sampling.max_tokens == expected


def test_messages_longer_than_the_context_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 20_000}])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")


def test_what_the_template_refuses_is_the_clients_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="a tool answers no call") as caught:
        orphan: Any = {"role": "tool", "content": "4"}
        client.chat.completions.create(model="tiny", messages=[*HI, orphan])
    assert caught.value.param == "messages"


def test_a_model_without_a_template_says_so() -> None:
    engine = FakeEngine(ByteTokenizer(chat_template=None))
    with (
        engine,
        serving(make_app(engine)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client,
        pytest.raises(openai.BadRequestError, match="no chat template"),
    ):
        client.chat.completions.create(model="tiny", messages=HI)
