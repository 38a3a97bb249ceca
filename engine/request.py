"""A request as the engine sees it: sampling parameters, state, and what it sends back."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from engine.radix_cache import Node

FinishReason = Literal["stop", "length", "abort", "error"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen and when to stop. Ranges are checked where a request enters.

    `seed` None draws one at admission. `top_k` 0 or less and `top_p` 1 filter nothing.
    `logprobs` is how many alternatives are reported for each token; None reports none, 0 the chosen one only.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = {}
    seed: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def filters_tokens(self) -> bool:
        """Whether less than the whole vocabulary may be drawn from."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


class SpeculationParams(msgspec.Struct, frozen=True, kw_only=True):
    """A request's own wishes. None leaves the server's setting.

    `num_draft_tokens` counts verified rows, the last token included, as the server's flag does.
    """

    algorithm: str | None = None
    num_draft_tokens: int | None = None


class TokenLogprob(msgspec.Struct, frozen=True):
    """Raw log-probability (before bias, penalties, temperature, filters) of one emitted or prompt token."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first


@dataclass(slots=True)
class SpeculationStats:
    """Counters of the design: drafts exclude the last-token row, accepted excludes the bonus token."""

    drafted_tokens: int = 0
    accepted_tokens: int = 0
    verify_steps: int = 0
    verify_emitted_tokens: int = 0  # tokens emitted in verify steps: accept length = this / verify_steps


class RequestState(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class OutputEvent(msgspec.Struct, frozen=True):
    """What one step adds to a request. The last event of a request has `finish_reason` set.

    `text` never holds half a character or a tail that may still become a stop string.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token that ended it
    error: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # on the first event, when asked for
    speculation: SpeculationStats | None = None  # on the last event


EventSink = Callable[[OutputEvent], None]


@dataclass(eq=False, slots=True)
class Request:
    """One sequence to generate. Only the engine thread changes it after `submit`.

    `choice` is its index among the `n` of an API request; with `seed` and the absolute position it keys the
    sampling noise.
    `cached_len`: tokens whose KV is in slots and committed; `slots` may be longer (reserved for this step).
    `tree_len`: leading slots that belong to the radix tree, up to the locked `node`; the rest are its own. More than
    `cached_len` while a part of a cached prefix is computed again.
    `checkpoints`: rows of recurrent state by position, not yet the tree's; those up to `cached_len` are written.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    sink: EventSink
    choice: int = 0
    speculation: SpeculationParams = SpeculationParams()

    seed: int = 0
    state: RequestState = RequestState.WAITING
    output_ids: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    cached_len: int = 0
    prefix_hit_tokens: int | None = None  # served from the radix cache at first admission
    admitted_at: float | None = None  # `time.monotonic()` of the first admission
    tree_len: int = 0
    checkpoints: dict[int, int] = field(default_factory=dict)
    node: Node | None = None
    table_row: int = -1  # meaningful while running
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether every row of the prompt needs logits. Recomputed after preemption, it has been answered."""
        return self.sampling.prompt_logprobs is not None and not self.output_ids

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def pending(self) -> int:
        """Known tokens without KV. 1 means decoding: the last token goes through the model next."""
        return self.num_tokens - self.cached_len

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Tokens at absolute positions [start, stop) of prompt and output."""
        split = len(self.prompt_ids)
        if stop <= split:
            return self.prompt_ids[start:stop]
        if start >= split:
            return self.output_ids[start - split : stop - split]
        return self.prompt_ids[start:] + self.output_ids[: stop - split]
