"""Drives an OpenAI-compatible server, and measures what its clients see."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Annotated, Any, Literal

import anyio
import httpx
import msgspec
from command import print_row, run
from cyclopts import Parameter
from cyclopts.validators import Number
from prompts import Prompt, PromptOptions
from streaming import Streamed, stream
from timing import percentiles

Endpoint = Literal["chat", "completions"]

_PATHS: dict[Endpoint, str] = {"chat": "chat/completions", "completions": "completions"}
_WIDTHS = (12, 10, 10, 10, 10)


def serve_bench(
    *,
    base_url: str = "http://127.0.0.1:8000/v1",
    model: str | None = None,
    api_key: str | None = None,
    endpoint: Endpoint = "chat",
    concurrency: Annotated[int, Parameter(validator=Number(gte=1))] = 1,
    rate: Annotated[float | None, Parameter(validator=Number(gt=0))] = None,
    seed: int = 0,
    max_tokens: Annotated[int, Parameter(validator=Number(gte=1))] = 128,
    temperature: Annotated[float, Parameter(validator=Number(gte=0))] = 0.0,
    ignore_eos: bool = False,
    timeout: Annotated[float, Parameter(validator=Number(gt=0))] = 600.0,
    options: Annotated[PromptOptions, Parameter(name="*")] = PromptOptions(),
) -> int:
    """Drive an OpenAI-compatible server and tell TTFT, TPOT, ITL, throughput and accept length.

    Each prompt is one request of its own: its first turn, streamed.

    Parameters
    ----------
    base_url
        Where the API is, with its /v1.
    model
        Name of the model (default: the first one that the server lists).
    api_key
        Bearer token, if the server asks for one.
    endpoint
        Send prompts as chat messages, or as plain text to complete.
    concurrency
        Requests in flight at any time. Not used with --rate.
    rate
        Send requests at random (Poisson) times, so many a second on average, whether or not earlier ones are done.
    seed
        Of the arrival times, and of sampling.
    max_tokens
        Longest answer.
    temperature
        Of sampling. 0: greedy.
    ignore_eos
        Go on to --max-tokens (an extension that Tandem, vLLM and SGLang know).
    timeout
        Seconds that a server may be silent.
    """
    prompts = options.read()
    body: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    if ignore_eos:
        body["ignore_eos"] = True
    starts = arrival_times(len(prompts), rate, seed) if rate else None

    async def measure() -> tuple[list[Streamed], float]:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(
            base_url=base_url, headers=headers, timeout=timeout, limits=limits
        ) as client:
            body["model"] = model or await _first_model(client)
            path = _PATHS[endpoint]
            hello = Prompt(
                "", "", ("Hello",)
            )  # opens the connection, and no prompt finds itself in the cache
            if error := (await stream(client, path, {**body, **_input(hello, endpoint)})).error:
                raise ValueError(f"{base_url}: {error}")
            bodies = [{**body, **_input(prompt, endpoint)} for prompt in prompts]
            begin = time.perf_counter()
            results = await send(client, path, bodies, concurrency, starts)
            return results, time.perf_counter() - begin

    results, seconds = anyio.run(measure)
    summary = summarise(results, seconds)
    _print(summary)
    if options.json:
        print(msgspec.json.encode(summary).decode())
    return 0 if summary["completed"] else 1


async def send(
    client: httpx.AsyncClient,
    path: str,
    bodies: Sequence[dict[str, Any]],
    concurrency: int,
    starts: Sequence[float] | None = None,
) -> list[Streamed]:
    """All requests, `concurrency` at a time or each at its time in `starts`, in seconds from now."""
    results: list[Streamed] = []
    begin = time.perf_counter()

    async def one(body: dict[str, Any], start: float) -> None:
        await anyio.sleep(max(0.0, start - (time.perf_counter() - begin)))
        results.append(await stream(client, path, body))

    async def some(queue: Iterator[dict[str, Any]]) -> None:
        for body in queue:
            results.append(await stream(client, path, body))

    async with anyio.create_task_group() as tasks:
        if starts is not None:
            for body, start in zip(bodies, starts, strict=True):
                tasks.start_soon(one, body, start)
        else:
            queue = iter(bodies)
            for _ in range(concurrency):
                tasks.start_soon(some, queue)
    return results


def arrival_times(count: int, rate: float, seed: int) -> list[float]:
    """Seconds at which `count` requests of a Poisson process arrive, `rate` a second; the first at 0."""
    chance = random.Random(seed)
    return [0.0, *accumulate(chance.expovariate(rate) for _ in range(count - 1))]


def summarise(results: Sequence[Streamed], seconds: float) -> dict[str, Any]:
    """The measures, latencies in milliseconds. `seconds` is how long all requests took together."""
    done = [result for result in results if result.error is None]
    tokens = sum(result.completion_tokens for result in done)
    return {
        "requests": len(results),
        "completed": len(done),
        "errors": len(results) - len(done),
        "first_error": next((result.error for result in results if result.error is not None), None),
        "seconds": seconds,
        "requests_per_s": len(done) / seconds,
        "output_tokens": tokens,
        "output_tokens_per_s": tokens / seconds,
        "ttft_ms": percentiles([result.ttft for result in done]),
        "tpot_ms": percentiles([result.tpot for result in done if result.tpot is not None]),
        "itl_ms": percentiles([gap for result in done for gap in result.gaps]),
        "accept_length": accept_length(done),
    }


def accept_length(results: Sequence[Streamed]) -> float | None:
    """Tokens emitted in verify steps, by step: the accepted ones, and one bonus token a step.

    A stop inside an accepted block leaves its bonus token out, so this is too high by at most one token a request.
    None where the server does not tell, or nothing was drafted.
    """
    counters = [result.usage.get("speculation") or {} for result in results]
    steps = sum(counter.get("verify_steps", 0) for counter in counters)
    accepted = sum(counter.get("accepted_tokens", 0) for counter in counters)
    return (accepted + steps) / steps if steps else None


def _input(prompt: Prompt, endpoint: Endpoint) -> dict[str, Any]:
    if endpoint == "completions":
        return {"prompt": prompt.turns[0]}
    return {"messages": [{"role": "user", "content": prompt.turns[0]}]}


async def _first_model(client: httpx.AsyncClient) -> str:
    try:
        response = await client.get("models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise ValueError(f"{client.base_url}: cannot ask for its models ({error})") from error


def _print(summary: dict[str, Any]) -> None:
    print(f"{summary['completed']} of {summary['requests']} requests in {summary['seconds']:.1f} s")
    if summary["errors"]:
        print(f"{summary['errors']} errors, the first: {summary['first_error']}")
    print(f"{summary['requests_per_s']:.2f} requests/s, {summary['output_tokens_per_s']:.1f} output tokens/s")
    length = summary["accept_length"]
    print(
        f"accept length {length:.2f}" if length else "accept length: nothing was drafted, or nothing is told"
    )
    print_row(("milliseconds", "mean", "p50", "p90", "p99"), _WIDTHS)
    for name in ("ttft", "tpot", "itl"):
        values = summary[f"{name}_ms"] or dict.fromkeys(("mean", "p50", "p90", "p99"))
        print_row((name.upper(), *values.values()), _WIDTHS)


if __name__ == "__main__":
    sys.exit(run(serve_bench))
