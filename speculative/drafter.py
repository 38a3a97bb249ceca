"""What the drafting worker asks of a model that drafts, and what all such models keep: which KV slots they filled."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from engine.request import Request, SamplingParams
from engine.runner import ModelRunner
from engine.sampler import SamplingRow
from engine.worker import SequenceStep
from speculative.proposal import DraftVocabulary, MakeSamplingRow, Proposal


class Drafter(ABC):
    """A drafting model over the target's slots: a token's keys and values lie at the same slot in both pools.

    The target fills slots that the drafter does not (those of requests that opted out, or of a tree that is older
    than the drafter's interest), so each slot has a bit that says whether the drafter has filled it for the token
    that is in it. What a block needs beside its context goes to scratch slots behind the target's, some for each row
    of the slot table. A request has the same row in both tables.
    """

    name: ClassVar[str]  # of its algorithm
    capture_layers: tuple[
        int, ...
    ] = ()  # of the target, whose outputs the drafter reads; known once it is loaded

    def __init__(self, runner: ModelRunner, num_draft_tokens: int, vocab_size: int) -> None:
        """`num_draft_tokens` counts verified rows, the last token included. `vocab_size` is the target's."""
        self.runner = runner
        self.num_draft_tokens = num_draft_tokens
        self.scratch_size = num_draft_tokens  # slots for what is drafted for a request
        self.vocabulary = DraftVocabulary(vocab_size)
        self._valid = bytearray()  # most steps change one or two of it, for which an array is slow

    @property
    def short_draft(self) -> int:
        """Tokens of a draft that costs less than the longest; as many as that has where none does."""
        return self.num_draft_tokens - 1

    def pass_rows(self, limits: Sequence[int]) -> int:
        """What `propose` with these limits costs goes by this number."""
        return len(limits)

    @property
    def promised_accept_length(self) -> float | None:
        """What the model's card says, if it says so."""
        return None

    def prepare(self) -> None:
        """Start-up, once the runner is up."""
        pool = self.runner.kv_pool
        assert pool is not None
        self._valid = bytearray(pool.num_slots)

    def time_draft(self, limit: int) -> float | None:
        """Seconds that a draft of at most `limit` tokens for one request takes; None where the context has no room for
        one. For start-up, when all slots are free."""
        request = Request("warm-up", [0, 0], SamplingParams(temperature=0.0), sink=lambda event: None)
        request.slots, request.cached_len, request.table_row = [0], 1, 0
        limit = min(limit, self.room(request))
        if limit == 0:
            return None

        def sampling_row(request: Request, vocab_size: int, drafts: tuple[int, ...]) -> SamplingRow:
            return SamplingRow.of(request, (), drafts=drafts)

        start = time.perf_counter()
        self.propose([request], [limit], sampling_row)
        seconds = time.perf_counter() - start
        self.forget(request)
        return seconds

    @abstractmethod
    def room(self, request: Request) -> int:
        """The most tokens that a draft for `request` could have now."""

    def usable_prefix(self, request: Request, slots: Sequence[int]) -> int:
        """How many of `slots`, a cached prefix, the target need not compute again for this drafter."""
        return len(slots)

    def target_wrote(self, steps: Sequence[SequenceStep], captured: Mapping[int, torch.Tensor]) -> None:
        """The target has computed `steps`, T tokens. `captured` are the outputs of `capture_layers`, [T, hidden_size]
        each.

        What the drafter had in their slots belongs to other tokens, but for those of the tree: they are only computed
        again.
        """
        for step in steps:
            request, start = step.request, step.request.cached_len
            end = start + step.num_tokens + len(step.drafts)
            for slot in request.slots[max(start, request.tree_len) : end]:
                self._valid[slot] = False

    def fill(self, slots: Sequence[int]) -> None:
        """The drafter's entries in `slots` are those of the tokens that are there."""
        for slot in slots:
            self._valid[slot] = True

    def filled(self, slots: Sequence[int]) -> list[bool]:
        """For which of `slots` that is so."""
        return [self._valid[slot] == 1 for slot in slots]

    def num_filled(self, slots: Sequence[int]) -> int:
        """For how many of the first of `slots` that is so without a gap."""
        return next((i for i, slot in enumerate(slots) if not self._valid[slot]), len(slots))

    @abstractmethod
    def committed(self, request: Request, num_tokens: int) -> None:
        """Of `request`, the last `num_tokens` that are computed were so in the last pass. They stay."""

    def moved(self, request: Request, old_slots: Sequence[int]) -> None:
        """The tokens of `request` are in other slots than `old_slots` now: the tree had them already."""
        self.forget(request)

    def make_ready(self, requests: Sequence[Request]) -> list[bool]:
        """For which of `requests` a draft takes no longer than any. Some of what stands in the way for the others is
        done now, no more than a pass of it."""
        return [True] * len(requests)

    @abstractmethod
    def propose(
        self, requests: Sequence[Request], limits: Sequence[int], sampling_row: MakeSamplingRow
    ) -> list[Proposal]:
        """Draft at most `limits[i]` tokens to follow the last one of `requests[i]`."""

    @abstractmethod
    def forget(self, request: Request) -> None:
        """`request` gives its slots back, which others may find in the tree or fill anew."""

    def scratch(self, request: Request) -> range:
        """The scratch slots of the request's row."""
        pool, table = self.runner.kv_pool, self.runner.slot_table
        assert pool is not None and table is not None
        rows_from_here = len(table.tensor) - request.table_row
        first = pool.num_slots - rows_from_here * self.scratch_size
        return range(first, first + self.scratch_size)

    def tensor(self, values: Sequence[int]) -> torch.Tensor:
        """[N] int64 on the drafter's device."""
        return torch.tensor(values, dtype=torch.int64, device=self.runner.device)
