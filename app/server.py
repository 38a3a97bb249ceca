"""The server process: uvicorn with signals of its own, so that it drains while it still listens."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from app.application import build, create_app
from app.lifecycle import Lifecycle
from app.settings import EngineSettings, ServerSettings, SettingsError
from containers.application import ApplicationContainer

logger = logging.getLogger(__name__)

OK, FAILED, UNUSABLE = 0, 1, 2
_GRACE = 2  # seconds that aborted requests have to send their last bytes
_LAST_WAIT = 0.5  # seconds that threads have to end once the server has stopped


class Server(uvicorn.Server):
    """The first SIGTERM or SIGINT drains: not ready, new work refused, still listening; a second one forces."""

    def __init__(self, config: uvicorn.Config, lifecycle: Lifecycle, drain_timeout: float) -> None:
        """`drain_timeout` is in seconds."""
        super().__init__(config)
        self._lifecycle = lifecycle
        self._drain_timeout = drain_timeout
        self._signals = 0
        self._forced = False

    @property
    def exit_code(self) -> int:
        """0 after a clean drain, 1 if that was forced or the decode loop died, 2 if start-up failed."""
        if self._lifecycle.error is not None:
            return FAILED if self._lifecycle.engine_failed else UNUSABLE
        return FAILED if self._forced else OK

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Unlike uvicorn's, a signal that was handled is not raised again at the end: the exit code says it all.
        self._signals += 1
        self._lifecycle.begin_drain()
        self._loop.call_soon_threadsafe(self._drain if self._signals == 1 else self._force)

    async def on_tick(self, counter: int) -> bool:
        if self._lifecycle.ended and not self.should_exit:  # nothing can be served any more
            self.config.timeout_graceful_shutdown = _GRACE
            self.should_exit = True
        return await super().on_tick(counter)

    def _drain(self) -> None:
        logger.info("draining: %s", self._in_flight())
        self._draining = asyncio.create_task(self._finish())

    def _in_flight(self) -> str:
        count = self._lifecycle.num_unfinished
        if not count:
            return "no requests in flight"
        some = "1 request in flight has" if count == 1 else f"{count} requests in flight have"
        return f"{some} {self._drain_timeout:g} s to finish"

    async def _finish(self) -> None:
        deadline = time.monotonic() + self._drain_timeout
        if not await self._lifecycle.drain(self._drain_timeout):
            return self._force()
        # Answers that are still being sent have what is left of the time, and so have requests still being read.
        left = max(0.0, deadline - time.monotonic())
        self.config.timeout_graceful_shutdown = int(left) + _GRACE
        self.should_exit = True
        await asyncio.sleep(left)
        if self.server_state.tasks:
            self._force()

    def _force(self) -> None:
        if self._forced:
            return
        logger.warning("stopping now: requests in flight are aborted")
        self._forced = True
        self._lifecycle.stop()
        self.config.timeout_graceful_shutdown = _GRACE
        self.should_exit = True
        # What has not ended by itself then is cut off; a step or a client that does not come back must not hold the
        # process.
        self._loop.call_later(_GRACE / 2, self._cancel)
        self._loop.call_later(_GRACE, os._exit, FAILED)

    def _cancel(self) -> None:
        for task in self.server_state.tasks:
            task.cancel()


def serve(settings: ServerSettings, wire: Callable[[EngineSettings], ApplicationContainer] = build) -> int:
    """Serve until a signal or a failure; returns the exit code. Raises SettingsError for what cannot be served.

    For the main thread, which signals interrupt.
    """
    configure_logging(settings.log_level)
    container = wire(settings)
    listener = listen(settings.host, settings.port)
    host, port = listener.getsockname()[:2]
    where = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    lifecycle = Lifecycle(container.startup(), container.engine, f"{where}/v1")
    config = uvicorn.Config(
        create_app(container, lifecycle, settings),
        lifespan="on",
        log_config=None,
        access_log=settings.log_level == "debug",
    )
    server = Server(config, lifecycle, settings.drain_timeout)
    logger.info("listening on %s while %s loads", where, container.model_files().name)
    server.run(sockets=[listener])
    if server.exit_code == UNUSABLE:
        raise SettingsError(lifecycle.error)
    if lifecycle.error is not None:
        logger.error("%s", lifecycle.error)
    logger.info("stopped")
    if not threads_end(_LAST_WAIT):
        os._exit(server.exit_code)  # work that nobody waits for any more would hold the process
    return server.exit_code


def threads_end(seconds: float) -> bool:
    """Whether all threads that Python waits for at its exit end within `seconds`. A start-up hook or a chat template
    that was given up cannot be stopped."""
    deadline = time.monotonic() + seconds
    others = [t for t in threading.enumerate() if not t.daemon and t is not threading.current_thread()]
    for thread in others:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in others)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; connections wait in it until they are accepted. Raises SettingsError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, TypeError) as error:  # a TypeError: no name of a host can be spelled so
        reason = str(error.strerror if isinstance(error, OSError) else error)
        reason = reason.partition(" (while")[0]  # what follows is the address once more
        raise SettingsError(
            f"cannot listen on {host} port {port}: {reason} (choose another --host or --port)"
        ) from error


def configure_logging(level: str) -> None:
    """Log to stderr, uvicorn's own chatter only when debugging."""
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if level != "debug":
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
