"""What follows from the times at which tokens came."""

from __future__ import annotations

import statistics

import pytest
from timing import Timing, percentiles, total


def test_decoding_starts_after_the_first_token() -> None:
    timing = Timing.of(10.0, [(10.5, 1), (10.75, 4), (11.5, 3)])
    assert timing == Timing(ttft=0.5, decode_tokens=7, decode_seconds=1.0)
    assert timing.tokens_per_s == 7.0


def test_an_answer_of_one_token_decodes_nothing() -> None:
    assert Timing.of(1.0, [(1.25, 1)]).tokens_per_s == 0.0


def test_long_answers_weigh_more_in_a_total() -> None:
    both = total([Timing(1.0, 90, 1.0), Timing(2.0, 10, 1.0)])
    assert both == Timing(3.0, 100, 2.0)
    assert both.tokens_per_s == 50.0


def test_percentiles_are_interpolated_and_in_milliseconds() -> None:
    seconds = [0.004, 0.001, 0.009, 0.003, 0.002]
    hundredths = statistics.quantiles(seconds, n=100, method="inclusive")
    expected = {
        "mean": 3.8,
        "p50": 3.0,
        "p90": 1000 * hundredths[89],
        "p99": 1000 * hundredths[98],
    }
    assert percentiles(seconds) == pytest.approx(expected)


def test_nothing_measured_has_no_percentiles() -> None:
    assert percentiles([]) is None
