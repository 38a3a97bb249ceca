"""The client side of a server: what is sent, how many at a time, and the measures of what came back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from command import run
from serve_bench import accept_length, arrival_times, serve_bench, summarise
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from streaming import Streamed, stream

from tests.app.fakes import ByteTokenizer, FakeEngine, make_app, serving

COUNT = 6


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Prompt {i}"}) + "\n" for i in range(COUNT)))
    return str(path)


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine(ByteTokenizer(), reply="Hello, world", tokens_per_step=4, step_seconds=0.01)
    with engine:
        yield engine


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_the_last_line_is_json_with_all_measures(
    engine: FakeEngine, prompts: str, endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(make_app(engine)) as url:
        code = run(
            serve_bench,
            ["--base-url", f"{url}/v1", "--prompts", prompts, "--endpoint", endpoint, "--json"],
        )
    summary = last_line(capsys)
    assert code == 0
    assert (summary["requests"], summary["completed"], summary["errors"]) == (COUNT, COUNT, 0)
    assert summary["output_tokens"] == COUNT * len("Hello, world")
    assert summary["output_tokens_per_s"] == pytest.approx(summary["output_tokens"] / summary["seconds"])
    assert summary["requests_per_s"] == pytest.approx(COUNT / summary["seconds"])
    assert (
        summary["accept_length"] == 4.0
    )  # the fake engine accepts three drafts and adds a bonus, every step
    for name in ("ttft_ms", "tpot_ms", "itl_ms"):
        assert 0 < summary[name]["p50"] <= summary[name]["p90"] <= summary[name]["p99"]


def test_sampling_options_reach_the_server(engine: FakeEngine, prompts: str) -> None:
    flags = ["--limit", "2", "--max-tokens", "5", "--temperature", "0.5", "--seed", "9", "--ignore-eos"]
    with serving(make_app(engine)) as url:
        assert run(serve_bench, ["--base-url", f"{url}/v1", "--prompts", prompts, *flags]) == 0
    assert len(engine.requests) == 1 + 2  # one to warm up
    for request in engine.requests:
        sampling = request.sampling
        assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (5, 0.5, 9)
        assert sampling.ignore_eos
    asked = [engine.tokenizer.decode(request.prompt_ids) for request in engine.requests[1:]]
    assert ["Prompt 0" in asked[0], "Prompt 3" in asked[1]] == [True, True]


@dataclass
class Api:
    """Answers requests only once `together` of them are in flight; the warm-up at once."""

    together: int
    status: int = 200
    live: int = 0
    peak: int = 0
    seen: int = 0
    full: anyio.Event = field(default_factory=anyio.Event)

    async def answer(self, request: Request) -> Response:
        self.seen += 1
        if self.seen == 1:
            return StreamingResponse(self.chunks())
        if self.status != 200:
            return JSONResponse({"error": {"message": "no"}}, self.status)
        self.live += 1
        self.peak = max(self.peak, self.live)
        if self.live == self.together:
            self.full.set()
        await self.full.wait()
        await anyio.sleep(0.01)  # whoever is wrongly in flight too would have come by now
        self.live -= 1
        return StreamingResponse(self.chunks())

    async def chunks(self) -> AsyncIterator[str]:
        yield 'data: {"choices": [{"delta": {"content": "x"}}]}\n\n'
        yield "data: [DONE]\n\n"

    @property
    def app(self) -> Starlette:
        return Starlette(routes=[Route("/v1/chat/completions", self.answer, methods=["POST"])])


@pytest.mark.parametrize(
    ("flags", "together"), [(["--concurrency", "3"], 3), (["--rate", "1000", "--concurrency", "1"], COUNT)]
)
def test_how_many_are_in_flight(
    prompts: str, flags: list[str], together: int, capsys: pytest.CaptureFixture[str]
) -> None:
    api = Api(together)
    base = ["--model", "m", "--prompts", prompts, "--timeout", "20", "--json"]
    with serving(api.app) as url:
        assert run(serve_bench, [*base, "--base-url", f"{url}/v1", *flags]) == 0
    assert last_line(capsys)["completed"] == COUNT
    assert api.peak == together


def test_a_server_that_tells_no_usage_is_counted_by_chunks(
    prompts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(Api(1).app) as url:
        flags = ["--model", "m", "--base-url", f"{url}/v1", "--prompts", prompts, "--json"]
        assert run(serve_bench, flags) == 0
    summary = last_line(capsys)
    assert summary["output_tokens"] == COUNT
    assert summary["accept_length"] is None
    assert summary["tpot_ms"] is None


def test_refused_requests_are_errors_and_not_part_of_the_measures(
    prompts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(Api(1, status=429).app) as url:
        flags = ["--model", "m", "--base-url", f"{url}/v1", "--prompts", prompts, "--json"]
        assert run(serve_bench, flags) == 1
    summary = last_line(capsys)
    assert (summary["completed"], summary["errors"], summary["output_tokens"]) == (0, COUNT, 0)
    assert summary["first_error"].startswith("status 429")
    assert summary["ttft_ms"] is None


def test_a_server_that_is_not_there_is_named(prompts: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(serve_bench, ["--base-url", "http://127.0.0.1:9/v1", "--prompts", prompts]) == 2
    assert "http://127.0.0.1:9/v1" in capsys.readouterr().err


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (['{"choices": [{"text": "a"}]}'], "the stream ended before [DONE]"),
        (['{"choices": [{"text": "a"}]}', '{"error": {"message": "the engine died"}}'], "the engine died"),
        (['{"choices": [{"text": "a"}'], "Input data was truncated"),
    ],
)
async def test_a_broken_stream_is_an_error(lines: list[str], error: str) -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, text="".join(f"data: {line}\n\n" for line in lines))

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://server") as client:
        assert (await stream(client, "completions", {})).error == error


def test_latencies_follow_from_arrivals() -> None:
    result = Streamed(10.0, 13.0, [10.5, 11.0, 12.5], "abc", {"completion_tokens": 9})
    assert result.ttft == 0.5
    assert result.tpot == 0.25
    assert result.gaps == [0.5, 1.5]
    silent = Streamed(10.0, 13.0)
    assert (silent.ttft, silent.tpot, silent.gaps) == (3.0, None, [])


def test_failed_requests_count_as_errors_only() -> None:
    good = Streamed(0.0, 2.0, [1.0, 2.0], "ab", {"completion_tokens": 5})
    bad = Streamed(0.0, 9.0, [8.0], "a", error="gone")
    summary = summarise([good, bad], 4.0)
    assert (summary["requests_per_s"], summary["output_tokens_per_s"]) == (0.25, 1.25)
    assert (summary["errors"], summary["first_error"]) == (1, "gone")
    assert summary["ttft_ms"]["mean"] == 1000.0


def test_accept_length_counts_accepted_and_bonus_tokens() -> None:
    def result(accepted: int, steps: int) -> Streamed:
        counters = {"drafted_tokens": 99, "accepted_tokens": accepted, "verify_steps": steps}
        return Streamed(0.0, usage={"speculation": counters})

    assert accept_length([result(10, 2), result(0, 3), Streamed(0.0)]) == (10 + 5) / 5
    assert accept_length([result(0, 0)]) is None


def test_arrivals_are_poisson_and_the_same_for_a_seed() -> None:
    times = arrival_times(4001, rate=50.0, seed=1)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert times[0] == 0.0
    assert mean == pytest.approx(1 / 50, rel=0.1)
    assert deviation == pytest.approx(mean, rel=0.1)  # what tells exponential gaps from regular ones
    assert times == arrival_times(4001, rate=50.0, seed=1)
    assert times != arrival_times(4001, rate=50.0, seed=2)
