"""Drafting with DFlash: what the target computed for known tokens becomes the drafter's context, then one pass
drafts a block, and where the drafter has a successor head its tokens are chosen one after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from backends.forward import ForwardBatch, ForwardMode
from engine.request import Request
from engine.runner import ModelRunner
from engine.sampler import takes_the_best
from models.dflash import DFlashDrafter
from speculative.chain import draft_chains, last_tokens
from speculative.features import FeatureDrafter, Span
from speculative.proposal import DraftVocabulary, MakeSamplingRow, Proposal, choose, hopeful


class DFlash(FeatureDrafter):
    """Drafts a block of tokens for each request in one pass, in the scratch slots behind its context."""

    name = "dflash"

    def __init__(
        self, runner: ModelRunner, num_draft_tokens: int, vocab_size: int, window_size: int | None = None
    ) -> None:
        super().__init__(runner, num_draft_tokens, vocab_size, window_size)
        self._limit = 0

    def prepare(self) -> None:
        super().prepare()
        model, table = self._model, self.runner.slot_table
        assert table is not None
        self.capture_layers = model.target_layer_ids
        self.num_draft_tokens = min(self.num_draft_tokens, model.block_size)
        if model.draft_token_ids is not None:
            self.vocabulary = DraftVocabulary(self.vocabulary.size, model.draft_token_ids.cpu().numpy())
        self.scratch_size = model.block_size
        self._limit = min(model.context_length, table.tensor.shape[1])

    @property
    def promised_accept_length(self) -> float | None:
        dflash = self.runner.files.dflash
        return None if dflash is None else dflash.accept_length

    @property
    def _model(self) -> DFlashDrafter:
        model = self.runner.model
        assert isinstance(model, DFlashDrafter)
        return model

    def room(self, request: Request) -> int:
        return self.num_draft_tokens - 1 if self.fits(request.num_tokens) else 0

    def num_known(self, slots: Sequence[int]) -> int:
        first = 0 if self._window is None else max(0, len(slots) - self._window)
        return first + self.num_filled(slots[first:])

    def write(self, spans: Sequence[Span], captured: torch.Tensor) -> None:
        pool = self.runner.kv_pool
        assert pool is not None
        positions = self.tensor([position for span in spans for position in range(span.start, span.end)])
        slots = self.tensor([slot for span in spans for slot in span.request.slots[span.start : span.end]])
        self._model.write_context(captured, positions, slots, pool)
        self.wrote(spans)

    @torch.inference_mode()
    def propose(
        self, requests: Sequence[Request], limits: Sequence[int], sampling_row: MakeSamplingRow
    ) -> list[Proposal]:
        self.catch_up(requests)
        size = self._size(limits)
        batch = self._block(requests, size)
        if all(takes_the_best(request) for request in requests):
            chosen = self.runner.choose(batch, chances=True)
            if chosen is not None:
                choices = list(zip(chosen.token_ids, chosen.chances, strict=True))
                starts = range(0, len(choices), size - 1)
                return [hopeful(choices[at : at + limit]) for at, limit in zip(starts, limits, strict=True)]
        logits = self.runner.forward(batch).logits.view(len(requests), size - 1, -1)
        if self._model.successor is not None:
            return self._choose_in_order(logits, requests, limits, sampling_row)
        return [
            choose(rows[:limit], request, self.vocabulary, sampling_row)
            for rows, request, limit in zip(logits, requests, limits, strict=True)
        ]

    def _choose_in_order(
        self,
        logits: torch.Tensor,
        requests: Sequence[Request],
        limits: Sequence[int],
        sampling_row: MakeSamplingRow,
    ) -> list[Proposal]:
        """Tokens by `logits` [len(requests), n, V'] and what each token says about the next."""

        def next_logits(active: Sequence[int], drafted: Sequence[Proposal]) -> torch.Tensor:
            before = last_tokens([requests[i] for i in active], drafted)
            rows = logits[list(active), len(drafted[0].token_ids)]
            return rows + self._model.successor_logits(self.tensor(before))

        return draft_chains(next_logits, requests, limits, self.vocabulary, sampling_row)

    @property
    def short_draft(self) -> int:
        return min(self._model.short_block_size, self.num_draft_tokens) - 1

    def pass_rows(self, limits: Sequence[int]) -> int:
        return len(limits) * self._size(limits)

    def _size(self, limits: Sequence[int]) -> int:
        """Rows of each request's block."""
        return (self.short_draft if max(limits) <= self.short_draft else self.num_draft_tokens - 1) + 1

    def fits(self, num_tokens: int) -> bool:
        """Whether a block behind so many tokens, the last of which begins it, is within all limits."""
        return num_tokens - 1 + self.num_draft_tokens <= self._limit

    def _block(self, requests: Sequence[Request], size: int) -> ForwardBatch:
        """The last token of each request, and masks at the `size - 1` positions behind it."""
        pool, table = self.runner.kv_pool, self.runner.slot_table
        assert pool is not None and table is not None
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        wanted: list[int] = []
        masks = [self._model.mask_token_id] * (size - 1)
        for request in requests:
            last = request.num_tokens - 1
            wanted += range(len(ids) + 1, len(ids) + size)
            ids += request.token_ids(last, last + 1)
            ids += masks
            positions += range(last, last + size)
            slots += self.scratch(request)[:size]
        return ForwardBatch(
            mode=ForwardMode.DRAFT_EXTEND,
            input_ids=self.tensor(ids),
            positions=self.tensor(positions),
            out_slots=self.tensor(slots),
            query_lens=(size,) * len(requests),
            context_lens=tuple(self.counts[request] + size for request in requests),
            slot_table=table.tensor,
            table_rows=tuple(request.table_row for request in requests),
            logits_rows=self.tensor(wanted),
            kv_pool=pool,
            causal=False,
        )
