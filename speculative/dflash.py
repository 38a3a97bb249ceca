"""Drafting with DFlash: what the target computed for known tokens becomes the drafter's context, then one pass
drafts a block."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from backends.forward import ForwardBatch, ForwardMode
from engine.request import Request
from engine.runner import ModelRunner
from models.dflash import DFlashDrafter
from speculative.features import FeatureDrafter, Span
from speculative.proposal import DraftVocabulary, MakeSamplingRow, Proposal, choose


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

    def usable_prefix(self, request: Request, slots: Sequence[int]) -> int:
        if not slots or not self.fits(len(slots)):
            return len(slots)
        self.flush()
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
        drafted = self.num_draft_tokens - 1
        logits = self.runner.forward(self._block(requests)).logits.view(len(requests), drafted, -1)
        return [
            choose(rows[:limit], request, self.vocabulary, sampling_row)
            for rows, request, limit in zip(logits, requests, limits, strict=True)
        ]

    def fits(self, num_tokens: int) -> bool:
        """Whether a block behind so many tokens, the last of which begins it, is within all limits."""
        return num_tokens - 1 + self.num_draft_tokens <= self._limit

    def _block(self, requests: Sequence[Request]) -> ForwardBatch:
        """The last token of each request, and masks at the positions behind it."""
        pool, table = self.runner.kv_pool, self.runner.slot_table
        assert pool is not None and table is not None
        count, size = len(requests), self.num_draft_tokens
        ids = np.full((count, size), self._model.mask_token_id)
        ids[:, 0] = [request.token_ids(request.num_tokens - 1, request.num_tokens)[0] for request in requests]
        offsets = np.arange(size)
        positions = np.array([request.num_tokens - 1 for request in requests])[:, None] + offsets
        scratch = np.array([self.scratch(request).start for request in requests])[:, None] + offsets
        wanted = np.arange(count * size).reshape(count, size)[:, 1:]
        return ForwardBatch(
            mode=ForwardMode.DRAFT_EXTEND,
            input_ids=self._device(ids),
            positions=self._device(positions),
            out_slots=self._device(scratch),
            query_lens=(size,) * count,
            context_lens=tuple(self.counts[request] + size for request in requests),
            slot_table=table.tensor,
            table_rows=tuple(request.table_row for request in requests),
            logits_rows=self._device(wanted),
            kv_pool=pool,
            causal=False,
        )

    def _device(self, values: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values).reshape(-1)).to(self.runner.device)
