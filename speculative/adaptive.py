"""How many tokens to draft so that drafting pays: measured accept rates against measured step times.

Nothing here reads a clock. Times are passed in, so the same calls always give the same decisions.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import numpy.typing as npt

NUM_LEVELS = 16  # of confidence; higher ones count as the last
DECAY = 0.99  # weight that an observation keeps from one step to the next
FIRST_GUESS = 0.5  # accept rate of a drafter not yet seen
NEIGHBOUR_WEIGHT = 4.0  # observations that the level below is worth at a level
PRIOR_WEIGHT = 16.0  # observations that all requests together are worth for one of them
TIMES_KEPT = 9  # step times of one row count, of which the median is believed
TIMES_NEEDED = 3  # before it is: the first steps of a shape are often slow
MARGIN = 0.01  # by which drafting must win over plain decoding
PROBE_SHARE = 0.005  # of the time that trying other draft lengths may cost
PROBE_AGE = 128  # steps after which a measurement is taken again
MAX_CREDIT = 10.0  # in steps: how much of the probe share can be saved up


class AcceptRates:
    """How often drafted tokens were accepted, by confidence, with recent steps weighing most.

    Confidence is a small integer that orders a drafter's tokens: for prompt lookup the number of matching tokens
    before it, for a block drafter the position in the block. It rises by one with each token of a draft.
    """

    def __init__(self) -> None:
        self._hits = [0.0] * NUM_LEVELS
        self._trials = [0.0] * NUM_LEVELS
        self._seen = [0] * NUM_LEVELS  # step of the last observation

    def observe(self, confidence: int, drafted: int, accepted: int, step: int) -> None:
        """Of `drafted` tokens from `confidence` upwards the first `accepted` ones were; the rest was never tried."""
        for i in range(min(accepted + 1, drafted)):
            level = min(confidence + i, NUM_LEVELS - 1)
            fade = DECAY ** (step - self._seen[level])
            self._hits[level] = self._hits[level] * fade + (i < accepted)
            self._trials[level] = self._trials[level] * fade + 1
            self._seen[level] = step

    def alone(self) -> list[float]:
        """Accept rate of each level. One with few observations follows the level below."""
        rates = []
        rate = FIRST_GUESS
        for hits, trials in zip(self._hits, self._trials, strict=True):
            rate = (hits + NEIGHBOUR_WEIGHT * rate) / (trials + NEIGHBOUR_WEIGHT)
            rates.append(rate)
        return rates

    def chances(self, prior: Sequence[float], confidence: int, length: int) -> list[float]:
        """The chance of each of `length` tokens that it is accepted, which takes all before it. `prior` is the accept
        rate of each level that is assumed until this one's own observations weigh more."""
        hits, trials, last = self._hits, self._trials, NUM_LEVELS - 1
        chance, chances = 1.0, []
        for level in range(confidence, confidence + length):
            level = min(level, last)
            chance *= (hits[level] + PRIOR_WEIGHT * prior[level]) / (trials[level] + PRIOR_WEIGHT)
            chances.append(chance)
        return chances


class StepCostModel:
    """Time of a step by its number of rows: medians of recent ones, interpolated."""

    def __init__(self) -> None:
        self._times: dict[int, deque[float]] = {}
        self._seen: dict[int, int] = {}
        self._medians: dict[int, float] = {}  # of the row counts measured often enough
        self._rows: list[int] = []  # the same row counts, ascending
        self._costs: list[float] = []  # what a step with as many costs, ascending

    @property
    def reach(self) -> int:
        """Rows that a step may try: at most double what is known, so that a steep cost is found out cheaply."""
        return 2 * self._rows[-1] if self._rows else 0

    def observe(self, rows: int, seconds: float, step: int) -> None:
        """A step with `rows` rows took `seconds`."""
        bucket = _bucket(rows)
        times = self._times.setdefault(bucket, deque(maxlen=TIMES_KEPT))
        while self.age(rows, step) >= PROBE_AGE and len(times) >= TIMES_NEEDED:
            times.popleft()  # so that two probes outvote old times
        times.append(seconds)
        self._seen[bucket] = step
        if len(times) < TIMES_NEEDED:
            return
        self._medians[bucket] = statistics.median(times)
        self._rows = sorted(self._medians)
        # Fewer rows never take longer: where a measurement says so, that of more rows is believed.
        falling = accumulate((self._medians[known] for known in reversed(self._rows)), min)
        self._costs = list(falling)[::-1]

    def estimate(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Seconds that a step takes, for each number of rows: linear between known counts, flat outside them. The
        hope that more rows cost no more is what makes them be tried."""
        return np.interp(rows, self._rows, self._costs)

    def age(self, rows: int, step: int) -> int:
        """Steps since one with about `rows` rows was seen."""
        return step - self._seen.get(_bucket(rows), -PROBE_AGE)


@dataclass(frozen=True, slots=True)
class Candidate:
    """What could be drafted for one request: `length` tokens, the first with `confidence`."""

    rates: AcceptRates
    confidence: int
    length: int


class PayoffController:
    """Shares out draft rows where they raise tokens per second, and none where they do not.

    A step with n drafted rows beside `rows` plain ones yields rows + (expected accepted) tokens in the time of
    rows + n. Rows are added in order of the chance that they are accepted, and the n with the best yield is taken.
    Now and then another n is tried, to notice that times or rates have changed; what that is expected to lose stays
    under PROBE_SHARE of all time. So drafts that do not pay stop, and are probed the more rarely the dearer they are.
    """

    def __init__(self) -> None:
        self.costs = StepCostModel()
        self._rates = AcceptRates()  # of all requests
        self._step = 0
        self._credit = 0.0  # seconds that probing may lose now

    def plan(self, candidates: Sequence[Candidate], rows: int) -> list[int]:
        """How many tokens to draft for each candidate, at most its `length`.

        `rows` are the rows of the step without drafts: one a decoding request, and those of prompt chunks.
        """
        self._step += 1
        prior = self._rates.alone()
        chances = [c.rates.chances(prior, c.confidence, c.length) for c in candidates]
        owners = np.repeat(np.arange(len(candidates)), [len(of_one) for of_one in chances])
        flat = np.fromiter(chain.from_iterable(chances), np.float64)
        # Stable, and chances fall within a draft, so what is taken of each draft is its beginning.
        order = np.argsort(-flat, kind="stable")[: max(self.costs.reach - rows, 0)]
        if not len(order):
            return [0] * len(candidates)
        yields = rows + np.concatenate(([0.0], np.cumsum(flat[order])))  # tokens, by number of drafted rows
        costs = self.costs.estimate(np.arange(rows, rows + len(yields)))
        best = int(np.argmax(yields / costs))
        if yields[best] / costs[best] < (1 + MARGIN) * yields[0] / costs[0]:
            best = 0
        chosen = self._probe(best, rows, yields, costs)
        counts: list[int] = np.bincount(owners[order[:chosen]], minlength=len(candidates)).tolist()
        return counts

    def observe(self, rates: AcceptRates, confidence: int, drafted: int, accepted: int) -> None:
        """What became of a draft. `rates` are those of its request.

        A draft that was not verified may be told as well, as far as the tokens emitted since say what it would
        have been: then drafting resumes as soon as it would pay, not at the next probe.
        """
        rates.observe(confidence, drafted, accepted, self._step)
        self._rates.observe(confidence, drafted, accepted, self._step)

    def observe_step(self, rows: int, seconds: float) -> None:
        """A step with `rows` rows, drafted ones included, took `seconds`. Steps measured at start-up are welcome."""
        self.costs.observe(rows, seconds, self._step)

    def _probe(
        self, best: int, rows: int, yields: npt.NDArray[np.float64], costs: npt.NDArray[np.float64]
    ) -> int:
        """`best`, or a number of drafted rows not seen for long, if what that may lose has been saved up."""
        self._credit = min(self._credit + PROBE_SHARE * costs[best], MAX_CREDIT * costs[best])
        sizes = [0, *(1 << i for i in range((len(yields) - 1).bit_length()))]
        stalest = max(sizes, key=lambda n: self.costs.age(rows + n, self._step))
        loss = costs[stalest] - yields[stalest] * costs[best] / yields[best]
        if self.costs.age(rows + stalest, self._step) < PROBE_AGE or loss > self._credit:
            return best
        self._credit -= loss
        return stalest


def _bucket(rows: int) -> int:
    """Row counts that share a measurement: exact up to 15, then eight to a doubling."""
    shift = max(0, rows.bit_length() - 4)
    return rows >> shift << shift
