"""Drafting stays close to the best fixed draft length, and is never noticeably slower than none.

Steps are simulated: their seconds come from a cost curve with seeded noise, and drafts are accepted by chance.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from speculative.adaptive import AcceptRates, PayoffController, StepCostModel

LIMIT = 7
LEVELS = range(LIMIT)  # of confidence, by position
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
    everyone = AcceptRates()
    rates = [AcceptRates(everyone) for _ in range(requests)]
    seconds = tokens = 0.0
    for step in range(steps):
        counts = controller.plan([r.chances(LEVELS) for r in rates], requests)
        rows = requests + sum(counts)
        took = cost(rows) * (1 + noise * rng.random())
        controller.observe_step(rows, took)
        seconds += took
        for own, count in zip(rates, counts, strict=True):
            accepted = emitted(rng, count, accept_rate(step))
            controller.observe(own, LEVELS[:count], accepted)
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


@pytest.mark.parametrize("accept_rate", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("cost", CURVES.values(), ids=CURVES.keys())
def test_close_to_the_best_fixed_draft_length(cost: Curve, accept_rate: float) -> None:
    took = simulate(cost, lambda step: accept_rate, 3000, PayoffController())
    assert took <= 1.03 * best_fixed(cost, accept_rate)


@pytest.mark.parametrize("accept_rate", [0.0, 0.6])
def test_close_to_the_best_fixed_draft_length_in_a_batch(accept_rate: float) -> None:
    took = simulate(CURVES["middling"], lambda step: accept_rate, 2000, PayoffController(), requests=6)
    assert took <= 1.03 * best_fixed(CURVES["middling"], accept_rate, requests=6)


def test_never_much_slower_than_plain_decoding_when_drafts_stop_being_right() -> None:
    """The change costs some steps, which must not show over the run."""
    cost = CURVES["middling"]
    took = simulate(cost, lambda step: 0.9 if step < 300 else 0.0, 3000, PayoffController())
    assert took <= fixed(cost, 0.0, 0)


def test_drafting_resumes_after_drafts_have_become_right() -> None:
    controller = PayoffController()
    simulate(CURVES["middling"], lambda step: 0.0, 1000, controller)
    simulate(CURVES["middling"], lambda step: 0.9, 1500, controller)
    took = simulate(CURVES["middling"], lambda step: 0.9, 500, controller)
    assert took <= 1.1 * best_fixed(CURVES["middling"], 0.9)


def test_unverified_drafts_can_be_observed_so_that_drafting_resumes_at_once() -> None:
    controller = PayoffController()
    rates = AcceptRates()

    def plan_after(accepted: int, steps: int) -> int:
        for _ in range(steps):
            controller.plan([], 1)
            controller.observe(rates, [0], accepted)
        measure(controller, linear(0.2))
        return controller.plan([rates.chances(LEVELS)], 1)[0]

    assert plan_after(accepted=0, steps=200) == 0
    assert plan_after(accepted=1, steps=60) > 0


def test_drafting_grows_after_rows_have_become_cheap() -> None:
    controller = PayoffController()
    simulate(linear(1.0), lambda step: 0.6, 1000, controller)
    simulate(linear(0.0), lambda step: 0.6, 4000, controller)
    took = simulate(linear(0.0), lambda step: 0.6, 500, controller)
    assert took <= 1.05 * best_fixed(linear(0.0), 0.6)


def test_slow_outliers_do_not_mislead() -> None:
    """One step in twenty takes ten times as long, as when another process takes the cores."""
    rng = random.Random(1)
    took = simulate(
        lambda rows: 10.0 if rng.random() < 0.05 else 1.0, lambda step: 0.9, 4000, PayoffController()
    )
    assert took <= 1.45 * 1.06 * best_fixed(linear(0.0), 0.9)  # 1.45 is the mean of those times


def measured(cost: Curve, most_rows: int = 64) -> PayoffController:
    """A controller that knows its costs, as after warm-up."""
    controller = PayoffController()
    measure(controller, cost, most_rows)
    return controller


def measure(controller: PayoffController, cost: Curve, most_rows: int = 64) -> None:
    """Fresh measurements of every row count, so that the next plan is no probe."""
    for rows in range(1, most_rows + 1):
        for _ in range(3):
            controller.observe_step(rows, cost(rows))


def always(accepted: bool) -> AcceptRates:
    rates = AcceptRates()
    for _ in range(100):
        rates.observe(LEVELS, LIMIT * accepted, step=0)
    return rates


def test_nothing_is_drafted_before_plain_steps_are_measured() -> None:
    controller = PayoffController()
    assert controller.plan([always(True).chances(LEVELS)], 1) == [0]


def test_a_step_tries_at_most_double_the_rows_measured() -> None:
    controller = measured(linear(0.0), most_rows=2)
    assert controller.plan([always(True).chances(LEVELS)], 1) == [3]


@pytest.mark.parametrize(("gain", "drafted"), [(0.005, 0), (0.05, 1)])
def test_drafts_that_hardly_pay_are_not_worth_the_risk(gain: float, drafted: int) -> None:
    controller = measured(lambda rows: 1.0 if rows == 1 else 2.0 / (1 + gain))  # for one token, or two
    rates = always(True)
    for _ in range(100):
        controller.observe(rates, [0], 1)
    assert controller.plan([rates.chances([0])], 1) == [drafted]


def test_a_draft_is_never_longer_than_offered() -> None:
    controller = measured(linear(0.0))
    drafts = [always(True).chances(range(length)) for length in (3, 0, 5)]
    assert controller.plan(drafts, 3) == [3, 0, 5]
    assert controller.plan([], 3) == []


def test_rows_go_to_the_request_whose_drafts_are_accepted() -> None:
    controller = measured(lambda rows: 1.0 if rows <= 9 else 2.0)
    good, bad = always(True), always(False)
    assert controller.plan([bad.chances(LEVELS), good.chances(LEVELS)], 2) == [0, LIMIT]


def test_rates_are_kept_by_confidence() -> None:
    """Drafts that begin with confidence are right; the others are not, and are no longer made."""
    controller = measured(linear(0.1))
    rates = AcceptRates()
    for _ in range(100):
        controller.observe(rates, range(8, 8 + LIMIT), LIMIT)
        controller.observe(rates, range(1, 1 + LIMIT), 0)
    drafts = [rates.chances(range(start, start + LIMIT)) for start in (8, 1)]
    assert controller.plan(drafts, 2) == [LIMIT, 0]


def test_confidence_above_the_highest_level_counts_as_that() -> None:
    rates = AcceptRates(guesses=[0.0] * 16)
    for _ in range(50):
        rates.observe([100], 1, step=0)
    assert rates.chances([15, 16]) == rates.chances([200, 300])
    assert rates.chances([15])[0] > 0.9
    assert rates.chances([14]) == [0.0]


def test_a_level_not_seen_is_held_to_be_what_is_guessed() -> None:
    assert AcceptRates(guesses=[0.1] * 15 + [0.9]).chances([0, 15]) == pytest.approx([0.1, 0.09])
    follows_the_level_below = AcceptRates()
    for _ in range(100):
        follows_the_level_below.observe([3], 1, step=0)
    assert follows_the_level_below.chances([8])[0] > 0.95


def test_old_observations_give_way_to_new_ones() -> None:
    rates = AcceptRates()
    for _ in range(1000):
        rates.observe([0], 1, step=0)
    assert rates.alone()[0] > 0.95
    for _ in range(20):
        rates.observe([0], 0, step=1000)
    assert rates.alone()[0] < 0.2


def test_a_new_request_starts_from_what_others_saw() -> None:
    controller = measured(linear(0.5))
    everyone = AcceptRates()
    for _ in range(100):
        controller.observe(AcceptRates(everyone), LEVELS, 0)
    assert controller.plan([AcceptRates(everyone).chances(LEVELS)], 1) == [0]


def test_the_cost_of_a_step_is_a_median_between_neighbours() -> None:
    costs = StepCostModel()
    for rows, seconds in ((1, 1.0), (1, 9.0), (1, 1.0), (5, 3.0), (5, 3.0)):
        costs.observe(rows, seconds, step=0)
    assert [costs.at(rows) for rows in [1, 5]] == [1.0, 1.0]  # 5 rows are not measured often enough
    costs.observe(5, 3.0, step=0)
    assert [costs.at(rows) for rows in [1, 3, 5, 10]] == [1.0, 2.0, 3.0, 3.0]
    assert costs.reach == 10


def test_times_of_long_ago_are_outvoted_by_two_probes() -> None:
    costs = StepCostModel()
    for _ in range(9):
        costs.observe(4, 5.0, step=0)
    costs.observe(4, 1.0, step=1000)
    assert costs.at(4) == 5.0
    costs.observe(4, 1.0, step=2000)
    assert costs.at(4) == 1.0


def test_fewer_rows_are_never_held_to_cost_more() -> None:
    costs = StepCostModel()
    for rows, seconds in ((1, 5.0), (4, 2.0)):
        for _ in range(3):
            costs.observe(rows, seconds, step=0)
    assert [costs.at(rows) for rows in [1, 4]] == [2.0, 2.0]


def test_all_row_counts_share_a_pace_that_follows_the_last_steps() -> None:
    """A context that grows slows down steps that were not tried since as well."""
    costs = StepCostModel()
    for rows, seconds in ((1, 1.0), (8, 2.0)):
        for _ in range(9):
            costs.observe(rows, seconds, step=0)
    for step in range(1, 120):
        costs.observe(1, 1.0 + 0.005 * step, step)
    one, eight = costs.at(1), costs.at(8)
    assert one == pytest.approx(1.6, rel=0.05)
    assert eight == pytest.approx(2 * one, rel=0.25)


def test_one_slow_step_hardly_changes_the_pace_and_not_how_row_counts_compare() -> None:
    costs = StepCostModel()
    for rows, seconds in ((1, 1.0), (8, 2.0)):
        for _ in range(9):
            costs.observe(rows, seconds, step=0)
    costs.observe(1, 50.0, step=1)
    one, eight = costs.at(1), costs.at(8)
    assert one == pytest.approx(1.0, rel=0.1)
    assert eight == pytest.approx(2 * one)
