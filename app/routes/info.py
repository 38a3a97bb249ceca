"""What the server says of itself: models, version, state and metrics."""

from __future__ import annotations

import time

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_1_0_0
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from app.deps import ServerDeps
from app.metrics import Metrics
from app.routes.requests import api_route, check_model, json_response


def info_routes(deps: ServerDeps, metrics: Metrics) -> list[BaseRoute]:
    """GET /v1/models, /v1/models/{id}, /version, /server_info and /metrics."""
    created = int(time.time())

    def card() -> dict[str, object]:
        return {
            "id": deps.served_model_name,
            "object": "model",
            "created": created,
            "owned_by": "tandem",
            "max_model_len": deps.max_context_len(),
        }

    async def list_models(_request: Request) -> Response:
        return json_response({"object": "list", "data": [card()]})

    async def get_model(request: Request) -> Response:
        check_model(request.path_params["model"], deps)
        return json_response(card())

    async def version(_request: Request) -> Response:
        return json_response({"version": deps.server_info()["version"]})

    async def server_info(_request: Request) -> Response:
        return json_response(deps.server_info())

    async def scrape(_request: Request) -> Response:
        return Response(metrics.render(), headers={"Content-Type": CONTENT_TYPE_PLAIN_1_0_0})

    return [
        api_route("/v1/models", list_models, deps, "GET"),
        api_route("/v1/models/{model:path}", get_model, deps, "GET"),
        Route("/version", version),
        Route("/server_info", server_info),
        Route("/metrics", scrape),
    ]
