"""What the app adds to the routes: the bearer token, and what is checked before a socket listens."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from dependency_injector import providers
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

from app.application import BearerAuth, build, create_app, server_info
from app.lifecycle import Lifecycle
from app.settings import EngineSettings, ServerSettings, SettingsError
from speculative.adaptive import PayoffController
from tests.tiny_model import CONTEXT_LEN, save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("tiny")))


def guarded(key: str) -> TestClient:
    async def answer(_request: Request) -> Response:
        return PlainTextResponse("in")

    routes = [Route(path, answer) for path in ("/v1/models", "/health", "/health/live", "/health/ready")]
    return TestClient(Starlette(routes=routes, middleware=[Middleware(BearerAuth, key)]))


@pytest.fixture
def client() -> TestClient:
    return guarded("hush")


@pytest.mark.parametrize(
    "given",
    [None, "hush", "Bearer", "Basic hush", "Bearer  hush", "Bearer loud", "Bearer hush!", "Bearer h\xfcsh"],
)
def test_without_the_key_nobody_comes_in(client: TestClient, given: str | None) -> None:
    headers = {} if given is None else {"Authorization": given.encode("latin-1")}
    answer = client.get("/v1/models", headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
@pytest.mark.parametrize("key", ["hush", "pst, größer"])
def test_with_the_key_they_do(scheme: str, key: str) -> None:
    answer = guarded(key).get("/v1/models", headers={"Authorization": f"{scheme} {key}".encode()})
    assert answer.text == "in"


@pytest.mark.parametrize("probe", ["/health", "/health/live", "/health/ready"])
def test_probes_need_no_key(client: TestClient, probe: str) -> None:
    assert client.get(probe).text == "in"


def unusable(**settings: object) -> str:
    with pytest.raises(SettingsError) as caught:
        build(EngineSettings(**settings))  # type: ignore[arg-type]
    return str(caught.value)


def test_a_context_longer_than_the_models_is_refused(model: str) -> None:
    message = unusable(model=model, context_length=CONTEXT_LEN + 1)
    assert f"--context-length {CONTEXT_LEN + 1}" in message
    assert str(CONTEXT_LEN) in message


@pytest.mark.parametrize(
    "flag", ["attention-backend", "prefill-attention-backend", "decode-attention-backend"]
)
def test_an_unknown_attention_backend_is_refused(model: str, flag: str) -> None:
    message = unusable(model=model, **{flag.replace("-", "_"): "psychic"})
    assert f"--{flag} psychic" in message
    assert "torch_native" in message


@pytest.mark.parametrize("algorithm", ["dflash", "standalone"])
def test_an_algorithm_without_its_drafter_is_refused(model: str, algorithm: str) -> None:
    message = unusable(model=model, speculative_algorithm=algorithm)
    assert f"--speculative-algorithm {algorithm}" in message
    assert "--speculative-draft-model-path" in message


def test_a_drafter_that_is_none_is_refused(model: str) -> None:
    message = unusable(model=model, speculative_algorithm="dflash", speculative_draft_model_path=model)
    assert "--speculative-algorithm standalone" in message


def test_a_window_is_refused_for_a_drafter_that_has_none(model: str) -> None:
    message = unusable(
        model=model,
        speculative_algorithm="standalone",
        speculative_draft_model_path=model,
        speculative_draft_window_size=8,
    )
    assert "--speculative-draft-window-size is for DFlash drafters" in message


def test_a_part_overridden_after_the_checks_is_in_those_that_hold_it(model: str) -> None:
    container = build(EngineSettings(model=model, device="cpu", speculative_algorithm="ngram"))
    tokenizer = container.tokenizer()
    made: list[PayoffController] = []

    def make() -> PayoffController:
        made.append(PayoffController())
        return made[-1]

    container.controller.override(providers.Callable(make))
    container.engine()
    assert len(made) == 1
    assert container.tokenizer() is tokenizer, "what was read is not read again"


def test_server_info_describes_the_drafter_beside_its_target(model: str) -> None:
    settings = EngineSettings(
        model=model, speculative_algorithm="standalone", speculative_draft_model_path=model
    )
    container = build(settings)
    info = server_info(container, Lifecycle(container.startup(), container.engine))
    target, draft = info["workers"]["target"], info["workers"]["draft"]
    assert set(draft) == set(target) >= {"model", "dtype", "kv_cache_dtype", "slots", "stage"}
    alone = build(EngineSettings(model=model, speculative_algorithm="auto", speculative_ngram_history=99))
    info = server_info(alone, Lifecycle(alone.startup(), alone.engine))
    assert info["workers"]["draft"] is None
    assert (info["speculation"]["algorithm"], info["speculation"]["ngram_history"]) == ("auto", 99)


def test_a_device_that_is_not_one_is_refused(model: str) -> None:
    assert "abacus" in unusable(model=model, device="abacus")


def test_a_model_without_a_tokenizer_is_refused(model: str, tmp_path: Path) -> None:
    for file in Path(model).iterdir():
        if file.name != "tokenizer.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    assert "tokenizer.json" in unusable(model=str(tmp_path))


def test_a_broken_chat_template_is_refused(model: str, tmp_path: Path) -> None:
    template = tmp_path / "broken.jinja"
    template.write_text("{% for m in messages %}")
    assert "broken.jinja" in unusable(model=model, chat_template=str(template))


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("completions", {"prompt": "abc"}),
        ("chat/completions", {"messages": [{"role": "user", "content": "abc"}]}),
    ],
)
def test_a_stream_sends_as_many_tokens_together_as_is_set(
    model: str, route: str, body: dict[str, Any]
) -> None:
    settings = ServerSettings(
        model=model, device="cpu", dtype="float32", max_total_tokens=512, threads=1, stream_interval=16
    )
    container = build(settings)
    lifecycle = Lifecycle(container.startup(), container.engine)
    asked = {**body, "max_tokens": 49, "temperature": 0, "ignore_eos": True, "stream": True}
    with TestClient(create_app(container, lifecycle, settings)) as client:
        while client.get("/health/ready").status_code != 200:
            assert lifecycle.error is None
            time.sleep(0.01)
        usage = {"stream_options": {"include_usage": True}}
        lines = client.post(f"/v1/{route}", json=asked | usage).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    texts = [choice.get("text") or choice.get("delta", {}).get("content") for choice in choices]
    assert events[-1]["usage"]["completion_tokens"] == 49
    assert (
        1 < sum(map(bool, texts)) <= 12
    )  # one token, sixteen and as many again, less where they came slowly
