"""Liveness and readiness, over every state that a server can be in."""

from __future__ import annotations

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from app.probes import probe_routes
from tests.app.fakes import FakeStatus

STATES = {
    "starting": FakeStatus("attention_backends", ready=False),
    "ready": FakeStatus("ready", ready=True),
    "draining": FakeStatus("draining", ready=False),
    "failed": FakeStatus("failed", ready=False, error="the decode loop failed"),
}


def get(path: str, state: str) -> tuple[int, dict[str, str]]:
    answer = TestClient(Starlette(routes=probe_routes(STATES[state]))).get(path)
    return answer.status_code, answer.json()


@pytest.mark.parametrize("state", STATES)
def test_a_process_that_answers_is_alive(state: str) -> None:
    assert get("/health/live", state) == (200, {"status": "alive"})


@pytest.mark.parametrize("path", ["/health/ready", "/health"])
@pytest.mark.parametrize("state", STATES)
def test_only_a_ready_server_is_ready_and_every_other_says_its_stage(path: str, state: str) -> None:
    status, body = get(path, state)
    assert status == (200 if state == "ready" else 503)
    assert body["stage"] == STATES[state].stage


def test_a_failed_server_says_why() -> None:
    assert get("/health/ready", "failed")[1]["error"] == "the decode loop failed"
