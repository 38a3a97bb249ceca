"""Models, version, server info, metrics, tokenize and detokenize; and what answers before the server is ready."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.app.fakes import CONTEXT_LEN, ByteTokenizer, FakeEngine, FakeStatus, http_server, make_app, serving


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[httpx.Client, FakeEngine]]:
    with http_server(tokens_per_step=4) as (client, engine):
        yield client, engine


@pytest.fixture
def client(server: tuple[httpx.Client, FakeEngine]) -> httpx.Client:
    return server[0]


@pytest.fixture
def tokenizer(server: tuple[httpx.Client, FakeEngine]) -> ByteTokenizer:
    return server[1].tokenizer


def test_the_model_is_listed_and_found(client: httpx.Client) -> None:
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none") as sdk:
        [model] = sdk.models.list().data
        assert (model.id, model.object, model.model_dump()["max_model_len"]) == ("tiny", "model", CONTEXT_LEN)
        assert sdk.models.retrieve("tiny") == model
        with pytest.raises(openai.NotFoundError) as caught:
            sdk.models.retrieve("someone/else")
        assert caught.value.code == "model_not_found"


def test_a_model_name_may_have_slashes() -> None:
    engine = FakeEngine(ByteTokenizer())
    with engine, serving(make_app(engine, served_model_name="org/model")) as url:
        assert httpx.get(f"{url}/v1/models/org/model").json()["id"] == "org/model"


def test_version_and_server_info(client: httpx.Client) -> None:
    assert client.get("/version").json() == {"version": "9.9"}
    assert client.get("/server_info").json() == {"version": "9.9", "stage": "ready"}


MESSAGES = [{"role": "user", "content": "x"}]


class WatchedTokenizer(ByteTokenizer):
    """Notes how much it does on which threads, in characters or tokens; nobody knows how much a template does."""

    def __init__(self) -> None:
        super().__init__()
        self.work: Counter[int] = Counter()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.work[threading.get_ident()] += len(text)
        return super().encode(text, add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.work[threading.get_ident()] += len(ids)
        return super().decode(ids, skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        self.work[threading.get_ident()] += 1
        return super().token_bytes(token_id)

    def apply_chat_template(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        self.work[threading.get_ident()] += 20_000
        return super().apply_chat_template(messages, **variables)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "x" * 20_000, "return_token_strs": True},
        {"messages": MESSAGES},
    ],
    ids=["long text", "a template"],
)
def test_the_event_loop_waits_neither_for_long_texts_nor_for_templates(body: dict[str, Any]) -> None:
    assert_off_loop("/tokenize", body)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/completions", {"prompt": [65] * 1000, "echo": True, "logprobs": 20, "max_tokens": 0}),
        ("/v1/completions", {"prompt": [[65] * 1000] * 20, "echo": True, "max_tokens": 0}),
        ("/v1/completions", {"prompt": "x", "logprobs": 20, "max_tokens": 1000}),
        ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "top_logprobs": 20}),
    ],
    ids=["logprobs of a prompt", "echoes", "logprobs of a completion", "logprobs of a message"],
)
def test_nor_for_long_answers(route: str, body: dict[str, Any], stream: bool) -> None:
    assert_off_loop(route, {**body, "stream": stream})


def assert_off_loop(route: str, body: dict[str, Any]) -> None:
    """The tokenizer does next to nothing for the request on the event loop's thread."""
    tokenizer = WatchedTokenizer()
    engine = FakeEngine(ByteTokenizer(), "+" * 1000, tokens_per_step=1000)
    loops: set[int] = set()
    app = make_app(engine, tokenizer=lambda: tokenizer, max_context_len=lambda: 2048)

    async def noting(scope: Any, receive: Any, send: Any) -> None:
        loops.add(threading.get_ident())
        await app(scope, receive, send)

    with engine, serving(noting) as url:
        assert httpx.post(f"{url}{route}", json=body, timeout=20).status_code == 200
    [on_loop] = [tokenizer.work.pop(thread, 0) for thread in loops]
    assert on_loop <= 1000 and tokenizer.work.total() >= 20_000


def test_text_is_tokenized(client: httpx.Client, tokenizer: ByteTokenizer) -> None:
    answer = client.post("/tokenize", json={"prompt": "hé"}).json()
    tokens = tokenizer.encode("hé")
    assert answer == {"count": 3, "max_model_len": CONTEXT_LEN, "tokens": tokens, "token_strs": None}
    strings = client.post("/tokenize", json={"prompt": "hi", "return_token_strs": True}).json()["token_strs"]
    assert strings == ["h", "i"]


def test_messages_are_tokenized_as_chat_would(client: httpx.Client, tokenizer: ByteTokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    answer = client.post("/tokenize", json={"messages": messages}).json()
    assert tokenizer.decode(answer["tokens"], skip_special_tokens=False) == "<user>hi</s><assistant>"
    bare = client.post("/tokenize", json={"messages": messages, "add_generation_prompt": False}).json()
    assert bare["count"] == answer["count"] - len("<assistant>")


@pytest.mark.parametrize(
    "body", [{}, {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}], ids=str
)
def test_tokenize_takes_either_form(client: httpx.Client, body: dict[str, Any]) -> None:
    response = client.post("/tokenize", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


def test_tokenize_refuses_the_template_that_chat_refuses(client: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ 1 }}"}
    response = client.post("/tokenize", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "chat_template")


def test_the_empty_text_has_no_tokens(client: httpx.Client) -> None:
    assert client.post("/tokenize", json={"prompt": ""}).json()["count"] == 0
    assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_detokenize_undoes_tokenize(client: httpx.Client) -> None:
    text = "Ünï 🐈</s>\n"
    tokens = client.post("/tokenize", json={"prompt": text}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": text}


@pytest.mark.parametrize(
    ("tokens", "param"), [([257], "tokens"), ([-1], "tokens[0]"), (["a"], "tokens[0]"), ("a", "tokens")]
)
def test_detokenize_checks_its_tokens(client: httpx.Client, tokens: Any, param: str) -> None:
    response = client.post("/detokenize", json={"tokens": tokens})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def scrape(client: httpx.Client) -> dict[str, float]:
    """Every sample, by `name` or `name{label values}`."""
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            labels = ",".join(sample.labels.values())
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples


def test_metrics_show_the_engines_counters(client: httpx.Client) -> None:
    samples = scrape(client)
    expected = {
        "tandem_requests_running": 3,
        "tandem_requests_waiting": 2,
        "tandem_kv_slots_capacity": 100,
        "tandem_kv_slots{free}": 60,
        "tandem_kv_slots{evictable}": 30,
        "tandem_kv_slots{protected}": 10,
        "tandem_prompt_tokens_total": 11,
        "tandem_generation_tokens_total": 22,
        "tandem_cached_tokens_total": 5,
        "tandem_drafted_tokens_total": 8,
        "tandem_accepted_tokens_total": 6,
        "tandem_verify_steps_total": 4,
        "tandem_preemptions_total": 1,
        "tandem_requests_finished_total{stop}": 7,
        "tandem_drafter_accept_length_alarm": 1,
    }
    assert {name: samples.get(name) for name in expected} == expected


def test_metrics_time_every_choice(client: httpx.Client) -> None:
    before = scrape(client)
    client.post("/v1/completions", json={"prompt": "a", "n": 2, "max_tokens": 8})
    after = scrape(client)

    def grown(name: str) -> float:
        return after[f"tandem_{name}"] - before[f"tandem_{name}"]

    for name in (
        "time_to_first_token_seconds",
        "time_per_output_token_seconds",
        "e2e_request_latency_seconds",
    ):
        assert grown(f"{name}_count") == 2, name
    assert grown("inter_token_latency_seconds_count") == 2, (
        "two deliveries of four tokens leave one gap a choice"
    )
    assert grown("accept_length_count") == 2
    assert grown("accept_length_sum") == 8, "the fake emits four tokens a verify step"


API = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
]


def not_built() -> Any:
    raise AssertionError("nothing may be asked of parts that are not there yet")


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (FakeStatus("attention_backends", ready=False), "attention_backends"),
        (FakeStatus("draining", ready=False), "draining"),
        (FakeStatus("runner", ready=False, error="weights are corrupt"), "weights are corrupt"),
    ],
    ids=["starting", "draining", "failed"],
)
def test_a_server_that_is_not_ready_answers_503_and_says_where_it_is(status: FakeStatus, says: str) -> None:
    engine = FakeEngine(ByteTokenizer())
    app = make_app(engine, status, engine=not_built, tokenizer=not_built, max_context_len=not_built)
    with serving(app) as url, httpx.Client(base_url=url) as client:
        for method, route in API:
            response = client.request(method, route, json={} if method == "POST" else None)
            assert response.status_code == 503, route
            assert says in response.json()["error"]["message"]
            assert int(response.headers["retry-after"]) > 0
        assert client.get("/metrics").status_code == 200
        assert client.get("/server_info").status_code == 200


def test_metrics_go_on_while_the_server_drains() -> None:
    engine, status = FakeEngine(ByteTokenizer()), FakeStatus()
    with engine, serving(make_app(engine, status)) as url, httpx.Client(base_url=url) as client:
        assert scrape(client)["tandem_requests_running"] == 3
        status.ready = False
        assert scrape(client)["tandem_requests_running"] == 3
