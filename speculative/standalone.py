"""Drafting with a small model of the target's tokenizer: one token after another, for all requests together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from backends.forward import ForwardBatch, ForwardMode
from engine.request import Request
from engine.runner import ModelRunner
from speculative.chain import chain_room, draft_chains
from speculative.drafter import Drafter
from speculative.proposal import DraftVocabulary, MakeSamplingRow, Proposal

MAX_EXTEND = 512  # tokens of a pass in which the model catches up: a long prompt takes several steps


@dataclass(slots=True)
class _Part:
    """Tokens of one request, from `position` on, that go through the model, and the slots for them."""

    request: Request
    position: int
    token_ids: list[int]
    slots: list[int]

    def cut(self, length: int) -> _Part:
        """Take off the first `length` tokens, which are returned."""
        first = _Part(self.request, self.position, self.token_ids[:length], self.slots[:length])
        self.position += length
        del self.token_ids[:length], self.slots[:length]
        return first


class Standalone(Drafter):
    """Reads what it lacks of a text itself, from its tokens, when it is next asked for a draft."""

    name = "standalone"

    def __init__(self, runner: ModelRunner, num_draft_tokens: int, vocab_size: int) -> None:
        super().__init__(runner, num_draft_tokens, vocab_size)
        self._known: dict[Request, int] = {}  # leading tokens that the model has
        self._limit = 0

    def prepare(self) -> None:
        super().prepare()
        table = self.runner.slot_table
        assert table is not None
        self._limit = min(self.runner.context_len, table.tensor.shape[1])
        # Models of one tokenizer may be padded to different sizes.
        own = self.runner.files.config.vocab_size
        if own < self.vocabulary.size:
            self.vocabulary = DraftVocabulary(self.vocabulary.size, np.arange(own))

    def room(self, request: Request) -> int:
        return chain_room(request, self.num_draft_tokens, self._limit)

    @torch.inference_mode()
    def make_ready(self, requests: Sequence[Request]) -> list[bool]:
        caught_up = [request.cached_len - self._num_read(request) < MAX_EXTEND for request in requests]
        if not all(caught_up):
            part = self._new_tokens(requests[caught_up.index(False)])
            start = part.position
            self._pass([part.cut(MAX_EXTEND)])
            self._known[part.request] = part.position
            self.fill(part.request.slots[start : part.position])
        return caught_up

    @torch.inference_mode()
    def propose(
        self, requests: Sequence[Request], limits: Sequence[int], sampling_row: MakeSamplingRow
    ) -> list[Proposal]:
        parts = [self._new_tokens(request) for request in requests]
        known = [part.position for part in parts]

        def next_logits(active: Sequence[int], drafted: Sequence[Proposal]) -> torch.Tensor:
            if not drafted[0].token_ids:
                return self._pass(parts)
            return self._pass(
                [self._drafted(requests[i], draft) for i, draft in zip(active, drafted, strict=True)]
            )

        proposals = draft_chains(next_logits, requests, limits, self.vocabulary, sampling_row)
        for request, start in zip(requests, known, strict=True):
            self._known[request] = request.cached_len
            self.fill(request.slots[start : request.cached_len])
        return proposals

    def committed(self, request: Request, num_tokens: int) -> None:
        """It reads them when it is next asked."""

    def forget(self, request: Request) -> None:
        self._known.pop(request, None)

    def _num_read(self, request: Request) -> int:
        """How many tokens of the request the model need not read again."""
        known = self._known.get(request)
        return self.num_filled(request.slots[: request.cached_len]) if known is None else known

    def _new_tokens(self, request: Request) -> _Part:
        """The tokens that the model has not seen, up to the last one, whose place in the table's row is a scratch
        slot, as are those of the drafts to come."""
        table = self.runner.slot_table
        assert table is not None
        known, end = self._num_read(request), request.cached_len
        start = self._known.get(request, 0)
        room = table.tensor.shape[1] - start
        table.write(request.table_row, start, [*request.slots[start:end], *self.scratch(request)][:room])
        ids = request.token_ids(known, request.num_tokens)
        return _Part(request, known, ids, [*request.slots[known:end], self.scratch(request)[0]])

    def _drafted(self, request: Request, draft: Proposal) -> _Part:
        """The last token of `draft`."""
        count = len(draft.token_ids)
        slot = self.scratch(request)[count]
        return _Part(request, request.num_tokens + count - 1, [draft.token_ids[-1]], [slot])

    def _pass(self, parts: Sequence[_Part]) -> torch.Tensor:
        """Logits of the last token of each part, [len(parts), V] float32."""
        pool, table = self.runner.kv_pool, self.runner.slot_table
        assert pool is not None and table is not None
        lengths = [len(part.slots) for part in parts]
        return self.runner.forward(
            ForwardBatch(
                mode=ForwardMode.DECODE if max(lengths) == 1 else ForwardMode.DRAFT_EXTEND,
                input_ids=self.tensor([token for part in parts for token in part.token_ids]),
                positions=self.tensor(
                    [p for part in parts for p in range(part.position, part.position + len(part.slots))]
                ),
                out_slots=self.tensor([slot for part in parts for slot in part.slots]),
                query_lens=tuple(lengths),
                context_lens=tuple(part.position + len(part.slots) for part in parts),
                slot_table=table.tensor,
                table_rows=tuple(part.request.table_row for part in parts),
                logits_rows=self.tensor([end - 1 for end in accumulate(lengths)]),
                kv_pool=pool,
            )
        ).logits[:, : self.vocabulary.size]
