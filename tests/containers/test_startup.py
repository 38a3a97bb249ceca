"""Start-up: four hooks in order, each for every worker before the next, undone in reverse."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import anyio
import pytest

from containers.startup import StartUp, StartUpError

pytestmark = pytest.mark.asyncio


class Parts:
    """Two runners and a generation worker that write down what is done to them; one of them may fail or block."""

    def __init__(self, fails: str | None = None, blocks: str | None = None) -> None:
        self.log: list[str] = []
        self.threads: set[threading.Thread] = set()
        self.blocked, self.unblock = threading.Event(), threading.Event()
        self._fails, self._blocks = fails, blocks

    def note(self, what: str) -> None:
        self.threads.add(threading.current_thread())
        if what == self._blocks:
            self.blocked.set()
            self.unblock.wait(60)
        if what == self._fails:
            raise ValueError("out of luck")
        self.log.append(what)

    def startup(self, **options: float) -> StartUp:
        runners = [FakeRunner("target", self.note), FakeRunner("draft", self.note)]
        return StartUp(lambda: runners, lambda: FakeWorker(self.note), **options)


class FakeRunner:
    def __init__(self, role: str, note: Callable[[str], None]) -> None:
        self.role = role
        self._note = note

    def load(self) -> None:
        self._note(f"load {self.role}")

    def init_attention_backends(self) -> None:
        self._note(f"backends {self.role}")

    def init_graphs(self) -> None:
        self._note(f"graphs {self.role}")

    def close(self) -> None:
        self._note(f"close {self.role}")


class FakeWorker:
    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note

    def detect_mamba_commit(self) -> None:
        self._note("detect")

    def warm_up(self) -> None:
        self._note("warm up")


HOOKS = [
    "load target",
    "load draft",
    "backends target",
    "backends draft",
    "detect",
    "graphs target",
    "graphs draft",
    "warm up",
]
STAGES = {
    "load": "runner",
    "backends": "attention_backends",
    "detect": "mamba_commit",
    "graphs": "graphs",
    "warm": "graphs",
}


async def test_each_hook_is_through_for_every_worker_before_the_next() -> None:
    parts = Parts()
    async with parts.startup().run():
        assert parts.log == HOOKS


async def test_the_log_tells_each_hook_and_its_worker(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "containers.startup"):
        async with Parts().startup(quick=0).run():
            pass
    told = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert told[:3] == [
        "runner of the target worker",
        "runner of the draft worker",
        "attention_backends of the target worker",
    ]
    assert len(told) == len(HOOKS)


async def test_what_takes_no_time_is_told_for_debugging_only(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "containers.startup"):
        async with Parts().startup(quick=60).run():
            pass
    assert [record.levelno for record in caplog.records] == [logging.DEBUG] * len(HOOKS)


async def test_leaving_undoes_in_reverse() -> None:
    parts = Parts()
    async with parts.startup().run():
        parts.log.clear()
    assert parts.log == ["close draft", "close target"]


async def test_hooks_stay_off_the_event_loops_thread() -> None:
    parts = Parts()
    async with parts.startup().run():
        pass
    assert threading.current_thread() not in parts.threads


@pytest.mark.parametrize("failing", HOOKS)
async def test_a_failing_hook_names_itself_and_undoes_what_was_done(failing: str) -> None:
    parts = Parts(fails=failing)
    startup = parts.startup()
    hook, _, role = failing.partition(" ")
    worker = role if role in ("target", "draft") else "generation"
    with pytest.raises(StartUpError, match=f"at {STAGES[hook]} of the {worker} worker: out of luck"):
        async with startup.run():
            pytest.fail("start-up went on")
    done = HOOKS[: HOOKS.index(failing)]
    loaded = [what.removeprefix("load ") for what in done if what.startswith("load")]
    assert parts.log == [*done, *(f"close {role}" for role in reversed(loaded))]
    assert startup.stage == STAGES[hook]


async def test_the_stage_is_the_hook_that_runs() -> None:
    parts = Parts(blocks="backends draft")
    startup = parts.startup()
    assert startup.stage == "created"

    async def run() -> None:
        async with startup.run():
            pass

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await anyio.to_thread.run_sync(parts.blocked.wait)
        stage = startup.stage
        parts.unblock.set()
    assert stage == "attention_backends"


async def test_cancelled_it_does_not_wait_for_a_hook_but_undoes_the_others() -> None:
    parts = Parts(blocks="backends target")

    async def run() -> None:
        async with parts.startup().run():
            pytest.fail("start-up went on")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await anyio.to_thread.run_sync(parts.blocked.wait)
        tasks.cancel_scope.cancel()
    assert parts.log == ["load target", "load draft", "close draft", "close target"]
    parts.unblock.set()
