"""What every API route does before its own work: is the server ready, is the body JSON and not too big."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.answers import encode
from app.deps import ServerDeps
from app.errors import ApiError, unavailable
from app.protocol import parse_body
from app.tokenizing import off_loop

Endpoint = Callable[[Request], Awaitable[Response]]
ModelT = TypeVar("ModelT", bound=BaseModel)


def api_route(path: str, endpoint: Endpoint, deps: ServerDeps, method: str = "POST") -> Route:
    """A route that answers 503 until the server is ready, and again once it drains."""

    async def when_ready(request: Request) -> Response:
        status = deps.status
        if not status.ready:
            raise unavailable(f"the server is not ready: {status.error or status.stage}")
        return await endpoint(request)

    return Route(path, when_ready, methods=[method])


def json_response(answer: object) -> Response:
    """A 200 with `answer` as JSON."""
    return Response(encode(answer), media_type="application/json")


async def read_bytes(request: Request, limit: int) -> bytes:
    """The body of a JSON request. Raises ApiError 415 for another content type, 413 past `limit` bytes."""
    content_type = request.headers.get("content-type", "")
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type != "application/json" and not (
        media_type.startswith("application/") and media_type.endswith("+json")
    ):
        raise ApiError(415, f"the content type must be application/json, not {content_type!r}")
    declared = request.headers.get("content-length", "").lstrip("0")[:20]  # Python reads no 5000 digits
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                raise _too_large(limit)
    except asyncio.CancelledError as error:  # the server ends, which no client need guess
        raise unavailable("the server is shutting down") from error
    return bytes(body)


async def read_body(request: Request, kind: type[ModelT], deps: ServerDeps) -> ModelT:
    """The body as a wire type, for the model that is served. Raises ApiError 400, 404, 413 or 415."""
    data = await read_bytes(request, deps.max_request_bytes)
    body = await off_loop(lambda: parse_body(kind, data), len(data))
    check_model(getattr(body, "model", None), deps)
    return body


def check_model(name: str | None, deps: ServerDeps) -> None:
    """Raises ApiError 404 for a model that is not served; None is the one that is."""
    if name is not None and name != deps.served_model_name:
        message = f"the model '{name}' does not exist: this server has '{deps.served_model_name}'"
        raise ApiError(404, message, param="model", code="model_not_found")


def _too_large(limit: int) -> ApiError:
    # What is left of the body stays unread, so the connection is of no further use.
    message = f"the body is larger than the {limit} bytes that this server takes"
    return ApiError(413, message, code="request_too_large", headers={"Connection": "close"})
