"""The plain worker: one token a step. Speculative workers build on it and differ in how many rows they check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from backends.forward import ForwardBatch
from engine.penalties import TokenHistory, needs_history
from engine.request import Request, TokenLogprob
from engine.runner import ModelRunner
from engine.sampler import SamplingRow, sample, takes_the_best, token_logprobs, unusable
from engine.worker import SequenceStep, StepOutput

# Of the rows of a pass: logits [R, V], or the best tokens where these are all that is wanted, -1 for one without.
Rows = torch.Tensor | list[int]


class PlainWorker:
    """Runs the target and samples. Nothing is drafted."""

    def __init__(self, runner: ModelRunner, eos_token_ids: frozenset[int]) -> None:
        self.runner = runner
        self._eos_token_ids = eos_token_ids
        self._histories: dict[Request, TokenHistory] = {}

    def detect_mamba_commit(self) -> None:
        """Start-up hook. Plain decoding never has anything to roll back."""

    def warm_up(self) -> None:
        """Last start-up hook: whatever a first pass sets up is set up before the first request."""
        self.runner.time_pass(1)

    def max_draft_tokens(self, request: Request) -> int:
        return 0

    def draft(self, requests: Sequence[Request], limits: Sequence[int], rows: int) -> list[tuple[int, ...]]:
        return [() for _ in requests]

    def forward(self, steps: Sequence[SequenceStep]) -> list[StepOutput]:
        rows = self.run_pass(steps)
        outputs = []
        start = 0
        for step in steps:
            end = start + self.runner.num_logits_rows(step)
            outputs.append(self._output(step, rows[start:end]))
            start = end
        return outputs

    def observe(self, request: Request, step: SequenceStep, emitted: int) -> None:
        """Nothing to learn from a plain step."""

    def usable_prefix(self, request: Request, slots: Sequence[int]) -> int:
        return len(slots)

    def before_release(self, request: Request) -> None:
        """Nothing is kept by slot."""

    def gauges(self) -> Mapping[str, float]:
        return {}

    def release(self, request: Request) -> None:
        self._histories.pop(request, None)

    def run_pass(self, steps: Sequence[SequenceStep]) -> Rows:
        """The target's word on all rows of `steps` that need it, in order."""
        return self.run_batch(steps, self.runner.batch(steps))[0]

    def run_batch(
        self, steps: Sequence[SequenceStep], batch: ForwardBatch
    ) -> tuple[Rows, Mapping[int, torch.Tensor]]:
        """The pass over `batch`, that of `steps`, and the hidden states that it captures by layer."""
        if all(self._needs_no_logits(step) for step in steps):
            chosen = self.runner.choose(batch)
            if chosen is not None:
                return chosen.token_ids, chosen.captured
        result = self.runner.forward(batch)
        return result.logits, result.captured

    def _needs_no_logits(self, step: SequenceStep) -> bool:
        request = step.request
        if self.runner.num_logits_rows(step) == 0:
            return True
        return (
            request.sampling.logprobs is None
            and not request.wants_prompt_logprobs
            and takes_the_best(request)
        )

    def choose(self, step: SequenceStep, rows: Rows) -> list[tuple[int, TokenLogprob | None]]:
        """Tokens that follow the step's last known one, by its rows, one and those of its drafts.

        Raises ValueError if a row that is needed has no usable logits.
        """
        return [self.sample_row(step, rows, 0)]

    def sample_row(self, step: SequenceStep, rows: Rows, row: int) -> tuple[int, TokenLogprob | None]:
        """The target's token after the first `row` drafts of the step, given that they stand."""
        if isinstance(rows, list):
            if rows[row] < 0:
                raise ValueError(unusable(step.request.num_tokens + row))
            return rows[row], None
        sampling_row = self.sampling_row(step.request, rows.shape[1], step.drafts[:row])
        result = sample(rows[row : row + 1], [sampling_row])
        if result.errors:
            raise ValueError(result.errors[0])
        return result.token_ids[0], result.logprobs[0]

    def sampling_row(self, request: Request, vocab_size: int, drafts: tuple[int, ...]) -> SamplingRow:
        """What the token after all known ones and then `drafts` depends on, beside its logits."""
        return SamplingRow.of(request, self._eos_token_ids, self._history(request, vocab_size), drafts)

    def _output(self, step: SequenceStep, rows: Rows) -> StepOutput:
        request = step.request
        prompt_logprobs: tuple[TokenLogprob, ...] = ()
        if request.wants_prompt_logprobs:
            assert isinstance(rows, torch.Tensor)
            prompt_logprobs = self._prompt_logprobs(step, rows)
        if not step.samples or request.sampling.max_tokens == 0:
            return StepOutput(prompt_logprobs=prompt_logprobs)
        try:
            chosen = self.choose(step, rows[-1 - len(step.drafts) :])
        except ValueError as error:
            return StepOutput(error=str(error))
        logprobs = tuple(logprob for _, logprob in chosen if logprob is not None)
        return StepOutput(tuple(token for token, _ in chosen), logprobs, prompt_logprobs)

    def _prompt_logprobs(self, step: SequenceStep, logits: torch.Tensor) -> tuple[TokenLogprob, ...]:
        """Row i of the chunk predicts the prompt token after it, if that is still the prompt."""
        request = step.request
        first = request.cached_len + 1
        following = request.prompt_ids[first : first + step.num_tokens]
        top = request.sampling.prompt_logprobs or 0
        return tuple(token_logprobs(logits[: len(following)], following, top))

    def _history(self, request: Request, vocab_size: int) -> TokenHistory | None:
        if not needs_history(request.sampling):
            return None
        history = self._histories.get(request)
        if history is None:
            history = self._histories[request] = TokenHistory(request.prompt_ids, vocab_size)
        history.update(request.output_ids)
        return history
