"""One engine's life as probes and the server see it: starting, ready, draining, stopped or failed."""

from __future__ import annotations

import gc
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
from anyio import to_thread
from anyio.abc import TaskStatus

from app.lifecycle import EngineFailed, Lifecycle

pytestmark = pytest.mark.asyncio


class FakeStartUp:
    """Waits in its only hook until `go` is set."""

    stage = "graphs"

    def __init__(self, error: Exception | None = None) -> None:
        self.go = anyio.Event()
        self.undone = False
        self._error = error

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        try:
            await self.go.wait()
            if self._error is not None:
                raise self._error
            yield
        finally:
            self.undone = True


class FakeEngine:
    """A decode loop that does nothing until it is stopped or killed."""

    def __init__(self, starts: bool = True) -> None:
        self.started = threading.Event()
        self.num_unfinished = 0
        self.thread: threading.Thread | None = None
        self._starts = starts
        self._end = threading.Event()
        self._error: Exception | None = None

    def run(self) -> None:
        self.thread = threading.current_thread()
        if not self._starts:
            raise ValueError("no memory")
        self.started.set()
        assert self._end.wait(60)
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        self._end.set()

    def die(self) -> None:
        self._error = ValueError("kernel panic")
        self._end.set()


@asynccontextmanager
async def alive(engine: FakeEngine) -> AsyncIterator[Lifecycle]:
    """A lifecycle that is ready; stopped at the end."""
    startup = FakeStartUp()
    startup.go.set()
    lifecycle = Lifecycle(startup, lambda: engine)
    async with anyio.create_task_group() as tasks:
        await tasks.start(lifecycle.run)
        yield lifecycle
        lifecycle.stop()
    assert startup.undone


async def test_it_is_not_ready_while_it_starts_and_names_the_hook() -> None:
    startup, engine = FakeStartUp(), FakeEngine()
    lifecycle = Lifecycle(startup, lambda: engine)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lifecycle.run)
        await anyio.wait_all_tasks_blocked()
        assert (lifecycle.ready, lifecycle.stage) == (False, "graphs")
        startup.go.set()
        await to_thread.run_sync(engine.started.wait)
        assert (lifecycle.ready, lifecycle.stage) == (True, "ready")
        lifecycle.stop()
    assert (lifecycle.ready, lifecycle.stage, lifecycle.error) == (False, "stopped", None)


async def test_the_decode_loop_runs_on_a_thread_of_its_own() -> None:
    engine = FakeEngine()
    async with alive(engine):
        assert engine.thread not in (None, threading.current_thread())


async def test_garbage_is_not_looked_for_in_what_start_up_made_while_requests_are_served() -> None:
    async with alive(FakeEngine()):
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == 0


async def test_draining_is_not_ready_from_its_first_moment_and_waits_for_what_is_in_flight() -> None:
    engine = FakeEngine()
    engine.num_unfinished = 2
    async with alive(engine) as lifecycle:
        lifecycle.begin_drain()
        assert (lifecycle.ready, lifecycle.stage) == (False, "draining")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lifecycle.drain, 60)
            await anyio.wait_all_tasks_blocked()
            engine.num_unfinished = 0
        assert await lifecycle.drain(60)


async def test_draining_gives_up_at_its_time_limit() -> None:
    engine = FakeEngine()
    engine.num_unfinished = 1
    async with alive(engine) as lifecycle:
        assert not await lifecycle.drain(0)


async def test_a_decode_loop_that_dies_is_a_failure() -> None:
    startup, engine = FakeStartUp(), FakeEngine()
    startup.go.set()
    lifecycle = Lifecycle(startup, lambda: engine)

    async def run(*, task_status: TaskStatus[None]) -> None:
        with pytest.raises(EngineFailed, match="kernel panic"):
            await lifecycle.run(task_status=task_status)

    async with anyio.create_task_group() as tasks:
        await tasks.start(run)
        engine.die()
    assert (lifecycle.ready, lifecycle.stage, lifecycle.engine_failed) == (False, "failed", True)
    assert lifecycle.error is not None
    assert startup.undone


async def test_a_decode_loop_that_never_starts_is_never_ready() -> None:
    startup = FakeStartUp()
    startup.go.set()
    lifecycle = Lifecycle(startup, lambda: FakeEngine(starts=False))
    with pytest.raises(EngineFailed, match="no memory"):
        await lifecycle.run()
    assert (lifecycle.ready, lifecycle.stage) == (False, "failed")


async def test_a_start_up_that_fails_says_why() -> None:
    startup = FakeStartUp(ValueError("weights are missing"))
    startup.go.set()
    lifecycle = Lifecycle(startup, FakeEngine)
    with pytest.raises(ValueError, match="weights are missing"):
        await lifecycle.run()
    assert (lifecycle.stage, lifecycle.error, lifecycle.engine_failed) == (
        "failed",
        "weights are missing",
        False,
    )


async def test_stopping_while_it_starts_gives_the_start_up_up() -> None:
    startup = FakeStartUp()
    lifecycle = Lifecycle(startup, FakeEngine)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lifecycle.run)
        await anyio.wait_all_tasks_blocked()
        lifecycle.stop()
    assert startup.undone
    assert (lifecycle.stage, lifecycle.error) == ("stopped", None)


async def test_whoever_cancels_it_does_not_wait_for_ever() -> None:
    startup, engine = FakeStartUp(), FakeEngine()
    startup.go.set()
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(Lifecycle(startup, lambda: engine).run)
            await to_thread.run_sync(engine.started.wait)
            tasks.cancel_scope.cancel()
    assert startup.undone
