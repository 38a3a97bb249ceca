"""The routes of the HTTP surface, all but the probes."""

from __future__ import annotations

from starlette.routing import BaseRoute

from app.deps import ServerDeps
from app.generation import Generator
from app.metrics import Metrics
from app.routes.chat import chat_routes
from app.routes.completions import completion_routes
from app.routes.info import info_routes
from app.routes.tokenize import tokenize_routes


def routes(deps: ServerDeps) -> list[BaseRoute]:
    """Routes that serve `deps`. The app they go into needs `app.errors.exception_handlers`."""
    metrics = Metrics(deps.engine, deps.status)
    generator = Generator(deps.engine, metrics)
    return [
        *info_routes(deps, metrics),
        *completion_routes(deps, generator),
        *chat_routes(deps, generator),
        *tokenize_routes(deps),
    ]
