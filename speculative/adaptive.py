"""How many tokens to draft, and whether to run a drafting model at all: measured accept rates against measured times.

Nothing here reads a clock. Times are passed in, so the same calls always give the same decisions.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import mul

import numpy as np
import numpy.typing as npt

NUM_LEVELS = 16  # of confidence; higher ones count as the last
DECAY = 0.99  # weight that an observation keeps from one step to the next
FIRST_GUESS = 0.5  # accept rate of a drafter not yet seen
NEIGHBOUR_WEIGHT = 4.0  # observations that a level's guess is worth
PRIOR_WEIGHT = 16.0  # observations that all requests together are worth for one of them
TIMES_KEPT = 9  # step times of one row count, of which the median is believed
TIMES_NEEDED = 3  # before it is: the first steps of a shape are often slow
DRIFT = 0.4  # share by which one step moves the pace of all row counts
SURPRISE = 1.25  # factor by which a step may differ from what was expected and still tell of the pace
MARGIN = 0.01  # by which drafting must win over plain decoding
MODEL_MARGIN = 0.02  # and a drafting model over doing without it, which is known less well
PROBE_SHARE = 0.005  # of the time that trying other draft lengths may cost
PROBE_AGE = 128  # steps after which a measurement is taken again
MAX_CREDIT = 10.0  # in steps: how much of the probe share can be saved up
REST = (
    4  # steps for which a drafting model that does not pay is not thought of: the thought costs time as well
)
SAMPLES = 32  # past drafts that stand for the next one, of all requests together
FEWEST_SAMPLES = 8  # of each

Floats = npt.NDArray[np.float64]


class AcceptRates:
    """How often drafted tokens were accepted, by confidence, with recent steps weighing most.

    Confidence is a small integer, a level, that orders a drafter's tokens: for prompt lookup the number of matching
    tokens before it, for a model a bucket of its own probability.
    """

    def __init__(self, everyone: AcceptRates | None = None, guesses: Sequence[float] | None = None) -> None:
        """`everyone` is kept of all requests together: it is told all that this one is, and is what is assumed
        until this one's own observations weigh more. `guesses`: the rate of each level before anything is known;
        None takes that of the level below."""
        self._everyone = everyone
        self._guesses = guesses
        self._hits = [0.0] * NUM_LEVELS
        self._trials = [0.0] * NUM_LEVELS
        self._seen = [0] * NUM_LEVELS  # step of the last observation
        self._alone: list[float] | None = None

    def observe(self, levels: Sequence[int], accepted: int, step: int) -> None:
        """Of the tokens drafted at `levels` the first `accepted` ones were right; what follows the first wrong one
        was never tried."""
        for i, level in enumerate(levels[: accepted + 1]):
            level = min(level, NUM_LEVELS - 1)
            fade = DECAY ** (step - self._seen[level])
            self._hits[level] = self._hits[level] * fade + (i < accepted)
            self._trials[level] = self._trials[level] * fade + 1
            self._seen[level] = step
        self._alone = None
        if self._everyone is not None:
            self._everyone.observe(levels, accepted, step)

    def alone(self) -> list[float]:
        """Accept rate of each level, by what was observed here. One with few observations follows its guess."""
        if self._alone is None:
            rates = []
            rate = FIRST_GUESS
            for level, (hits, trials) in enumerate(zip(self._hits, self._trials, strict=True)):
                guess = rate if self._guesses is None else self._guesses[level]
                rate = (hits + NEIGHBOUR_WEIGHT * guess) / (trials + NEIGHBOUR_WEIGHT)
                rates.append(rate)
            self._alone = rates
        return self._alone

    def chances(self, levels: Sequence[int]) -> list[float]:
        """The chance of each token of a draft that it is accepted, which takes all before it."""
        last = NUM_LEVELS - 1
        if self._everyone is None:
            return list(accumulate((self.alone()[min(level, last)] for level in levels), mul))
        hits, trials, prior = self._hits, self._trials, self._everyone.alone()
        chance, chances = 1.0, []
        for level in levels:
            level = min(level, last)
            chance *= (hits[level] + PRIOR_WEIGHT * prior[level]) / (trials[level] + PRIOR_WEIGHT)
            chances.append(chance)
        return chances


class StepCostModel:
    """Time of a step by its number of rows: medians of recent ones, interpolated.

    All of them share a pace, which follows the last steps: a context that grows, or another process, slows down
    row counts that were not tried lately as well, and what matters is how they compare.
    """

    def __init__(self) -> None:
        self._times: dict[int, deque[float]] = {}
        self._seen: dict[int, int] = {}
        self._medians: dict[int, float] = {}  # of the row counts measured often enough
        self._rows: list[int] = []  # the same row counts, ascending
        self._costs: list[float] = []  # what a step with as many costs, ascending, at a pace of 1
        self._pace = 1.0

    @property
    def reach(self) -> int:
        """Rows that a step may try: at most double what is known, so that a steep cost is found out cheaply."""
        return 2 * self._rows[-1] if self._rows else 0

    def observe(self, rows: int, seconds: float, step: int) -> None:
        """A step with `rows` rows took `seconds`."""
        bucket = _bucket(rows)
        if bucket in self._medians and self.age(rows, step) < PROBE_AGE:
            surprise = seconds / float(self.estimate(np.array([rows]))[0])
            self._pace *= min(max(surprise, 1 / SURPRISE), SURPRISE) ** DRIFT
        seconds /= self._pace
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

    def estimate(self, rows: npt.NDArray[np.int64] | Floats) -> Floats:
        """Seconds that a step takes, for each number of rows: linear between known counts, flat outside them. The
        hope that more rows cost no more is what makes them be tried."""
        return np.interp(rows, self._rows, self._costs) * self._pace

    def age(self, rows: int, step: int) -> int:
        """Steps since one with about `rows` rows was seen."""
        return step - self._seen.get(_bucket(rows), -PROBE_AGE)


@dataclass(frozen=True, slots=True)
class Candidate:
    """What could be verified for one request: tokens drafted at `levels` of confidence."""

    rates: AcceptRates
    levels: Sequence[int]


@dataclass(frozen=True, slots=True)
class Prospect:
    """What one request could get from a pass of the drafting model, and what it has without.

    drafts: for each of its last drafts, the chance of each token; as many as the others have, or none if the model
        cannot draft for it.
    lookup: the chances of the tokens that cost nothing to draft.
    """

    drafts: Sequence[Sequence[float]]
    lookup: Sequence[float] = ()

    @property
    def gain(self) -> float:
        """Accepted tokens that the pass is expected to add."""
        return sum(map(sum, self.drafts)) / len(self.drafts) - sum(self.lookup)


@dataclass(frozen=True, slots=True)
class Choice:
    """For which prospects to run the drafting model, and the tokens a second that are expected of the step."""

    drafting: Sequence[int]
    rate: float


class PayoffController:
    """Shares out draft rows where they raise tokens per second, and none where they do not.

    A step with n drafted rows beside `rows` plain ones yields rows + (expected accepted) tokens in the time of
    rows + n. Rows are added in order of the chance that they are accepted, and the n with the best yield is taken.
    Now and then another n is tried, to notice that times or rates have changed; what that is expected to lose stays
    under PROBE_SHARE of all time. So drafts that do not pay stop, and are probed the more rarely the dearer they are.

    A drafting model has to be run before its draft is known. `choose` decides that by what its last drafts for each
    request were worth; `plan` then shares out the rows by the draft itself.
    """

    def __init__(self) -> None:
        self.costs = StepCostModel()
        self.draft_costs = StepCostModel()  # of the drafting model, by number of requests
        self._step = 0
        self._credit = 0.0  # seconds that probing may lose now
        self._rest_until = 0  # the step before which the drafting model is not thought of

    def choose(self, prospects: Sequence[Prospect], rows: int) -> Choice:
        """Whose drafts are worth a pass of the drafting model. Asked before `plan`, with the same `rows`."""
        order = sorted(
            (i for i, prospect in enumerate(prospects) if prospect.drafts and prospect.gain > 0),
            key=lambda i: -prospects[i].gain,
        )
        if (
            not order
            or self._step < self._rest_until
            or self.costs.reach <= rows
            or not self.draft_costs.reach
        ):
            return Choice((), 0.0)
        sizes = [1 << i for i in range((len(order) - 1).bit_length())] + [len(order)]
        tokens, seconds = self._best_step(prospects, (), rows)
        plain = tokens / seconds
        steps = [self._best_step(prospects, order[:size], rows) for size in sizes]
        rates = [tokens / seconds for tokens, seconds in steps]
        best = int(np.argmax(rates))
        if rates[best] > (1 + MODEL_MARGIN) * plain:
            return Choice(order[: sizes[best]], rates[best])
        tokens, seconds = steps[0]
        loss = max(seconds - tokens / plain, 0.0)
        if loss > self._credit:
            if rates[best] * self._step_seconds(rows) < rows:  # not even if there were nothing to look up
                self._rest_until = self._step + REST
            return Choice((), plain)
        self._credit -= loss
        return Choice(order[:1], plain)

    def plan(self, candidates: Sequence[Candidate], rows: int, rate: float | None = None) -> list[int]:
        """How many tokens to verify for each candidate, at most as many as it has.

        `rows` are the rows of the step without drafts: one a decoding request, and those of prompt chunks.
        `rate`, where a drafting model was run: its Choice's. The time of the model is spent then, so a row is worth
        it if it yields more than that rate.
        """
        self._step += 1
        self._save_up(rows)
        chances = [candidate.rates.chances(candidate.levels) for candidate in candidates]
        if not any(chances):
            return [0] * len(candidates)
        owners = np.repeat(np.arange(len(candidates)), [len(of_one) for of_one in chances])
        flat = np.fromiter(chain.from_iterable(chances), np.float64)
        # Stable, and chances fall within a draft, so what is taken of each draft is its beginning.
        order = np.argsort(-flat, kind="stable")[: max(self.costs.reach - rows, 0)]
        if not len(order):
            return [0] * len(candidates)
        yields = rows + np.concatenate(([0.0], np.cumsum(flat[order])))  # tokens, by number of drafted rows
        costs = self.costs.estimate(np.arange(rows, rows + len(yields)))
        if rate is not None:
            best = int(np.argmax(yields - rate * costs))
        else:
            best = int(np.argmax(yields / costs))
            if yields[best] / costs[best] < (1 + MARGIN) * yields[0] / costs[0]:
                best = 0
        chosen = self._probe(best, rows, yields, costs)
        counts: list[int] = np.bincount(owners[order[:chosen]], minlength=len(candidates)).tolist()
        return counts

    def observe(self, rates: AcceptRates, levels: Sequence[int], accepted: int) -> None:
        """What became of a draft, `rates` being those of its request and drafter.

        A draft that was not verified may be told as well, as far as the tokens emitted since say what it would
        have been: then drafting resumes as soon as it would pay, not at the next probe.
        """
        rates.observe(levels, accepted, self._step)

    def observe_step(self, rows: int, seconds: float) -> None:
        """A step with `rows` rows, drafted ones included, took `seconds`. Steps measured at start-up are welcome."""
        self.costs.observe(rows, seconds, self._step)

    def observe_drafting(self, requests: int, seconds: float) -> None:
        """The drafting model took `seconds` for so many requests."""
        self.draft_costs.observe(requests, seconds, self._step)

    def _best_step(
        self, prospects: Sequence[Prospect], drafting: Sequence[int], rows: int
    ) -> tuple[float, float]:
        """Expected tokens and seconds of a step with the drafting model run for `drafting`.

        Which rows will be worth verifying depends on drafts not made yet. The last ones stand for them: the rows of
        as many steps are put in order together, and a mean step takes its share of the best ones.
        """
        chosen = set(drafting)
        samples = len(prospects[drafting[0]].drafts) if drafting else 1
        chances: list[float] = []
        for i, prospect in enumerate(prospects):
            for sample in prospect.drafts if i in chosen else [prospect.lookup] * samples:
                chances += sample
        ordered = np.sort(np.array(chances))[::-1][: (self.costs.reach - rows) * samples]
        yields = rows + np.concatenate(([0.0], np.cumsum(ordered))) / samples
        costs = self.costs.estimate(rows + np.arange(len(yields)) / samples)
        if drafting:
            costs = costs + self.draft_costs.estimate(np.array([len(drafting)]))
        best = int(np.argmax(yields / costs))
        return float(yields[best]), float(costs[best])

    def _step_seconds(self, rows: int) -> float:
        return float(self.costs.estimate(np.array([rows]))[0])

    def _save_up(self, rows: int) -> None:
        if self.costs.reach:
            step = self._step_seconds(rows)
            self._credit = min(self._credit + PROBE_SHARE * step, MAX_CREDIT * step)

    def _probe(self, best: int, rows: int, yields: Floats, costs: Floats) -> int:
        """`best`, or a number of drafted rows not seen for long, if what that may lose has been saved up."""
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
