"""Whether the drafting model is run: close to the best fixed choice, whatever it costs and however right it is.

Steps are simulated: a draft's tokens have chances that vary from draft to draft, and the model says about what they
are, as a real one does.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from speculative.adaptive import AcceptRates, DraftWorth, PayoffController, Prospect
from speculative.proposal import LEVEL_GUESSES

LENGTH = 7
HOPE = [0.7, 0.5, 0.3]  # chances that a draft is taken to have while there has not been one


@dataclass
class Machine:
    """What steps cost: one row 1, each further one `slope`, the drafting model `draft` and a share by request."""

    slope: float
    draft: float

    def step(self, rows: int) -> float:
        return 1 + self.slope * (rows - 1)

    def drafting(self, requests: int) -> float:
        return self.draft * (1 + 0.3 * (requests - 1)) if requests else 0.0


@dataclass
class Drafting:
    rates: AcceptRates
    easiness: float  # of the request's text, from 0 to 1
    worth: DraftWorth = field(default_factory=lambda: DraftWorth(chances=HOPE))

    def draw(self, rng: random.Random) -> tuple[list[int], list[float]]:
        """Levels of a draft, and the true chance of each token."""
        ease = min(max(self.easiness + rng.uniform(-0.3, 0.3), 0.0), 0.98)
        levels = [min(15, max(0, round(ease * 16 - 0.7 * j))) for j in range(LENGTH)]
        return levels, [LEVEL_GUESSES[level] * 0.9 for level in levels]


def simulate(
    machine: Machine, easiness: list[float], steps: int, fixed: int | None = None, seed: int = 0
) -> float:
    """Seconds a token. `fixed`: draft for all requests always, and verify so many tokens; 0 never drafts."""
    rng = random.Random(seed)
    controller = PayoffController()
    for rows in (1, 2, 4, 8, 16):
        for _ in range(3):
            controller.observe_step(rows, machine.step(rows))
    for _ in range(3):
        controller.observe_drafting(1, machine.drafting(1))
    everyone = AcceptRates(guesses=LEVEL_GUESSES)
    requests = [Drafting(AcceptRates(everyone), ease) for ease in easiness]
    seconds = tokens = 0.0
    for _ in range(steps):
        rows = len(requests)
        if fixed is None:
            drafting = controller.choose([Prospect(r.worth) for r in requests], rows).indices
        else:
            drafting = list(range(rows)) if fixed else []
        drafts = {i: requests[i].draw(rng) for i in drafting}
        for i, (levels, _) in drafts.items():
            requests[i].worth.observe(requests[i].rates.chances(levels))
        if fixed is None:
            offered = [r.rates.chances(drafts[i][0] if i in drafts else ()) for i, r in enumerate(requests)]
            counts = controller.plan(offered, rows, len(drafts))
        else:
            counts = [fixed] * rows
        took = machine.step(rows + sum(counts)) * (1 + 0.05 * rng.random())
        spent = machine.drafting(len(drafts)) * (1 + 0.05 * rng.random())
        controller.observe_step(rows + sum(counts), took)
        if drafts:
            controller.observe_drafting(len(drafts), spent)
        seconds += took + spent
        for i, count in enumerate(counts):
            right = 0
            if i in drafts:
                # The token after the verified ones tells of one draft more.
                levels, chances = drafts[i]
                compared = min(count + 1, LENGTH)
                while right < compared and rng.random() < chances[right]:
                    right += 1
                controller.observe(requests[i].rates, levels[:compared], right)
            tokens += min(right, count) + 1
    return seconds / tokens


def best_fixed(machine: Machine, easiness: list[float]) -> float:
    return min(simulate(machine, easiness, 600, fixed, seed=1) for fixed in range(LENGTH + 1))


@pytest.mark.parametrize("draft", [0.1, 0.4, 1.5])
@pytest.mark.parametrize("slope", [0.05, 0.5])
@pytest.mark.parametrize("easiness", [0.2, 0.55, 0.9])
def test_close_to_the_best_fixed_choice(draft: float, slope: float, easiness: float) -> None:
    machine = Machine(slope, draft)
    assert simulate(machine, [easiness], 1500) <= 1.03 * best_fixed(machine, [easiness])


@pytest.mark.parametrize("slope", [0.05, 0.3])
def test_close_to_the_best_fixed_choice_in_a_batch(slope: float) -> None:
    machine, easiness = Machine(slope, 0.3), [0.6] * 6
    assert simulate(machine, easiness, 800) <= 1.03 * best_fixed(machine, easiness)


def test_it_drafts_for_those_whose_drafts_are_accepted() -> None:
    """Better than for all or for none."""
    machine, easiness = Machine(0.02, 0.3), [0.95, 0.1, 0.1, 0.1]
    assert simulate(machine, easiness, 800) <= 0.95 * best_fixed(machine, easiness)


def test_at_high_batch_it_is_plain_decoding() -> None:
    """Where rows cost what they yield, nothing is drafted but for rare probes."""
    machine, easiness = Machine(1.0, 1.0), [0.5] * 16
    plain = simulate(machine, easiness, 400, fixed=0)
    assert simulate(machine, easiness, 400) <= 1.02 * plain
