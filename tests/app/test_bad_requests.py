"""What the server refuses, and how: status, field and code of each error, never a 500 for a request's fault."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from app.errors import ApiError
from app.routes.requests import read_bytes
from tests.app.fakes import http_server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with http_server() as (client, _engine):
        yield client


def assert_error(response: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["type"]
    assert error["param"] == param, error
    return error


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 1.1}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "16"}, "max_tokens"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 666}, "seed"),  # what only the engine knows
        ({"stop": ""}, "stop[0]"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [257]}, "stop_token_ids"),
        ({"stop_token_ids": [0] * 1025}, "stop_token_ids"),
        ({"logit_bias": {"257": 1}}, "logit_bias"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias.-1"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"speculation": {"algorithm": "medusa"}}, "speculation.algorithm"),
        ({"speculation": {"num_draft_tokens": 0}}, "speculation.num_draft_tokens"),
        ({"speculation": "none"}, "speculation"),
        ({"speculation": {"algorithm": "none", "num_drafts": 3}}, "speculation.num_drafts"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_json": {}}, "guided_json"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"grammar": "root ::= x"}, "grammar"),
        ({"json_schema": {}}, "json_schema"),
        ({"regex": "a+"}, "regex"),
        ({"lora": [{"id": 0}]}, "lora"),
    ],
    ids=lambda value: str(value)[:60],
)
@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_fields_out_of_range_are_named(client: httpx.Client, route: str, fields: dict, param: str) -> None:
    base = {"prompt": "x"} if route == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    assert_error(client.post(route, json={**base, **fields}), 400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": {"text": "x"}}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [257]}, "prompt"),
        ({"prompt": ["x"] * 17, "n": 128}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_fields_of_completions_are_checked(client: httpx.Client, fields: dict, param: str) -> None:
    assert_error(client.post(COMPLETIONS, json={"prompt": "x", **fields}), 400, param)


IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x", **fields}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        (message(role="robot"), "messages[0].role"),
        (message(content=5), "messages[0].content"),
        (message(content=None), "messages[0]"),
        (message(content=[IMAGE]), "messages[0].content"),
        (message(content=[{"type": "text"}]), "messages[0].content"),
        (message(content=["x"]), "messages[0].content"),
        (
            message(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": "[}"}}]),
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"echo": True}, "echo"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    ],
    ids=str,
)
def test_fields_of_chat_are_checked(client: httpx.Client, fields: dict, param: str) -> None:
    assert_error(client.post(CHAT, json={**message(), **fields}), 400, param)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_tokns", "max_tokens"),
        ("temprature", "temperature"),
        ("top-p", "top_p"),
        ("n_predict", "max_tokens"),
        ("max_output_tokens", "max_tokens"),
        ("stop_sequences", "stop"),
        ("repeat_penalty", "repetition_penalty"),
        ("completion_tokens", "max_completion_tokens"),
    ],
)
def test_a_slip_in_a_field_is_told(client: httpx.Client, name: str, meant: str) -> None:
    error = assert_error(client.post(CHAT, json={**message(), name: 1}), 400, name)
    assert f"`{meant}`" in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"store": True},
        {"metadata": {"a": "b"}},
        {"n": 1, "best_of": 1},
        {"made_up": 5},
        {"use_beam_search": False},
        {"typical_p": 1.0, "mirostat": 0, "cache_prompt": True, "top_n": None},
        {"models": None, "session_id": "x", "chat_id": "y", "metadata": {}, "prompt_cache_key": "z"},
    ],
    ids=str,
)
def test_what_changes_nothing_is_ignored(client: httpx.Client, fields: dict) -> None:
    assert client.post(COMPLETIONS, json={"prompt": "x", **fields}).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b'{"prompt": "x"} trailing',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ' + b"[" * 50_000,
        b'{"made_up": ' + b"[" * 5_000 + b"]" * 5_000 + b"}",
    ],
    ids=[
        "empty",
        "cut",
        "list",
        "string",
        "null",
        "trailing",
        "not UTF-8",
        "half a surrogate",
        "deep",
        "deep, ignored",
    ],
)
@pytest.mark.parametrize("route", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_what_is_not_a_json_object_is_a_bad_request(client: httpx.Client, route: str, body: bytes) -> None:
    assert_error(client.post(route, content=body, headers=JSON), 400)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_are_finite(client: httpx.Client, number: str) -> None:
    body = f'{{"prompt": "x", "temperature": {number}}}'
    assert_error(client.post(COMPLETIONS, content=body, headers=JSON), 400, "temperature")


def test_an_algorithm_that_is_not_run_is_refused_with_those_that_are(client: httpx.Client) -> None:
    response = client.post(COMPLETIONS, json={"prompt": "x", "speculation": {"algorithm": "eagle3"}})
    message = assert_error(response, 400, "speculation.algorithm")["message"]
    assert "'none'" in message and "'ngram'" in message


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT, "/tokenize"])
def test_an_unknown_model_is_not_found(client: httpx.Client, route: str) -> None:
    fields = message() if route == CHAT else {"prompt": "x"}
    error = assert_error(client.post(route, json={**fields, "model": "gpt-4"}), 404, "model")
    assert error["code"] == "model_not_found"
    assert "tiny" in error["message"], "says which there is"


def test_an_unknown_route_is_not_found(client: httpx.Client) -> None:
    assert_error(client.post("/v1/embeddings", json={}), 404)


@pytest.mark.parametrize(("method", "route"), [("GET", COMPLETIONS), ("DELETE", "/v1/models"), ("PUT", CHAT)])
def test_a_wrong_method_is_not_allowed(client: httpx.Client, method: str, route: str) -> None:
    response = client.request(method, route)
    assert_error(response, 405)
    assert response.headers["allow"]


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded", "jsonish"])
def test_a_body_must_be_called_json(client: httpx.Client, content_type: str | None) -> None:
    headers = {"Content-Type": content_type} if content_type else {}
    assert_error(client.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=headers), 415)


@pytest.mark.parametrize(
    "content_type", ["application/json; charset=utf-8", "Application/JSON", "application/x+json"]
)
def test_json_has_several_names(client: httpx.Client, content_type: str) -> None:
    headers = {"Content-Type": content_type}
    assert client.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=headers).status_code == 200


def test_a_body_past_the_limit_is_too_large(client: httpx.Client) -> None:
    assert_error(client.post(COMPLETIONS, json={"prompt": "x" * 100_000}), 413)


def test_the_limit_holds_where_no_length_is_declared(client: httpx.Client) -> None:
    whole = json.dumps({"prompt": "x" * 100_000}).encode()
    pieces = (whole[start : start + 10_000] for start in range(0, len(whole), 10_000))
    assert_error(client.post(COMPLETIONS, content=pieces, headers=JSON), 413)


@pytest.mark.asyncio
async def test_a_length_may_have_any_number_of_digits() -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    def request(length: str) -> Request:
        headers = {"content-type": "application/json", "content-length": length}
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        return Request({"type": "http", "method": "POST", "headers": raw}, receive)

    assert await read_bytes(request("0" * 5000 + "2"), 2) == b"{}"
    with pytest.raises(ApiError) as refused:
        await read_bytes(request("9" * 5000), 2)
    assert refused.value.status == 413


def test_the_server_still_serves_after_all_this(client: httpx.Client) -> None:
    assert client.post(COMPLETIONS, json={"prompt": "x"}).json()["choices"][0]["text"] == "Hello, world"


MANY = 4000


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/detokenize", {"tokens": [""] * MANY}, "tokens[0]"),
        (CHAT, {"messages": [{"role": "x"}] * MANY}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user", "content": ""}], "tools": [{}] * MANY}, "tools[0].type"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {str(number): "" for number in range(MANY)}}, None),
        (COMPLETIONS, {"prompt": "a", "speculation": {f"fast{number}": 1 for number in range(MANY)}}, None),
        (COMPLETIONS, {"prompt": "a", **{f"max_tokns{number}": 1 for number in range(MANY)}}, None),
    ],
    ids=["tokens", "messages", "tools", "logit_bias", "speculation", "unknown fields"],
)
def test_of_many_mistakes_one_is_told(
    client: httpx.Client, path: str, body: dict[str, Any], param: str | None
) -> None:
    error = assert_error(client.post(path, json=body), 400, param)
    assert len(error["message"]) < 200
