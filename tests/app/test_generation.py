"""Requests in flight: clients that go away, a full queue, failures of the engine, many clients at once."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from app.disconnects import QuietDisconnects
from app.errors import ApiError
from app.generation import LONGEST_WAIT, Generator, collect
from app.metrics import Metrics
from app.routes.requests import json_response
from app.sse import EventStream
from engine.request import OutputEvent, Request, SamplingParams, SpeculationParams
from tests.app.fakes import ByteTokenizer, FakeEngine, FakeStatus, http_server, make_app, serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": ["a", "b"], "n": 2},
    CHAT: {"messages": [{"role": "user", "content": "x"}], "n": 4},
}


def post_and_hang_up(
    url: httpx.URL, route: str, body: dict[str, Any], engine: FakeEngine, read: bytes
) -> None:
    """Send a request on a bare socket, read until `read` has come, close once all four choices are in flight."""
    data = json.dumps(body).encode()
    head = f"POST {route} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection((url.host, url.port or 0), timeout=10) as connection:
        connection.sendall(head.encode() + data)
        received = b""
        while read not in received:
            received += connection.recv(4096)
        assert engine.wait_until(lambda engine: engine.num_live == 4)


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_all_its_requests(route: str, stream: bool) -> None:
    with http_server(stall_after=1) as (client, engine):
        body = {**BODIES[route], "stream": stream}
        post_and_hang_up(client.base_url, route, body, engine, read=b"data: " if stream else b"")
        assert engine.wait_until(lambda engine: engine.num_live == 0), "the engine was never told"
        assert sum(engine.aborted.values()) == 4


def test_a_client_that_goes_away_before_the_first_token_frees_its_requests() -> None:
    with http_server(stall_after=0) as (client, engine):
        post_and_hang_up(client.base_url, CHAT, {**BODIES[CHAT], "stream": True}, engine, read=b"")
        assert engine.wait_until(lambda engine: engine.num_live == 0)


def test_finished_requests_are_not_aborted() -> None:
    with http_server() as (client, engine):
        assert client.post(COMPLETIONS, json={"prompt": "a", "n": 3}).status_code == 200
        assert "[DONE]" in client.post(COMPLETIONS, json={"prompt": "a", "n": 3, "stream": True}).text
        assert not engine.aborted


def test_a_fault_of_the_server_is_a_500_and_the_next_request_is_served() -> None:
    class BrokenTokenizer(ByteTokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            if text == "break":
                raise RuntimeError("a secret of the house")
            return super().encode(text, add_special_tokens)

    engine = FakeEngine(BrokenTokenizer())
    with engine, serving(make_app(engine)) as url:
        broken = httpx.post(url + COMPLETIONS, json={"prompt": "break"})
        assert broken.status_code == 500
        assert broken.json()["error"]["type"] == "server_error" and "secret" not in broken.text
        assert httpx.post(url + COMPLETIONS, json={"prompt": "a"}).status_code == 200


def test_one_connection_serves_request_after_request() -> None:
    with http_server() as (client, _engine):
        for stream in [False, True] * 3:
            response = client.post(COMPLETIONS, json={"prompt": "a", "stream": stream})
            assert "Hello" in response.text or '"H"' in response.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_a_full_queue_is_answered_at_once_and_takes_none_of_the_choices(route: str, stream: bool) -> None:
    with http_server(max_queued=3) as (client, engine):
        response = client.post(route, json={**BODIES[route], "stream": stream})
        assert response.status_code == 429
        assert response.headers["retry-after"] == "7"
        assert response.json()["error"]["code"] == "queue_full"
        assert engine.requests == []


def test_a_stopped_engine_is_unavailable() -> None:
    with http_server() as (client, engine):
        engine.stopped = True
        response = client.post(COMPLETIONS, json={"prompt": "a"})
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) > 0


def test_an_error_of_one_choice_ends_the_request_with_it() -> None:
    with http_server(fail="the numbers ran out") as (client, _engine):
        response = client.post(COMPLETIONS, json={"prompt": "a"})
        assert response.status_code == 500
        assert response.json()["error"]["message"] == "the numbers ran out"


def test_an_error_in_mid_stream_is_its_last_event() -> None:
    with http_server(fail="the numbers ran out") as (client, _engine):
        response = client.post(COMPLETIONS, json={"prompt": "a", "stream": True})
        events = response.text.strip().split("\n\n")
        assert response.status_code == 200
        assert json.loads(events[0].removeprefix("data: "))["choices"][0]["text"] == "H"
        assert json.loads(events[-1].removeprefix("data: "))["error"]["message"] == "the numbers ran out"
        sdk = openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none")
        with sdk, pytest.raises(openai.APIError, match="the numbers ran out"):
            list(sdk.completions.create(model="tiny", prompt="a", stream=True))


def test_a_request_that_the_engine_aborts_is_told_to_try_again() -> None:
    with http_server(end_with="abort") as (client, _engine):
        response = client.post(COMPLETIONS, json={"prompt": "a"})
        assert response.status_code == 503 and "retry-after" in response.headers
        assert '"error"' in client.post(COMPLETIONS, json={"prompt": "a", "stream": True}).text


def test_requests_in_flight_finish_after_readiness_is_gone() -> None:
    status, engine = FakeStatus(), FakeEngine(ByteTokenizer(), stall_after=1)
    with engine, serving(make_app(engine, status)) as url:
        answers: list[httpx.Response] = []

        def ask() -> None:
            answers.append(httpx.post(url + COMPLETIONS, json={"prompt": "a"}, timeout=20))

        thread = threading.Thread(target=ask)
        thread.start()
        assert engine.wait_until(lambda engine: engine.num_live == 1)
        status.ready, status.stage = False, "draining"
        refused = httpx.post(url + COMPLETIONS, json={"prompt": "b"})
        engine.resume()
        thread.join()
    assert refused.status_code == 503 and "draining" in refused.json()["error"]["message"]
    assert answers[0].json()["choices"][0]["text"] == "Hello, world"


@pytest.mark.asyncio
async def test_many_clients_each_get_their_own_answer() -> None:
    with http_server("ok 🐈", max_queued=1000) as (http, engine):
        async with openai.AsyncOpenAI(
            base_url=f"{http.base_url}/v1", api_key="none", max_retries=0
        ) as client:

            async def ask(number: int) -> None:
                prompt, n = f"prompt {number}", 1 + number % 3
                if number % 2:
                    answer = await client.completions.create(model="tiny", prompt=prompt, echo=True, n=n)
                    texts = {choice.index: choice.text for choice in answer.choices}
                else:
                    texts = {}
                    async for chunk in await client.completions.create(
                        model="tiny", prompt=prompt, echo=True, n=n, stream=True
                    ):
                        for choice in chunk.choices:
                            texts[choice.index] = texts.get(choice.index, "") + choice.text
                assert texts == {j: prompt + "+" * j + "ok 🐈" for j in range(n)}

            await asyncio.gather(*map(ask, range(40)))
        assert not engine.aborted


class HandEngine:
    """An engine whose events the test sends itself."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.aborted: list[str] = []

    def submit(self, *requests: Request) -> None:
        self.requests += requests

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def stats(self) -> Any:
        raise AssertionError("nobody scrapes here")

    def send(self, index: int, text: str, finish: Any = None) -> None:
        request = self.requests[index]
        request.sink(OutputEvent(request.request_id, text, (1,), finish_reason=finish, completion_tokens=1))


def generator_over(engine: HandEngine) -> Generator:
    return Generator(lambda: engine, Metrics(lambda: engine, FakeStatus(ready=False)))


async def never_disconnects() -> dict[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.fixture
def hand() -> HandEngine:
    return HandEngine()


@pytest.mark.asyncio
async def test_what_has_come_of_a_choice_is_read_as_one_event(hand: HandEngine) -> None:
    generation = generator_over(hand).start("id", [[1], [2]], 1, SamplingParams(), SpeculationParams())
    for text, finish in (("a", None), ("b", "stop")):
        for index in range(2):
            hand.send(index, text, finish)
    bursts = [burst async for burst in generation.bursts()]
    (both,) = bursts
    assert [(i, e.text, e.token_ids, e.finish_reason) for i, e in both] == [
        (0, "ab", (1, 1), "stop"),
        (1, "ab", (1, 1), "stop"),
    ]


@pytest.mark.asyncio
async def test_tokens_wait_for_an_interval_but_the_first_and_the_last_do_not(hand: HandEngine) -> None:
    generation = generator_over(hand).start("id", [[1], [2]], 1, SamplingParams(), SpeculationParams())
    read: list[list[tuple[int, str]]] = []

    async def reader() -> None:
        async for burst in generation.bursts(3):
            read.append([(index, event.text) for index, event in burst])

    task = asyncio.create_task(reader())
    for index, text, finish in [
        *((0, "", None), (0, "a", None), (1, "A", None)),  # nothing to be seen is no beginning
        *((0, "b", None), (1, "B", None), (0, "c", None), (0, "d", None)),
        *((1, "C", None), (0, "e", "stop")),
        *((1, "D", None), (1, "E", None), (1, "F", None), (1, "G", "length")),
    ]:
        hand.send(index, text, finish)
        for _ in range(5):
            await asyncio.sleep(0)
    await asyncio.wait_for(task, 5)
    assert read == [
        [(0, "")],
        [(0, "a")],
        [(1, "A")],
        [(0, "bcd"), (1, "B")],
        [(1, "C"), (0, "e")],
        [(1, "DEF")],
        [(1, "G")],
    ]


@pytest.mark.asyncio
async def test_no_token_waits_for_long(hand: HandEngine) -> None:
    """As when its request lost its slots, and has to wait for others."""
    generation = generator_over(hand).start("id", [[1]], 1, SamplingParams(), SpeculationParams())
    bursts = generation.bursts(1000)
    for text in ("first", "held", "then more"):
        hand.send(0, text)
        ((index, event),) = await asyncio.wait_for(anext(bursts), 20 * LONGEST_WAIT)
        assert (index, event.text) == (0, text)


@pytest.mark.asyncio
@pytest.mark.parametrize("refused", [0, 1], ids=["the status", "a chunk"])
@pytest.mark.parametrize("reason", [RuntimeError("the handler is closed"), OSError()], ids=repr)
async def test_a_connection_that_was_reset_ends_a_stream_quietly(
    hand: HandEngine, refused: int, reason: Exception
) -> None:
    generation = generator_over(hand).start("id", [[1]], 1, SamplingParams(), SpeculationParams())
    sent: list[str] = []

    async def send(message: Any) -> None:
        if len(sent) == refused:
            raise reason
        sent.append(message["type"])

    async def chunks() -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"

    stream = QuietDisconnects(EventStream(generation, chunks()))
    await stream({"type": "http"}, never_disconnects, send)
    assert len(sent) == refused
    assert hand.aborted == ["id-0"]


@pytest.mark.asyncio
async def test_a_connection_that_was_reset_ends_an_answer_quietly_but_a_fault_is_told() -> None:
    async def refuse(message: Any) -> None:
        raise RuntimeError("the handler is closed")

    async def faulty(*_: object) -> None:
        raise RuntimeError("a fault of the app")

    await QuietDisconnects(json_response({}))({"type": "http"}, never_disconnects, refuse)
    with pytest.raises(RuntimeError, match="a fault of the app"):
        await QuietDisconnects(faulty)({"type": "http"}, never_disconnects, refuse)


class CountingLoop(asyncio.SelectorEventLoop):
    """Counts how often it is woken from another thread."""

    wake_ups = 0

    def call_soon_threadsafe(self, *args: Any, **options: Any) -> Any:
        self.wake_ups += 1
        return super().call_soon_threadsafe(*args, **options)


def test_a_burst_wakes_the_loop_once_whatever_its_size(hand: HandEngine) -> None:
    async def two_clients() -> int:
        generator = generator_over(hand)
        clients = [generator.start(name, [[1]], 8, SamplingParams(), SpeculationParams()) for name in "ab"]
        step = threading.Thread(target=lambda: [hand.send(index, "x", "stop") for index in range(16)])
        step.start()
        step.join()  # the loop is busy meanwhile, as with a slow client
        return sum([len(burst) for client in clients async for burst in client.bursts()])

    loop = CountingLoop()
    assert loop.run_until_complete(two_clients()) == 16
    assert loop.wake_ups == 1
    loop.close()


@pytest.mark.asyncio
async def test_no_event_is_lost_between_threads(hand: HandEngine) -> None:
    generation = generator_over(hand).start("id", [[1]], 4, SamplingParams(), SpeculationParams())

    def produce() -> None:
        for number in range(2000):
            hand.send(number % 4, f"{number} ")
        for index in range(4):
            hand.send(index, "", "stop")

    thread = threading.Thread(target=produce)
    thread.start()
    events = await asyncio.wait_for(collect(generation, never_disconnects), 30)
    thread.join()
    for index in range(4):
        assert events[index].text == "".join(f"{i} " for i in range(index, 2000, 4))


@pytest.mark.asyncio
async def test_cancelling_the_reader_aborts_what_has_not_finished(hand: HandEngine) -> None:
    generation = generator_over(hand).start("id", [[1]], 3, SamplingParams(), SpeculationParams())
    reader = asyncio.create_task(collect(generation, never_disconnects))
    hand.send(1, "done", "stop")
    await asyncio.sleep(0.01)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert sorted(hand.aborted) == ["id-0", "id-2"]


@pytest.mark.asyncio
async def test_when_one_choice_fails_the_others_are_aborted(hand: HandEngine) -> None:
    generation = generator_over(hand).start("id", [[1]], 2, SamplingParams(), SpeculationParams())
    hand.send(0, "", "error")
    with pytest.raises(ApiError):
        await collect(generation, never_disconnects)
    assert hand.aborted == ["id-1"]


@pytest.mark.asyncio
async def test_events_after_the_loop_has_closed_do_not_reach_back_into_the_engine(hand: HandEngine) -> None:
    def start_elsewhere() -> None:
        async def start() -> None:
            generator_over(hand).start("id", [[1]], 1, SamplingParams(), SpeculationParams())

        asyncio.run(start())

    await asyncio.to_thread(start_elsewhere)
    hand.send(0, "late", "stop")
