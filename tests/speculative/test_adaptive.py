"""Drafting stays close to the best fixed draft length, and is never noticeably slower than none.

Steps are simulated: their seconds come from a cost curve with seeded noise, and drafts are accepted by chance.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from speculative.adaptive import AcceptRates, Candidate, PayoffController

LIMIT = 7
Curve = Callable[[int], float]


def linear(slope: float) -> Curve:
    return lambda rows: 1 + slope * (rows - 1)


def tiles_of_four(rows: int) -> float:
    return 1.0 + 0.4 * ((rows + 3) // 4 - 1)


def first_row_dear(rows: int) -> float:
    """A verify step is a slower path, but then rows are cheap."""
    return 1.0 if rows == 1 else 1.6 + 0.01 * rows


def emitted(rng: random.Random, drafts: int, accept_rate: float) -> int:
    accepted = 0
    while accepted < drafts and rng.random() < accept_rate:
        accepted += 1
    return accepted


def simulate(
    cost: Curve,
    accept_rate: Callable[[int], float],
    steps: int,
    controller: PayoffController,
    noise: float = 0.05,
    seed: int = 0,
    requests: int = 1,
) -> float:
    """Seconds a token, all of `requests` that decode side by side. `accept_rate` is by step."""
    rng = random.Random(seed)
    rates = [AcceptRates() for _ in range(requests)]
    seconds = tokens = 0.0
    for step in range(steps):
        counts = controller.plan([Candidate(r, 0, LIMIT) for r in rates], requests)
        rows = requests + sum(counts)
        took = cost(rows) * (1 + noise * rng.random())
        controller.observe_step(rows, took)
        seconds += took
        for own, count in zip(rates, counts):
            accepted = emitted(rng, count, accept_rate(step))
            controller.observe(own, 0, count, accepted)
            tokens += accepted + 1
    return seconds / tokens


def fixed(cost: Curve, accept_rate: float, drafts: int, noise: float = 0.05, requests: int = 1) -> float:
    """Expected seconds a token if each request always drafts as many."""
    tokens = sum(accept_rate**i for i in range(drafts + 1))
    return cost(requests * (1 + drafts)) * (1 + noise / 2) / (requests * tokens)


def best_fixed(cost: Curve, accept_rate: float, requests: int = 1) -> float:
    return min(fixed(cost, accept_rate, drafts, requests=requests) for drafts in range(LIMIT + 1))


CURVES = {
    "flat": linear(0),
    "gentle": linear(0.05),
    "middling": linear(0.2),
    "steep": linear(1.0),
    "tiles": tiles_of_four,
    "first row dear": first_row_dear,
}


@pytest.mark.parametrize("accept_rate", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("cost", CURVES.values(), ids=CURVES.keys())
def test_close_to_the_best_fixed_draft_length(cost: Curve, accept_rate: float) -> None:
    took = simulate(cost, lambda step: accept_rate, 4000, PayoffController())
    assert took <= 1.03 * best_fixed(cost, accept_rate)
