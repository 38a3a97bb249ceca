"""Probes: is the process alive, and does it take requests."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from app.deps import StatusPort


def probe_routes(status: StatusPort) -> list[BaseRoute]:
    """GET /health/live, 200 while the process works; /health/ready, 200 or 503 with the stage; /health the same."""

    async def live(_request: Request) -> Response:
        return JSONResponse({"status": "alive"})

    async def ready(_request: Request) -> Response:
        is_ready = status.ready
        body = {"status": "ready" if is_ready else "not ready", "stage": status.stage}
        if status.error is not None:
            body["error"] = status.error
        return JSONResponse(body, status_code=200 if is_ready else 503)

    return [Route("/health/live", live), Route("/health/ready", ready), Route("/health", ready)]
