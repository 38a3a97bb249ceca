"""The alarm compares a drafter with its card, over whole windows, and once an episode."""

from __future__ import annotations

import random

import pytest

from speculative.alarm import WINDOW, AcceptAlarm


def feed(alarm: AcceptAlarm, rate: float, cut: int = 7, windows: int = 1) -> None:
    """Drafts of 7 tokens, each right with the chance `rate`, of which the first `cut` are tried."""
    draw = random.Random(0)
    for _ in range(windows * WINDOW):
        right = 0
        while right < cut and draw.random() < rate:
            right += 1
        alarm.observe(cut, right)


def expected(rate: float, length: int = 7) -> float:
    return sum(rate**j for j in range(length + 1))


def test_nothing_is_said_before_a_window_is_full() -> None:
    alarm = AcceptAlarm(5.0)
    for _ in range(WINDOW - 1):
        alarm.observe(7, 0)
    assert alarm.accept_length is None and not alarm.raised
    alarm.observe(7, 0)
    assert alarm.accept_length == 1.0 and alarm.raised


def test_accept_length_is_that_of_drafts_verified_to_their_ends() -> None:
    """Pay-off control cuts drafts where it likes; the estimate must not fall for that."""
    alarm = AcceptAlarm(2.0)
    draw = random.Random(1)
    for _ in range(WINDOW):
        cut, right = draw.randint(1, 7), 0
        while right < cut and draw.random() < 0.6:
            right += 1
        alarm.observe(cut, right)
    assert alarm.accept_length == pytest.approx(expected(0.6), rel=0.08)


def test_one_warning_an_episode(caplog: pytest.LogCaptureFixture) -> None:
    alarm = AcceptAlarm(expected(0.6))
    feed(alarm, 0.6)
    assert not alarm.raised and not caplog.records
    feed(alarm, 0.2, windows=3)
    assert alarm.raised and alarm.gauges()["drafter_accept_length_alarm"] == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"{alarm.promised:.2f}" in caplog.text
    feed(alarm, 0.6)
    assert not alarm.raised and alarm.gauges()["drafter_accept_length_alarm"] == 0
    feed(alarm, 0.2)
    assert [record.levelname for record in caplog.records].count("WARNING") == 2
