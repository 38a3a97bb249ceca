"""Server-sent events: how a stream of answers is framed and sent, and what happens when it breaks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.answers import encode
from app.errors import ApiError
from app.generation import Generation

DONE = b"data: [DONE]\n\n"


def event(answer: Any) -> bytes:
    """One event that carries `answer` as JSON."""
    return b"data: " + encode(answer) + b"\n\n"


class EventStream(Response):
    """Sends `chunks`, each one or more framed events, while the client listens.

    Owns `generation`: whatever ends the stream, its unfinished choices are aborted. An error once the stream has
    begun becomes its last event, since the status is sent already.
    """

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, chunks: AsyncIterator[bytes]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._generation = generation
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def body(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        async with self._generation.attached(receive):
            with suppress(ClientDisconnect):
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                try:
                    async for chunk in self._chunks:
                        await body(chunk)
                    await body(DONE, more=False)
                except ApiError as error:
                    await body(event(error.body()), more=False)
                except ClientDisconnect:
                    raise
                except Exception:
                    await body(event(ApiError(500, "internal server error").body()), more=False)
                    raise
