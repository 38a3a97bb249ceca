"""Start-up in order: each hook is awaited for every worker before the next one, and all are undone in reverse."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple, Protocol

from anyio import CancelScope, to_thread

logger = logging.getLogger(__name__)

_QUICK = 0.05  # seconds


class Runner(Protocol):
    """What start-up asks of a worker's runner."""

    @property
    def role(self) -> str: ...
    def load(self) -> None: ...
    def init_attention_backends(self) -> None: ...
    def init_graphs(self) -> None: ...
    def close(self) -> None: ...


class Worker(Protocol):
    """What start-up asks of the generation worker."""

    def detect_mamba_commit(self) -> None: ...
    def warm_up(self) -> None: ...


class StartUpError(Exception):
    """A hook failed; `__cause__` says why, the text also which hook, and of which worker."""


class _Action(NamedTuple):
    hook: str
    role: str
    do: Callable[[], None]
    undo: Callable[[], None] | None = None


class StartUp:
    """The four hooks. `stage` is the hook that runs or ran last."""

    def __init__(
        self,
        runners: Callable[[], Sequence[Runner]],
        worker: Callable[[], Worker],
        quick: float = _QUICK,
    ) -> None:
        """Both are called when start-up begins. `runners` are in order: the target, then the drafter if any.

        Hooks that take less than `quick` seconds are logged for debugging only.
        """
        self._runners = runners
        self._worker = worker
        self._quick = quick
        self.stage = "created"

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Everything is up inside, and undone outside. Raises StartUpError, with what was done undone.

        Hooks run on a worker thread. Cancelled, start-up does not wait for the hook that is running.
        """
        async with AsyncExitStack() as undo:
            for action in self._actions():
                self.stage = action.hook
                start = time.monotonic()
                try:
                    await to_thread.run_sync(action.do, abandon_on_cancel=True)
                except Exception as error:
                    raise StartUpError(
                        f"start-up failed at {action.hook} of the {action.role} worker: {error}"
                    ) from error
                seconds = time.monotonic() - start
                level = logging.DEBUG if seconds < self._quick else logging.INFO
                logger.log(level, "%s of the %s worker: %.1f s", action.hook, action.role, seconds)
                if action.undo is not None:
                    undo.push_async_callback(_on_thread, action.undo)
            yield

    def _actions(self) -> Iterator[_Action]:
        runners, worker = self._runners(), self._worker()
        for runner in runners:
            yield _Action("runner", runner.role, runner.load, runner.close)
        for runner in runners:
            yield _Action("attention_backends", runner.role, runner.init_attention_backends)
        yield _Action("mamba_commit", "generation", worker.detect_mamba_commit)
        for runner in runners:
            yield _Action("graphs", runner.role, runner.init_graphs)
        yield _Action("graphs", "generation", worker.warm_up)


async def _on_thread(undo: Callable[[], None]) -> None:
    with CancelScope(shield=True):
        await to_thread.run_sync(undo)
