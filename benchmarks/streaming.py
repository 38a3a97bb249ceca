"""One streamed request to an OpenAI-compatible server, and when its text came."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec


class ServerError(Exception):
    """An answer that is an error, or that broke off."""


@dataclass
class Streamed:
    """What came of one request. Clock readings in seconds; `error` says why there is no answer."""

    started: float
    ended: float = 0.0
    arrivals: list[float] = field(default_factory=list)  # of each chunk that held text
    text: str = ""
    usage: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def completion_tokens(self) -> int:
        """As the server counts them, or else the number of chunks."""
        return int(self.usage.get("completion_tokens", len(self.arrivals)))

    @property
    def ttft(self) -> float:
        """Time to the first text; of an answer without any, to its end."""
        return (self.arrivals[0] if self.arrivals else self.ended) - self.started

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first. None where there are fewer than two."""
        if len(self.arrivals) < 2 or self.completion_tokens < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.completion_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between one chunk and the next. A chunk may hold several tokens."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]


async def stream(client: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> Streamed:
    """Send `body` as a streaming request. What goes wrong is told in the result's `error`."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    result = Streamed(started=time.perf_counter())
    try:
        async for chunk in _chunks(client, path, body):
            if text := _text(chunk):
                result.arrivals.append(time.perf_counter())
                result.text += text
            result.usage = chunk.get("usage") or result.usage
    except (httpx.HTTPError, ServerError, msgspec.DecodeError) as error:
        result.error = str(error) or type(error).__name__
    result.ended = time.perf_counter()
    return result


async def _chunks(
    client: httpx.AsyncClient, path: str, body: Mapping[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    async with client.stream("POST", path, json=body) as response:
        if response.status_code != httpx.codes.OK:
            text = (await response.aread()).decode(errors="replace")
            raise ServerError(f"status {response.status_code}: {text[:200]}")
        async for line in response.aiter_lines():
            data = line.removeprefix("data:").strip()
            if not line.startswith("data:"):
                continue
            if data == "[DONE]":
                return
            chunk = msgspec.json.decode(data)
            if chunk.get("error"):
                raise ServerError(str(chunk["error"].get("message", chunk["error"])))
            yield chunk
    raise ServerError("the stream ended before [DONE]")


def _text(chunk: Mapping[str, Any]) -> str:
    """What a chunk of either endpoint adds to the answer; a reasoning model's thoughts count as text too."""
    pieces = []
    for choice in chunk.get("choices", ()):
        delta = choice.get("delta", {})
        pieces += [choice.get("text"), delta.get("reasoning_content"), delta.get("content")]
    return "".join(piece for piece in pieces if piece)
