"""The ASGI application: routes over the container's parts, and a lifespan that starts them and lets them go."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
from dependency_injector import providers
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from app.deps import ServerDeps
from app.disconnects import QuietDisconnects
from app.errors import ApiError, error_response, exception_handlers
from app.lifecycle import Lifecycle
from app.probes import probe_routes
from app.routes import routes
from app.settings import EngineSettings, ServerSettings, SettingsError
from app.version import version
from backends.registry import BackendError, check_name, installed_specs
from containers.application import ApplicationContainer
from kernels.cpu.library import isa
from kernels.cpu.library import reason as native_kernels_lack
from kernels.threads import default_threads, set_threads
from models.base import ModelError
from models.loader import resolve_device

logger = logging.getLogger(__name__)


def build(settings: EngineSettings) -> ApplicationContainer:
    """Wire the parts, and check all that can be seen without loading a model. Any of them can still be overridden.

    Raises SettingsError, which names the setting or the file at fault.
    """
    container = ApplicationContainer(settings=settings)
    try:
        _check_attention_backends(settings)
        files = container.model_files()
        container.engine()  # makes everything but what start-up makes
    except ModelError as error:
        raise SettingsError(str(error)) from error
    _forget_parts(container)
    limit, asked = files.config.context_length, settings.context_length
    if asked is not None and asked > limit:
        raise SettingsError(
            f"--context-length {asked} is more than the {limit} that {files.name} was made for"
        )
    threads = settings.threads or default_threads()
    set_threads(threads)
    if resolve_device(settings.device).type == "cpu":
        _tell_kernels(threads)
    return container


def _tell_kernels(threads: int) -> None:
    lack = native_kernels_lack()
    if lack is None:
        logger.info("native CPU kernels: %s, %d threads", isa(), threads)
    elif os.environ.get("TANDEM_CPU_ISA"):
        raise SettingsError(lack)
    else:
        logger.warning("no native CPU kernels, torch's slower paths serve: %s", lack)


def _forget_parts(container: ApplicationContainer) -> None:
    """Let go of what was made, that overriding a part reaches those that hold it; what was read stays read."""
    read = (container.model_files, container.draft_model_files, container.tokenizer)
    for provider in container.traverse(types=[providers.Singleton]):
        if provider not in read:
            provider.reset()


def _check_attention_backends(settings: EngineSettings) -> None:
    """Whether they are known and run on the device. Whether they can serve this model is seen once it is loaded."""
    if settings.enable_pdmux and resolve_device(settings.device).type == "cpu":
        logger.warning("--enable-pdmux has no use on a CPU, which has no SMs to share out: it needs a GPU")
    for setting in (
        "attention_backend",
        "prefill_attention_backend",
        "decode_attention_backend",
        "speculative_draft_attention_backend",
    ):
        name = getattr(settings, setting)
        if name is None:
            continue
        device = resolve_device(settings.device)
        try:
            check_name(name, device, installed_specs())
        except BackendError as error:
            raise SettingsError(f"--{setting.replace('_', '-')} {name}: {error}") from error


class BearerAuth:
    """Answers 401 to whoever does not know the key. Probes are open: an orchestrator has no key."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not scope["path"].startswith("/health"):
            given = HTTPConnection(scope).headers.get("authorization", "")
            scheme, _, key = given.encode("latin-1").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(key, self._key):
                error = ApiError(
                    401,
                    "a valid API key is needed: Authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                return await error_response(error)(scope, receive, send)
        await self._app(scope, receive, send)


def create_app(
    container: ApplicationContainer,
    lifecycle: Lifecycle,
    settings: ServerSettings,
    on_failure: Callable[[str], None] = lambda message: None,
) -> Starlette:
    """The server's app. `on_failure` is told why if start-up or the decode loop fails.

    The socket is to listen while weights load, so the lifespan's start only spawns the task that loads them.
    """

    async def run() -> None:
        try:
            await lifecycle.run()
        except Exception as error:
            on_failure(str(error))
            raise

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(run())
        try:
            yield
        finally:
            lifecycle.stop()
            with suppress(Exception):  # `lifecycle.error` tells it
                await task

    deps = ServerDeps(
        engine=container.engine,
        tokenizer=container.tokenizer,
        max_context_len=lambda: container.engine().max_context_len,
        status=lifecycle,
        server_info=lambda: server_info(container, lifecycle),
        served_model_name=settings.served_model_name or container.model_files().name,
        speculative_algorithms=container.algorithms(),
        max_request_bytes=settings.max_request_bytes,
        stream_interval=settings.stream_interval,
    )
    middleware = [Middleware(QuietDisconnects)]
    if settings.api_key:
        middleware.append(Middleware(BearerAuth, settings.api_key))
    return Starlette(
        routes=[*probe_routes(lifecycle), *routes(deps)],
        middleware=middleware,
        exception_handlers=exception_handlers,
        lifespan=lifespan,
    )


def server_info(container: ApplicationContainer, lifecycle: Lifecycle) -> dict[str, Any]:
    """What `/server_info` answers, at every stage."""
    stats = container.engine().stats()
    slots = {"total": stats.slots_total, "free": stats.slots_free, "evictable": stats.slots_evictable}
    workers = {runner.role: {**runner.describe(), "slots": slots} for runner in container.runners()}
    return {
        "version": version(),
        "stage": lifecycle.stage,
        "speculation": msgspec.to_builtins(container.speculative_options()),
        "workers": {"target": None, "draft": None, **workers},
    }
