"""How many tokens to draft, and whether to run a drafting model at all: measured accept rates against measured times.

Nothing here reads a clock. Times are passed in, so the same calls always give the same decisions.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter, mul, truediv
from typing import NamedTuple

NUM_LEVELS = 16  # of confidence; higher ones count as the last
DECAY = 0.99  # weight that an observation keeps from one step to the next
FIRST_GUESS = 0.5  # accept rate of a drafter not yet seen
NEIGHBOUR_WEIGHT = 4.0  # observations that a level's guess is worth
PRIOR_WEIGHT = 16.0  # observations that all requests together are worth for one of them
TIMES_KEPT = 9  # step times of one row count, of which the median is believed
SETTLE_EVERY = 4  # steps after which they are looked at again, once there are so many
TIMES_NEEDED = 3  # before it is: the first steps of a shape are often slow
DRIFT = 0.4  # share by which one step moves the pace of all row counts
SURPRISE = 1.25  # factor by which a step may differ from what was expected and still tell of the pace
MARGIN = 0.01  # by which drafting must win over plain decoding
MODEL_MARGIN = 0.02  # and a drafting model over doing without it, which is known less well
PROBE_SHARE = 0.005  # of the time that trying other draft lengths may cost
LOOK_EVERY = (
    8  # steps after which all draft lengths are weighed again, though no draft looks as if it could pay
)
PROBE_AGE = 128  # steps after which a measurement is taken again
MAX_CREDIT = 10.0  # in steps: how much of the probe share can be saved up
THRESHOLDS = tuple(i / 10 for i in range(10))  # at which the worth of drafts is kept
WORTH_SHARE = 1 / 16  # share by which one draft changes it, once there have been some
WORTH_PRIOR = 3  # drafts that what it begins with is worth
RATE_KEPT = 0.95  # weight that the expected rate of a step keeps from one to the next
PATIENCE = 32  # steps that a drafting model follows a request for whose drafts do not pay
FIRST_NAP = 256  # steps that it leaves the request alone then; twice as many each time after that
LONGEST_NAP = 4096


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
        hits, trials, seen = self._hits, self._trials, self._seen
        for i, level in enumerate(levels[: accepted + 1]):
            level = min(level, NUM_LEVELS - 1)
            fade = DECAY ** (step - seen[level])
            hits[level] = hits[level] * fade + (i < accepted)
            trials[level] = trials[level] * fade + 1
            seen[level] = step
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
        self._estimates: dict[int, float] = {}  # by row count, at a pace of 1
        self._pace = 1.0

    @property
    def reach(self) -> int:
        """Rows that a step may try: at most double what is known, so that a steep cost is found out cheaply."""
        return 2 * self._rows[-1] if self._rows else 0

    def observe(self, rows: int, seconds: float, step: int) -> None:
        """A step with `rows` rows took `seconds`."""
        bucket, stale = _bucket(rows), self.age(rows, step) >= PROBE_AGE
        if bucket in self._medians and not stale:
            surprise = seconds / self.at(rows)
            self._pace *= min(max(surprise, 1 / SURPRISE), SURPRISE) ** DRIFT
        times = self._times.setdefault(bucket, deque(maxlen=TIMES_KEPT))
        while stale and len(times) >= TIMES_NEEDED:
            times.popleft()  # so that two probes outvote old times
        times.append(seconds / self._pace)
        self._seen[bucket] = step
        # A median of many hardly moves with one: this is done in every step, and most are alike.
        if len(times) >= TIMES_NEEDED and (stale or len(times) < TIMES_KEPT or step % SETTLE_EVERY == 0):
            self._settle(bucket, times)

    def _settle(self, bucket: int, times: Iterable[float]) -> None:
        self._medians[bucket] = statistics.median(times)
        self._rows = sorted(self._medians)
        # Fewer rows never take longer: where a measurement says so, that of more rows is believed.
        falling = accumulate((self._medians[known] for known in reversed(self._rows)), min)
        self._costs = list(falling)[::-1]
        self._estimates.clear()

    def at(self, rows: int) -> float:
        """Seconds that a step with so many rows takes: linear between known counts, flat outside them. The hope that
        more rows cost no more is what makes them be tried."""
        return self.between(rows, rows)[0]

    def between(self, fewest: int, most: int) -> list[float]:
        """The same for each number of rows from `fewest` to `most`."""
        estimates, pace = self._estimates, self._pace
        seconds = []
        for rows in range(fewest, most + 1):
            if rows not in estimates:
                estimates[rows] = self._interpolated(rows)
            seconds.append(estimates[rows] * pace)
        return seconds

    def _interpolated(self, count: int) -> float:
        known, costs = self._rows, self._costs
        i = bisect_left(known, count)
        if i == 0 or i == len(known):
            return costs[min(i, len(known) - 1)]
        share = (count - known[i - 1]) / (known[i] - known[i - 1])
        return costs[i - 1] + share * (costs[i] - costs[i - 1])

    def age(self, rows: int, step: int) -> int:
        """Steps since one with about `rows` rows was seen."""
        return step - self._seen.get(_bucket(rows), -PROBE_AGE)


class DraftWorth:
    """What drafts of a model were worth lately: the sum of their tokens' chances, as far as each is above what
    verifying it costs. As that changes with the batch, it is kept for some THRESHOLDS of it."""

    def __init__(self, like: DraftWorth | None = None, chances: Sequence[float] = ()) -> None:
        """Begins as `like`, or as if all drafts had these `chances`."""
        self._drafts = WORTH_PRIOR
        self._worth: list[float] = [_worth(chances, threshold) for threshold in THRESHOLDS]
        if like is not None:
            self._worth = list(like._worth)

    def observe(self, chances: Sequence[float]) -> None:
        """Another draft, whose tokens have these chances, falling."""
        self._drafts += 1
        share = max(WORTH_SHARE, 1 / self._drafts)
        for i, threshold in enumerate(THRESHOLDS):
            self._worth[i] += share * (_worth(chances, threshold) - self._worth[i])

    def above(self, threshold: float) -> float:
        """Its mean at a threshold of 0 or more."""
        place = threshold * len(THRESHOLDS)
        i = int(place)
        if i >= len(THRESHOLDS):
            return 0.0
        after = self._worth[i + 1] if i + 1 < len(THRESHOLDS) else 0.0
        return self._worth[i] + (place - i) * (after - self._worth[i])


class Watch:
    """Whether a drafting model follows a text. Reading what the target computes costs time, drafts or not. So where
    they do not pay it is left alone for longer and longer, and then read for a while to see whether they would."""

    def __init__(self, like: Watch | None = None) -> None:
        """Begins awake, or as `like` is."""
        self._idle = 0  # steps awake since drafts paid
        self._left: int = 0 if like is None else like._left  # of a nap
        self._nap: int = FIRST_NAP if like is None else like._nap  # steps of the next one
        self.pays = True  # drafts did lately, for all that is known

    @property
    def is_awake(self) -> bool:
        return self._left == 0

    def step(self, paid: bool) -> None:
        """A step, in which drafts were expected to pay or not."""
        if paid:
            self._idle = self._left = 0
            self._nap = FIRST_NAP
            self.pays = True
        elif self._left:
            self._left -= 1
        elif self._idle < PATIENCE:
            self._idle += 1
        else:
            self._idle, self._left = 0, self._nap
            self._nap = min(2 * self._nap, LONGEST_NAP)
            self.pays = False


@dataclass(frozen=True, slots=True)
class Prospect:
    """What one request could get from a pass of the drafting model, and the chances of the tokens that it has without.

    worth: of the model's drafts for it; None where the model cannot draft now.
    """

    worth: DraftWorth | None
    without: Sequence[float] = ()


class Choice(NamedTuple):
    """For which prospects to run a drafting model, and whether that is expected to pay or only to tell."""

    indices: list[int]
    pays: bool


NOBODY = Choice([], False)


class PayoffController:
    """Shares out draft rows where they raise tokens per second, and none where they do not.

    A step with n drafted rows beside `rows` plain ones yields rows + (expected accepted) tokens in the time of
    rows + n. Rows are added in order of the chance that they are accepted, and the n with the best yield is taken.
    Now and then another n is tried, to notice that times or rates have changed; what that is expected to lose stays
    under PROBE_SHARE of all time. So drafts that do not pay stop, and are probed the more rarely the dearer they are.

    A drafting model has to be run before its draft is known. `choose` decides that by what its drafts were worth
    lately: time is worth the tokens that steps like this one yield in it, so a pass, and every row, has to bring more
    than that (as in Dinkelbach's method for ratios, 1967). `plan` then shares out the rows by the draft itself.
    """

    def __init__(self) -> None:
        self.costs = StepCostModel()
        self.draft_costs = StepCostModel()  # of the drafting model, by rows of its pass
        self._step = 0
        self._credit = 0.0  # seconds that probing may lose now
        self._shape = (0, 0)  # of the last step: requests, and rows without drafts
        self._tokens = self._seconds = 0.0  # expected of the last steps of that shape

    def choose(self, prospects: Sequence[Prospect], rows: int, pass_rows: int = 1) -> Choice:
        """For which prospects to run the drafting model. Asked before `plan`, with the same requests and `rows`.

        pass_rows: rows of the drafting model's pass for each of them.
        """
        if self.costs.reach <= rows or not self.draft_costs.reach:
            return NOBODY
        rate = self._rate(len(prospects), rows)
        more = min(4 * len(prospects), self.costs.reach - rows)
        now, then = self.costs.at(rows), self.costs.at(rows + more)
        row_price = rate * (then - now) / more  # tokens that a row has to bring
        gains = sorted(
            (
                (prospect.worth.above(row_price) - _worth(prospect.without, row_price), i)
                for i, prospect in enumerate(prospects)
                if prospect.worth is not None
            ),
            reverse=True,
        )
        if not gains:
            return NOBODY
        seconds = [self.draft_costs.at(count * pass_rows) for count in range(1, len(gains) + 1)]
        gained = accumulate(gain for gain, _ in gains)
        nets = [gain - rate * spent for gain, spent in zip(gained, seconds, strict=True)]
        best = max(range(len(nets)), key=nets.__getitem__)
        if nets[best] > MODEL_MARGIN * rows:
            return Choice([i for _, i in gains[: best + 1]], True)
        loss = max(-nets[0] / rate, 0.0)
        if loss > self._credit:
            return NOBODY
        self._credit -= loss
        return Choice([gains[0][1]], False)

    def plan(self, drafts: Sequence[Sequence[float]], rows: int, drafting: int = 0) -> list[int]:
        """How many tokens to verify of each request's draft, which is given as the chances of its tokens.

        `rows` are the rows of the step without drafts: one a decoding request, and those of prompt chunks.
        `drafting`: rows of the drafting model's pass, if it was run. Its time is spent then, so a row is worth it if it
        brings more than steps of this shape do in its time.
        """
        self._step += 1
        reach = self.costs.reach - rows
        if reach <= 0:
            return [0] * len(drafts)
        flat = [(-chance, owner) for owner, chances in enumerate(drafts) for chance in chances]
        # Stable, and chances fall within a draft, so what is taken of each draft is its beginning.
        if len(drafts) > 1:
            flat.sort(key=itemgetter(0))
        del flat[reach:]
        costs = self.costs.between(rows, rows + len(flat))
        yields = list(accumulate((-chance for chance, _ in flat), initial=float(rows)))
        self._credit = min(self._credit + PROBE_SHARE * costs[0], MAX_CREDIT * costs[0])
        chosen = self._best(yields, costs, self._rate(len(drafts), rows) if drafting else None)
        chosen = self._probe(chosen, rows, yields, costs)
        spent = self.draft_costs.at(drafting) if drafting else 0.0
        self._expect(yields[chosen], costs[chosen] + spent)
        counts = [0] * len(drafts)
        for _, owner in flat[:chosen]:
            counts[owner] += 1
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

    def observe_drafting(self, rows: int, seconds: float) -> None:
        """The drafting model took `seconds` for a pass of so many rows."""
        self.draft_costs.observe(rows, seconds, self._step)

    def _expect(self, tokens: float, seconds: float) -> None:
        self._tokens = RATE_KEPT * self._tokens + tokens
        self._seconds = RATE_KEPT * self._seconds + seconds

    def _rate(self, requests: int, rows: int) -> float:
        """Tokens a second of steps of this shape, at least those of a plain one."""
        plain = rows / self.costs.at(rows)
        if (requests, rows) != self._shape:
            self._shape = (requests, rows)
            self._tokens = self._seconds = 0.0
        return max(plain, self._tokens / self._seconds) if self._seconds else plain

    @staticmethod
    def _best(yields: Sequence[float], costs: Sequence[float], rate: float | None) -> int:
        """Number of drafted rows: that with the best yield, or with the most beyond `rate`."""
        numbers = range(len(yields))
        if rate is not None:
            return max(numbers, key=lambda n: yields[n] - rate * costs[n])
        speeds = list(map(truediv, yields, costs))
        best = speeds.index(max(speeds))
        return best if yields[best] / costs[best] >= (1 + MARGIN) * yields[0] / costs[0] else 0

    def _probe(self, best: int, rows: int, yields: Sequence[float], costs: Sequence[float]) -> int:
        """`best`, or a number of drafted rows not seen for long, if what that may lose has been saved up."""
        if self._step % LOOK_EVERY:
            return best
        sizes = [0, *(1 << i for i in range((len(yields) - 1).bit_length()))]
        stalest = max(sizes, key=lambda n: self.costs.age(rows + n, self._step))
        loss = costs[stalest] - yields[stalest] * costs[best] / yields[best]
        if self.costs.age(rows + stalest, self._step) < PROBE_AGE or loss > self._credit:
            return best
        self._credit -= loss
        return stalest


def _worth(chances: Sequence[float], price: float) -> float:
    """What there is above `price` in falling `chances`."""
    return sum(chance - price for chance in chances if chance > price)


def _bucket(rows: int) -> int:
    """Row counts that share a measurement: exact up to 15, then eight to a doubling."""
    shift = max(0, rows.bit_length() - 4)
    return rows >> shift << shift
