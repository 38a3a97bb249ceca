"""One engine's life: start-up, the decode loop on its own thread, draining, and what probes may say meanwhile."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import anyio
from anyio import CancelScope, CapacityLimiter, to_thread
from anyio.abc import TaskStatus

logger = logging.getLogger(__name__)

_DRAIN_POLL = 0.05  # seconds


class StartUpPort(Protocol):
    """The ordered start-up: everything is up inside `run()`."""

    @property
    def stage(self) -> str: ...
    def run(self) -> AbstractAsyncContextManager[None]: ...


class DecodeLoop(Protocol):
    """What is asked of the engine here. `run` occupies its thread, and sets `started` once it takes requests."""

    @property
    def started(self) -> threading.Event: ...
    @property
    def num_unfinished(self) -> int: ...
    def run(self) -> None: ...
    def stop(self) -> None: ...


class EngineFailed(Exception):
    """The decode loop died; `__cause__` says why. Its requests have been answered with an error."""


class Lifecycle:
    """`run()` is one task of the event loop; whatever else has an effect is called on that loop too.

    `error` says why start-up or the decode loop failed; `ended` is True once `run` is through, for whatever reason.
    """

    def __init__(
        self, startup: StartUpPort, engine: Callable[[], DecodeLoop], address: str | None = None
    ) -> None:
        """`engine` is called once start-up is through. `address` is where the API is, for the log."""
        self._startup = startup
        self._get_engine = engine
        self._address = address
        self._engine: DecodeLoop | None = None
        self._scope: CancelScope | None = None  # of a run that is starting up
        self._draining = False
        self._failure: BaseException | None = None  # of the decode loop, set on its thread
        self.error: str | None = None
        self.ended = False

    @property
    def stage(self) -> str:
        """The start-up hook that is running, or one of ready, draining, stopped, failed."""
        if self.error is not None or self.engine_failed:
            return "failed"
        if self.ended:
            return "stopped"
        if self._draining:
            return "draining"
        if self._engine is not None and self._engine.started.is_set():
            return "ready"
        return self._startup.stage

    @property
    def ready(self) -> bool:
        """Whether a request would be taken now."""
        return self.stage == "ready"

    @property
    def engine_failed(self) -> bool:
        """Whether the decode loop died, so that `error` is not one of start-up."""
        return self._failure is not None

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Start up, decode until `stop`, and undo. `task_status` is told when requests are taken.

        Raises what start-up raises, or EngineFailed.
        """
        self._began = time.monotonic()
        try:
            with CancelScope() as self._scope:
                async with self._startup.run():
                    await self._decode(task_status)
        except Exception as error:
            logger.debug("failed", exc_info=True)
            self.error = str(error)
            raise
        finally:
            gc.unfreeze()
            self.ended = True

    def begin_drain(self) -> None:
        """Not ready from now on; what is in flight goes on."""
        self._draining = True

    async def drain(self, timeout: float) -> bool:
        """Wait until nothing is in flight, `timeout` seconds at most. Whether it came to that."""
        with anyio.move_on_after(timeout):
            while self.num_unfinished:  # noqa: ASYNC110 (the engine's thread is not to wake anyone for this)
                await anyio.sleep(_DRAIN_POLL)
        return not self.num_unfinished

    def stop(self) -> None:
        """Have `run` end: start-up is given up, the decode loop aborts what is in flight after its step."""
        self.begin_drain()
        if self._engine is not None:
            self._engine.stop()
        elif self._scope is not None and not self.ended:
            self._scope.cancel()

    @property
    def num_unfinished(self) -> int:
        """Requests in flight."""
        return 0 if self._engine is None or self.ended else self._engine.num_unfinished

    async def _decode(self, task_status: TaskStatus[None]) -> None:
        engine = self._engine = self._get_engine()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._announce, engine, task_status)
            ended = anyio.Event()
            tasks.start_soon(_stop_when_cancelled, engine, ended)
            await to_thread.run_sync(self._run_loop, engine, limiter=CapacityLimiter(1))
            ended.set()
        if self._failure is not None:
            raise EngineFailed(f"the decode loop failed: {self._failure!r}") from self._failure

    async def _announce(self, engine: DecodeLoop, task_status: TaskStatus[None]) -> None:
        await to_thread.run_sync(engine.started.wait)
        if self._failure is None:
            # What is there now stays, and is a lot: to go through it for garbage takes as long as tens of steps.
            gc.freeze()
            task_status.started()
            where = "" if self._address is None else f" on {self._address}"
            logger.info("ready%s in %.1f s", where, time.monotonic() - self._began)

    def _run_loop(self, engine: DecodeLoop) -> None:
        try:
            engine.run()
        except BaseException as error:
            self._failure = error
        finally:
            engine.started.set()  # nobody may wait for a loop that died before it began


async def _stop_when_cancelled(engine: DecodeLoop, ended: anyio.Event) -> None:
    """Whoever cancels waits for the loop's thread, which knows nothing of it."""
    try:
        await ended.wait()
    finally:
        engine.stop()
