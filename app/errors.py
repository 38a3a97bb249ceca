"""Errors as the OpenAI API words them: `{"error": {"message", "type", "param", "code"}}` and a status."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from engine.errors import EngineStopped, InvalidRequest, QueueFull

_TYPES = {
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
_RETRY_AFTER_STARTING = 2  # seconds


class ApiError(Exception):
    """An answer other than 200. `param` names the field of the request at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON object of the answer."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400: the request's own fault."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str) -> ApiError:
    """A 503: worth another try in a moment."""
    return ApiError(
        503, message, code="service_unavailable", headers={"Retry-After": str(_RETRY_AFTER_STARTING)}
    )


def from_engine(error: InvalidRequest | QueueFull | EngineStopped) -> ApiError:
    """What the engine refused, as an answer."""
    if isinstance(error, InvalidRequest):
        return bad_request(str(error), error.param)
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": str(error.retry_after)})
    return unavailable(str(error) or "the engine is not running")


def error_response(error: ApiError) -> Response:
    """`error` as an HTTP response."""
    return Response(
        msgspec.json.encode(error.body()), error.status, error.headers, media_type="application/json"
    )


async def _on_api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    message = {404: f"unknown route: {where}", 405: f"method not allowed: {where}"}.get(
        error.status_code, error.detail
    )
    return error_response(ApiError(error.status_code, message, headers=error.headers))


async def _on_disconnect(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it: the client has gone


async def _on_crash(_request: Request, _error: Exception) -> Response:
    return error_response(ApiError(500, "internal server error"))


ExceptionHandler = Callable[[Request, Exception], Awaitable[Response]]

exception_handlers: dict[int | type[Exception], ExceptionHandler] = {
    ApiError: _on_api_error,
    HTTPException: _on_http_exception,
    ClientDisconnect: _on_disconnect,
    Exception: _on_crash,
}
"""For `Starlette(exception_handlers=...)`; covers unknown routes and wrong methods too."""
