"""`tandem serve` as a process: what it says, when it listens, how it drains, and how it exits."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from app.server import listen, serve
from app.settings import EngineSettings, ServerSettings, SettingsError
from containers.application import ApplicationContainer
from engine.plain_worker import PlainWorker
from engine.worker import SequenceStep, StepOutput
from tests.tiny_model import save_tiny_model

COMMAND = [sys.executable, "-m", "app.cli", "serve"]
JSON = {"Content-Type": "application/json"}
FLAGS = [
    "--port",
    "0",
    "--dtype",
    "float32",
    "--device",
    "cpu",
    "--threads",
    "1",
    "--max-total-tokens",
    "32768",
]
DEADLINE = 120  # seconds, for what takes a few


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


class Process:
    """A server that listens. `log` is its stderr so far, the line with its address included."""

    def __init__(self, popen: subprocess.Popen[str]) -> None:
        self.popen = popen
        self.log = ""
        address = None
        while address is None:
            line = self._stderr().readline()
            assert line, f"it never listened:\n{self.log}"
            self.log += line
            address = re.search(r"listening on (http://\S+)", line)
        self.address = address[1]
        self.client = httpx.Client(base_url=self.address, timeout=DEADLINE)

    def _stderr(self):  # type: ignore[no-untyped-def]
        assert self.popen.stderr is not None
        return self.popen.stderr

    def status(self, path: str = "/health/ready") -> int:
        return self.client.get(path).status_code

    def wait_until(self, status: int, path: str = "/health/ready") -> None:
        end = time.monotonic() + DEADLINE
        while self.status(path) != status:
            assert self.popen.poll() is None and time.monotonic() < end, self.log
            time.sleep(0.02)

    def read_log_until(self, text: str) -> None:
        while text not in self.log:
            line = self._stderr().readline()
            assert line, self.log
            self.log += line

    def exit_code(self) -> int:
        """Wait for the end, and read what is left of the log."""
        code = self.popen.wait(DEADLINE)
        self.log += self._stderr().read()
        return code

    def body_around_sigterm(self, first: bytes, rest: bytes, seconds: float = 0.0) -> Iterator[bytes]:
        """The body of a request that the server is reading when it drains, for `seconds` longer."""
        yield first
        time.sleep(0.5)  # for the server to begin with it
        self.popen.send_signal(signal.SIGTERM)
        self.wait_until(503)
        time.sleep(seconds)
        yield rest

    @contextmanager
    def stream(self, max_tokens: int) -> Iterator[Iterator[str]]:
        """The data lines of a streamed completion, the first of which has come already."""
        body = {"prompt": "abc", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        with self.client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
            next(lines)
            yield lines


def wait_until_ready(client: httpx.Client) -> None:
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        with suppress(httpx.ConnectError):
            if client.get("/health").status_code == 200:
                return
        time.sleep(0.02)
    pytest.fail("it never became ready")


@contextmanager
def serving(*argv: str, command: list[str] = COMMAND, **environ: str) -> Iterator[Process]:
    popen = subprocess.Popen(
        [*command, *argv], stderr=subprocess.PIPE, text=True, env={**os.environ, **environ}
    )
    try:
        process = Process(popen)
        with process.client:
            yield process
    finally:
        popen.kill()
        popen.wait()


def refused(*argv: str, **environ: str) -> str:
    """Run a server that must not come up; returns the one line that it says."""
    result = subprocess.run(
        [*COMMAND, *argv],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        env={**os.environ, **environ},
    )
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    *log, line = result.stderr.splitlines()
    assert "Traceback" not in result.stderr
    assert not any("listening" in entry for entry in log)
    return line


def test_it_serves_drains_and_exits_with_0(model: Path) -> None:
    with serving(*FLAGS, "--model", str(model), "--served-model-name", "gibberish") as server:
        assert server.status("/health/live") == 200
        server.wait_until(200)
        assert server.client.get("/v1/models").json()["data"][0]["id"] == "gibberish"
        info = server.client.get("/server_info").json()
        assert (info["stage"], info["workers"]["draft"]) == ("ready", None)
        target = info["workers"]["target"]
        assert target["slots"] == {"total": 32768, "free": 32768, "evictable": 0}
        assert (target["stage"], target["dtype"]) == ("ready", "float32")

        with server.stream(max_tokens=1500) as lines:
            server.popen.send_signal(signal.SIGTERM)
            server.wait_until(503)
            assert server.client.get("/health").json()["stage"] == "draining"
            assert server.status("/health/live") == 200
            late = server.client.post("/v1/completions", json={"prompt": "abc"})
            assert late.status_code == 503
            *_, last, done = lines
        assert done == "[DONE]"
        assert json.loads(last)["choices"][0]["finish_reason"] == "length"
        assert server.exit_code() == 0
        assert re.search(rf"ready on {server.address}/v1 in \d+\.\d s$", server.log, re.MULTILINE)
        assert "draining: 1 request in flight has 30 s to finish" in server.log


@pytest.mark.parametrize("name", ["/nowhere/kernels.so", "caf\udce9"])
def test_without_the_native_kernels_the_log_says_why(model: Path, name: str) -> None:
    with serving(*FLAGS, "--model", str(model), TANDEM_CPU_LIBRARY=name) as server:
        assert "no native CPU kernels, torch's slower paths serve: " in server.log


def test_an_instruction_set_that_is_not_there_is_refused(model: Path) -> None:
    line = refused(*FLAGS, "--model", str(model), TANDEM_CPU_ISA="abacus")
    assert line.startswith(
        "tandem: error: TANDEM_CPU_ISA=abacus: this processor has no such instruction set (of "
    )


def test_a_second_signal_forces(model: Path) -> None:
    with serving(*FLAGS, "--model", str(model)) as server:
        server.wait_until(200)
        with server.stream(max_tokens=30000) as lines:
            server.popen.send_signal(signal.SIGTERM)
            server.wait_until(503)
            server.popen.send_signal(signal.SIGINT)
            assert "shutting down" in list(lines)[-1]
        assert server.exit_code() == 1


def test_what_does_not_finish_within_the_drain_timeout_is_aborted(model: Path) -> None:
    with serving(*FLAGS, "--model", str(model), "--drain-timeout", "0.2") as server:
        server.wait_until(200)
        with server.stream(max_tokens=30000) as lines:
            server.popen.send_signal(signal.SIGTERM)
            assert "shutting down" in list(lines)[-1]
        assert server.exit_code() == 1


def test_a_request_that_is_still_being_read_has_no_longer_than_the_others(model: Path) -> None:
    with serving(*FLAGS, "--model", str(model), "--drain-timeout", "1") as server:
        server.wait_until(200)

        body = server.body_around_sigterm(
            b'{"prompt": "abc", "stream": true, "ignore_eos": true, ', b'"max_tokens": 30000}'
        )
        with server.client.stream("POST", "/v1/completions", content=body, headers=JSON) as response:
            assert "shutting down" in [line for line in response.iter_lines() if line][-1]
        assert server.exit_code() == 1


def test_a_body_that_does_not_end_is_told_that_the_server_does(model: Path) -> None:
    with serving(*FLAGS, "--model", str(model), "--drain-timeout", "0.5") as server:
        server.wait_until(200)

        body = server.body_around_sigterm(b'{"prompt": ', b'"abc"}', seconds=2.5)
        response = server.client.post("/v1/completions", content=body, headers=JSON)
        assert response.status_code == 503
        assert response.json()["error"]["message"] == "the server is shutting down"
        assert server.exit_code() == 1
        assert "Traceback" not in server.log


def test_a_template_that_never_ends_cannot_hold_the_process(model: Path, tmp_path: Path) -> None:
    template = tmp_path / "endless.jinja"
    template.write_text("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}")
    flags = ("--model", str(model), "--chat-template", str(template), "--drain-timeout", "0.2")
    with serving(*FLAGS, *flags) as server:
        server.wait_until(200)
        with pytest.raises(httpx.ReadTimeout):
            body = {"messages": [{"role": "user", "content": "hi"}]}
            server.client.post("/v1/chat/completions", json=body, timeout=1)
        server.popen.send_signal(signal.SIGTERM)
        assert server.exit_code() == 1


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    assert "nowhere.gguf" in refused("--port", "0", "--model", str(tmp_path / "nowhere.gguf"))


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(SettingsError) as error:
            listen("127.0.0.1", port)
    assert str(error.value) == (
        f"cannot listen on 127.0.0.1 port {port}: Address already in use (choose another --host or --port)"
    )


def test_an_address_that_is_not_here_is_named() -> None:
    with pytest.raises(SettingsError, match="cannot listen on 192.0.2.1 port 80"):
        listen("192.0.2.1", 80)
    with pytest.raises(SettingsError, match=r"cannot listen on no\.such\.host\.invalid port 80: \w"):
        listen("no.such.host.invalid", 80)


@pytest.mark.parametrize("host", ["b\u00fccher..example", "a\0b"])
def test_a_host_that_no_name_can_be_is_refused(host: str) -> None:
    with pytest.raises(SettingsError, match="--host"):
        listen(host, 0)


def test_a_decode_loop_that_dies_answers_everyone_and_ends_the_process(model: Path) -> None:
    class Faulty(PlainWorker):
        def forward(self, steps: Sequence[SequenceStep]) -> list[StepOutput]:
            raise RuntimeError("the accelerator is on fire")

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = ServerSettings(model=str(model), dtype="float32", device="cpu", max_total_tokens=64, port=port)

    def wire(settings: EngineSettings) -> ApplicationContainer:
        container = ApplicationContainer(settings=settings)
        container.worker.override(Faulty(container.target.runner(), frozenset()))
        return container

    answers = []

    def ask() -> None:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE) as client:
            wait_until_ready(client)
            answers.append(client.post("/v1/completions", json={"prompt": "abc"}))

    thread = threading.Thread(target=ask)
    thread.start()
    assert serve(settings, wire) == 1
    thread.join(DEADLINE)
    assert answers[0].status_code == 500
    assert "on fire" in answers[0].json()["error"]["message"]


STUCK = """
import sys, threading
from dependency_injector import providers
from app.cli import parse
from app.server import serve
from containers.application import ApplicationContainer
from engine.plain_worker import PlainWorker

class Stuck(PlainWorker):
    def forward(self, steps):
        print("a step begins", file=sys.stderr, flush=True)
        threading.Event().wait()

def wire(settings):
    container = ApplicationContainer(settings=settings)
    if sys.argv[1] == "step":
        container.worker.override(Stuck(container.target.runner(), frozenset()))
    else:
        container.target.model.override(providers.Callable(lambda *args: threading.Event().wait()))
    return container

command, bound = parse(["serve", *sys.argv[2:]], {})
sys.exit(serve(bound.arguments["settings"], wire))
"""


def test_a_signal_while_the_model_loads_ends_it_at_once(model: Path) -> None:
    with serving("load", *FLAGS, "--model", str(model), command=[sys.executable, "-c", STUCK]) as server:
        assert server.client.get("/health").json()["stage"] == "runner"
        server.popen.send_signal(signal.SIGTERM)
        assert server.exit_code() == 0
        assert "draining: no requests in flight" in server.log


def test_a_step_that_does_not_come_back_cannot_hold_the_process(model: Path) -> None:
    with serving("step", *FLAGS, "--model", str(model), command=[sys.executable, "-c", STUCK]) as server:
        server.wait_until(200)
        body = {"prompt": "abc", "stream": True}
        with (
            pytest.raises(httpx.HTTPError),
            server.client.stream("POST", "/v1/completions", json=body) as answer,
        ):
            server.read_log_until("a step begins")  # a request that has none yet is answered to its end
            server.popen.send_signal(signal.SIGTERM)
            server.wait_until(503)
            server.popen.send_signal(signal.SIGTERM)
            answer.read()
        assert server.exit_code() == 1


def test_what_only_loading_shows_ends_it_the_same_way(model: Path, tmp_path: Path) -> None:
    """A tensor of the wrong shape: every header is sound."""
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
    with serving(*FLAGS, "--model", str(tmp_path)) as server:
        assert server.exit_code() == 2
    assert server.log.splitlines()[-1].startswith("tandem: error: start-up failed at runner")
    assert "Traceback" not in server.log


@contextmanager
def plain_uvicorn(listener: socket.socket, **environ: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "uvicorn", "app.asgi:app", "--fd", str(listener.fileno())]
    popen = subprocess.Popen(
        command,
        env={**os.environ, "TANDEM_DTYPE": "float32", "TANDEM_DEVICE": "cpu", **environ},
        pass_fds=[listener.fileno()],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield popen
    finally:
        popen.kill()
        popen.wait()


def test_plain_uvicorn_serves_the_app_with_settings_from_the_environment(model: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        plain_uvicorn(listener, TANDEM_MODEL=str(model), TANDEM_MAX_TOTAL_TOKENS="64"),
        httpx.Client(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=DEADLINE) as client,
    ):
        wait_until_ready(client)
        answer = client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 4})
        assert answer.json()["usage"]["completion_tokens"] == 4


def test_plain_uvicorn_ends_with_a_reason_where_start_up_fails(model: Path) -> None:
    more_than_there_is = str(2**50)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        plain_uvicorn(listener, TANDEM_MODEL=str(model), TANDEM_MAX_TOTAL_TOKENS=more_than_there_is) as popen,
    ):
        _, log = popen.communicate(timeout=DEADLINE)
    assert popen.returncode != 0
    assert "start-up failed at attention_backends" in log
