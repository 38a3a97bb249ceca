"""How a step is computed: the worker interface.

The scheduler decides who takes part in a step; a worker says what each one emits. Speculative workers (in
`speculative/`) implement the same protocol and are injected in place of the plain one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from engine.request import Request, TokenLogprob


class SequenceStep(msgspec.Struct, frozen=True):
    """One request's part of a step: tokens [request.cached_len, request.cached_len + num_tokens) get KV.

    Their KV slots are `request.slots[cached_len : cached_len + num_tokens + len(drafts)]`, already reserved.
    A prompt chunk that does not reach the end of the known tokens samples nothing (`samples` False). One that
    does, and a decode row (num_tokens == 1), samples the next token. `drafts` follow the last known token and are
    verified in the same pass.
    """

    request: Request
    num_tokens: int
    samples: bool
    drafts: tuple[int, ...] = ()


class StepOutput(msgspec.Struct, frozen=True):
    """What a worker found for one SequenceStep: the verified tokens, longest agreeing prefix plus one.

    Empty where nothing was sampled. `logprobs` is as long as `token_ids` if the request asked for them.
    The engine cuts the list at stops and `max_tokens`; nothing past the cut is emitted, counted or cached.
    `error` ends this request alone.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[
        TokenLogprob, ...
    ] = ()  # for prompt tokens cached_len+1 .. of this chunk, if asked
    error: str | None = None


class GenerationWorker(Protocol):
    """What computes a step: `draft`, then `forward`, on the engine's thread."""

    def max_draft_tokens(self, request: Request) -> int:
        """The most tokens that `draft` may propose for `request` now (0: plain decoding)."""

    def draft(self, requests: Sequence[Request], limits: Sequence[int], rows: int) -> list[tuple[int, ...]]:
        """Propose at most `limits[i]` tokens to follow `requests[i]`'s last one. May be empty.

        `rows` is how many rows the step has without drafts.
        """

    def forward(self, steps: Sequence[SequenceStep]) -> list[StepOutput]:
        """Run the pass and sample or verify. One output a step, in order."""

    def observe(self, request: Request, step: SequenceStep, emitted: int) -> None:
        """Told after the engine cut: `emitted` tokens of this step were kept."""

    def usable_prefix(self, request: Request, slots: Sequence[int]) -> int:
        """How many of `slots`, a cached prefix of `request`, serve it as they are. The rest is computed again, into
        the same slots."""

    def before_release(self, request: Request) -> None:
        """The request is about to give its slots back: it has ended, or is preempted."""

    def gauges(self) -> Mapping[str, float]:
        """What metrics report of this worker, by name. Empty for most."""

    def release(self, request: Request) -> None:
        """The request has ended: drop what is kept for it. One that is preempted keeps it, and comes back."""
