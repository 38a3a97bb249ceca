"""Speculation without a drafter: drafts are looked up in the request's own text, and only as many as pay off."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.request import Request
from engine.runner import ModelRunner
from engine.worker import SequenceStep, StepOutput
from speculative.adaptive import TIMES_NEEDED, AcceptRates, Candidate, PayoffController
from speculative.ngram import NgramDraft, NgramIndex
from speculative.worker import SpeculativeWorker

ALGORITHM = "ngram"


@dataclass(slots=True)
class _Drafting:
    """What is kept for a request: its text by n-gram, its accept rates, and the last proposal."""

    index: NgramIndex
    rates: AcceptRates = field(default_factory=AcceptRates)
    proposal: NgramDraft = NgramDraft()


class NgramWorker(SpeculativeWorker):
    """Prompt-lookup drafts, verified by the target, under pay-off control."""

    def __init__(
        self,
        runner: ModelRunner,
        eos_token_ids: frozenset[int],
        num_draft_tokens: int,
        min_match: int,
        max_match: int,
        controller: PayoffController,
    ) -> None:
        """`num_draft_tokens` counts verified rows, the last token included."""
        super().__init__(runner, eos_token_ids)
        self._num_draft_tokens = num_draft_tokens
        self._min_match = min_match
        self._max_match = max_match
        self._controller = controller
        self._drafting: dict[Request, _Drafting] = {}

    def warm_up(self) -> None:
        """Time passes of one row and of blocks, so that the first requests need not try out what drafting costs."""
        super().warm_up()
        most = min(self._num_draft_tokens, self.runner.max_context_len)
        sizes = [1 << power for power in range(most.bit_length()) if 1 << power <= most]
        for rows in sizes * TIMES_NEEDED:
            self._controller.observe_step(rows, self.runner.time_pass(rows))

    def max_draft_tokens(self, request: Request) -> int:
        wishes = request.speculation
        if wishes.algorithm not in (None, ALGORITHM):
            return 0
        return (wishes.num_draft_tokens or self._num_draft_tokens) - 1

    def draft(self, requests: Sequence[Request], limits: Sequence[int], rows: int) -> list[tuple[int, ...]]:
        candidates = []
        for request, limit in zip(requests, limits, strict=True):
            drafting = self._drafting.get(request)
            if drafting is None:
                index = NgramIndex(self._min_match, self._max_match)
                drafting = self._drafting[request] = _Drafting(index)
            drafting.index.extend(request.token_ids(len(drafting.index), request.num_tokens))
            drafting.proposal = proposal = drafting.index.propose(limit)
            candidates.append(Candidate(drafting.rates, proposal.match_length, len(proposal.token_ids)))
        lengths = self._controller.plan(candidates, rows)
        return [
            self._drafting[request].proposal.token_ids[:length]
            for request, length in zip(requests, lengths, strict=True)
        ]

    def forward(self, steps: Sequence[SequenceStep]) -> list[StepOutput]:
        start = time.perf_counter()
        outputs = super().forward(steps)
        rows = sum(step.num_tokens + len(step.drafts) for step in steps)
        self._controller.observe_step(rows, time.perf_counter() - start)
        return outputs

    def observe(self, request: Request, step: SequenceStep, emitted: int) -> None:
        # The whole proposal is compared, verified or not, so that drafting resumes as soon as it would pay.
        drafting = self._drafting.get(request)
        if drafting is None or not emitted or not drafting.proposal.token_ids:
            return
        proposal, drafting.proposal = drafting.proposal, NgramDraft()
        pairs = list(zip(proposal.token_ids, request.output_ids[-emitted:], strict=False))
        agreed = next((i for i, (guess, token) in enumerate(pairs) if guess != token), len(pairs))
        self._controller.observe(drafting.rates, proposal.match_length, len(pairs), agreed)

    def release(self, request: Request) -> None:
        super().release(request)
        self._drafting.pop(request, None)
