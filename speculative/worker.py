"""What all speculative workers share: rows of drafts are verified by the target, and recurrent state is committed."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from engine.plain_worker import PlainWorker, Rows
from engine.request import TokenLogprob
from engine.runner import ModelRunner
from engine.worker import SequenceStep, StepOutput
from speculative.verify import verify


class SpeculativeWorker(PlainWorker):
    """Verifies what a subclass drafts. `need_mamba_verify_commit` is False until its start-up hook has run."""

    def __init__(self, runner: ModelRunner, eos_token_ids: frozenset[int]) -> None:
        super().__init__(runner, eos_token_ids)
        self.need_mamba_verify_commit = False

    def detect_mamba_commit(self) -> None:
        """Start-up hook, after the backends are built: does a verify leave recurrent state to commit?"""
        backend = self.runner.attn_backend
        assert backend is not None
        self.need_mamba_verify_commit = (
            self.runner.files.config.has_mamba_layers and backend.mamba_commit() is not None
        )

    def forward(self, steps: Sequence[SequenceStep]) -> list[StepOutput]:
        outputs = super().forward(steps)
        if self.need_mamba_verify_commit:
            # A block's rows are the last token and its drafts; as many stand as there are tokens after them.
            self.runner.commit_state(
                {
                    step.request.table_row: len(output.token_ids)
                    for step, output in zip(steps, outputs, strict=True)
                    if step.drafts
                }
            )
        return outputs

    def choose(self, step: SequenceStep, rows: Rows) -> list[tuple[int, TokenLogprob | None]]:
        return verify(step.drafts, lambda row: self.sample_row(step, rows, row), itemgetter(0))
