"""When the tokens of an answer came, and what follows from that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Timing:
    """Of one answer, or the sum of several. The first token is prefill's; decoding is what comes after it."""

    ttft: float  # seconds
    decode_tokens: int
    decode_seconds: float

    @classmethod
    def of(cls, start: float, arrivals: Sequence[tuple[float, int]]) -> Timing:
        """From clock readings in seconds: the request's start, and when how many tokens came."""
        first, last = arrivals[0][0], arrivals[-1][0]
        return cls(first - start, sum(count for _, count in arrivals[1:]), last - first)

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed; 0 where nothing was decoded."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0


def total(timings: Iterable[Timing]) -> Timing:
    """All answers as if they were one."""
    every = list(timings)
    return Timing(
        sum(timing.ttft for timing in every),
        sum(timing.decode_tokens for timing in every),
        sum(timing.decode_seconds for timing in every),
    )


def percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles in milliseconds; None where nothing was measured."""
    if not seconds:
        return None
    values = np.asarray(seconds) * 1000
    return {"mean": float(values.mean())} | {f"p{q}": float(np.percentile(values, q)) for q in PERCENTILES}
