"""Drafting with EAGLE-3 and MTP heads: chains that start from what the target computed for the text.

An entry of theirs is made of a token and the features of the position before it, and lies in the token's slot: what
the radix tree shares under a slot is a text up to its token, and that is all an entry depends on. The last token of a
text has no slot yet. Its row begins the chain, in scratch slots, and is written again once the target has computed it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from backends.forward import ForwardBatch, ForwardMode
from engine.request import Request
from models.chain import FEATURES, ChainDrafter
from speculative.chain import chain_room, draft_chains, last_tokens
from speculative.features import FeatureDrafter, Span
from speculative.proposal import DraftVocabulary, MakeSamplingRow, Proposal


class FeatureChain(FeatureDrafter):
    """Drafts a token a pass, each from the one before it and from what the drafter had to say there."""

    _limit = 0

    def prepare(self) -> None:
        super().prepare()
        model, table = self._model, self.runner.slot_table
        assert table is not None
        self.capture_layers = model.target_layer_ids
        if model.draft_token_ids is not None:
            self.vocabulary = DraftVocabulary(self.vocabulary.size, model.draft_token_ids.cpu().numpy())
        self._limit = min(self.runner.context_len, table.tensor.shape[1])
        # Of each followed request, the features of the last position that the target has computed.
        self._last: dict[Request, tuple[int, torch.Tensor]] = {}
        width = model.config.hidden_size
        self._unknown = -2, torch.zeros(width, dtype=model.dtype, device=self.runner.device)

    @property
    def _model(self) -> ChainDrafter:
        model = self.runner.model
        assert isinstance(model, ChainDrafter)
        return model

    def room(self, request: Request) -> int:
        return chain_room(request, self.num_draft_tokens, self._limit)

    def fits(self, num_tokens: int) -> bool:
        return num_tokens <= self._limit

    def num_known(self, slots: Sequence[int]) -> int:
        """The last token is computed again at least: the next entry takes its features."""
        return self.num_filled(slots[1:])  # the first token has no entry

    def write(self, spans: Sequence[Span], captured: torch.Tensor) -> None:
        pool = self.runner.kv_pool
        assert pool is not None
        fused = self._model.fuse(captured)
        entries, rows = (
            [],
            [],
        )  # which of `known` is the features of the position before each token of the entries
        known = [fused]
        last: dict[
            Request, tuple[int, int]
        ] = {}  # the last position of which something is known, and its row
        row = 0
        for request, start, end in spans:
            if request not in last:
                position, features = self._last.get(request, self._unknown)
                last[request] = position, len(fused) + len(known) - 1
                known.append(features.unsqueeze(0))
            position, before = last[request]
            length = end - start
            if position == start - 1:
                rows.append(before)
            rows += range(row, row + length - 1)
            entries.append(Span(request, start + (position != start - 1), end))
            last[request] = end - 1, row + length - 1
            row += length
        features = torch.cat(known)
        if rows:
            self._model.write_context(
                self.tensor(
                    [token for span in entries for token in span.request.token_ids(span.start, span.end)]
                ),
                features.index_select(0, self.tensor(rows)),
                self.tensor([position - 1 for span in entries for position in range(span.start, span.end)]),
                self.tensor([slot for span in entries for slot in span.request.slots[span.start : span.end]]),
                pool,
            )
        self.wrote(entries)
        kept = features.index_select(0, self.tensor([row for _, row in last.values()]))
        for (request, (position, _)), own in zip(last.items(), kept, strict=True):
            self._last[request] = position, own

    @torch.inference_mode()
    def propose(
        self, requests: Sequence[Request], limits: Sequence[int], sampling_row: MakeSamplingRow
    ) -> list[Proposal]:
        self.catch_up(requests)
        features = torch.stack([self._features_before(request) for request in requests])
        rows = list(range(len(requests)))  # whose features they are

        def next_logits(active: Sequence[int], drafted: Sequence[Proposal]) -> torch.Tensor:
            nonlocal features, rows
            if len(active) < len(rows):
                features = features.index_select(0, self.tensor([rows.index(i) for i in active]))
                rows = list(active)
            batch = self._batch([requests[i] for i in active], drafted, features)
            result = self.runner.forward(batch)
            features = result.captured[FEATURES]
            return result.logits

        return draft_chains(next_logits, requests, limits, self.vocabulary, sampling_row)

    def forget(self, request: Request) -> None:
        super().forget(request)
        self._last.pop(request, None)

    def _features_before(self, request: Request) -> torch.Tensor:
        """[hidden_size] of the position before the last token; zeros where the target's were not captured."""
        position, features = self._last.get(request, self._unknown)
        return features if position == request.num_tokens - 2 else self._unknown[1]

    def _batch(
        self, requests: Sequence[Request], drafted: Sequence[Proposal], features: torch.Tensor
    ) -> ForwardBatch:
        """A row for the last token of each request with what was drafted for it, as much for all."""
        pool, table = self.runner.kv_pool, self.runner.slot_table
        assert pool is not None and table is not None
        length = len(drafted[0].token_ids)
        return ForwardBatch(
            mode=ForwardMode.DECODE,
            input_ids=self.tensor(last_tokens(requests, drafted)),
            positions=self.tensor([request.num_tokens - 2 + length for request in requests]),
            out_slots=self.tensor([self.scratch(request)[length] for request in requests]),
            query_lens=(1,) * len(requests),
            context_lens=tuple(self.counts[request] + 1 + length for request in requests),
            slot_table=table.tensor,
            table_rows=tuple(request.table_row for request in requests),
            logits_rows=torch.arange(len(requests), device=self.runner.device),
            kv_pool=pool,
            features=features,
        )


class Eagle3(FeatureChain):
    """By a drafter with a checkpoint of its own."""

    name = "eagle3"


class MTP(FeatureChain):
    """By the head in the target's checkpoint."""

    name = "mtp"
