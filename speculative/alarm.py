"""Says when a drafter does worse than its card promises, which no text would show."""

from __future__ import annotations

import logging
from collections.abc import Mapping

logger = logging.getLogger(__name__)

WINDOW = 512  # drafts that are judged together
LOW, RECOVERED = 0.8, 0.9  # shares of the promised accept length at which an episode begins and ends


class AcceptAlarm:
    """Accept length as it would be if every draft were verified to its end, window by window, against `promised`."""

    def __init__(self, promised: float) -> None:
        self.promised = promised
        self.accept_length: float | None = None  # of the last window
        self.raised = False
        self._drafts = 0
        self._tried: list[int] = []
        self._right: list[int] = []

    def observe(self, tried: int, agreed: int) -> None:
        """The first `agreed` of a draft were right, of `tried` that are known to be right or wrong."""
        self._tried += [0] * (tried - len(self._tried))
        self._right += [0] * (tried - len(self._right))
        for j in range(min(agreed + 1, tried)):
            self._tried[j] += 1
            self._right[j] += j < agreed
        self._drafts += 1
        if self._drafts == WINDOW:
            self._judge()

    def gauges(self) -> Mapping[str, float]:
        gauges = {"drafter_accept_length_promised": self.promised, "drafter_accept_length_alarm": self.raised}
        if self.accept_length is not None:
            gauges["drafter_accept_length"] = self.accept_length
        return gauges

    def _judge(self) -> None:
        # The chance of each token given those before it, as drafts are cut at different lengths (Kaplan and Meier).
        length = chance = 1.0
        for tried, right in zip(self._tried, self._right, strict=True):
            chance *= right / tried if tried else 0.0
            length += chance
        self.accept_length = length
        self._drafts, self._tried, self._right = 0, [], []
        if not self.raised and length < LOW * self.promised:
            self.raised = True
            logger.warning(
                "the drafter's accept length was %.2f over the last %d drafts; its card says %.2f. Is it the drafter "
                "of this very model? Texts unlike those that it was trained on have the same effect",
                length,
                WINDOW,
                self.promised,
            )
        elif self.raised and length >= RECOVERED * self.promised:
            self.raised = False
            logger.info("the drafter's accept length is %.2f again", length)
