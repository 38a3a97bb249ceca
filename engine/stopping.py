"""When a request ends, and which text it may show until then, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from engine.detokenizer import IncrementalDetokenizer, TokenDecoder
from engine.request import FinishReason, Request


class StoppingTokenizer(TokenDecoder, Protocol):
    """A tokenizer that also knows which tokens end a text."""

    @property
    def eos_token_ids(self) -> frozenset[int]: ...


class Step(msgspec.Struct, frozen=True):
    """What one token did. `stop_reason` is the stop string or stop token that ended it all; None for EOS.
    `is_hidden`: the token ended it and is not part of the text."""

    text: str
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    is_hidden: bool = False


class StopChecker:
    """Follows one request. Every token that is pushed counts as a completion token, the one that ends it
    included: a stop token, or the token whose text completes a stop string. Nothing may be pushed after it.

    - An EOS (unless `ignore_eos`) or one of `stop_token_ids` ends the request with "stop". Its own text is
      shown only with `include_stop_str_in_output`.
    - So does a stop string. The one that is complete first counts; of several completed by the same
      character, the longest. What follows it is dropped, and so is the stop string itself unless
      `include_stop_str_in_output`. Text that may still become one is held back until that is decided.
    - Neither applies to the first `min_tokens` tokens: a stop string must lie in the text after them.
    - `max_tokens`, or a full context, ends it with "length" unless it stops there anyway. Held text is shown.
    """

    def __init__(self, tokenizer: StoppingTokenizer, request: Request, max_context_len: int) -> None:
        params = request.sampling
        self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens, request.prompt_ids)
        self._eos = frozenset() if params.ignore_eos else tokenizer.eos_token_ids
        self._stop_tokens = frozenset(params.stop_token_ids)
        self._stops = params.stop
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._max_tokens = min(params.max_tokens, max_context_len - len(request.prompt_ids))
        self._num_tokens = 0
        self._held = ""  # the end of the text so far, as far as it is the beginning of a stop string

    def push(self, token_id: int) -> Step:
        """Take in the next output token."""
        self._num_tokens += 1
        may_stop = self._num_tokens > self._min_tokens
        is_eos = may_stop and token_id in self._eos
        is_stop = is_eos or (may_stop and token_id in self._stop_tokens)
        ends = is_stop or self._num_tokens >= self._max_tokens

        text = "" if is_stop and not self._include_stop else self._detokenizer.push(token_id)
        if ends:
            text += self._detokenizer.flush()
        if may_stop and self._stops:
            text = self._held + text
            if found := _first_stop(text, self._stops):
                start, end = found
                return Step(text[: end if self._include_stop else start], "stop", text[start:end])
            self._held = "" if ends else _tail_to_hold(text, self._stops)
            text = text[: len(text) - len(self._held)]
        if is_stop:
            return Step(text, "stop", None if is_eos else token_id, is_hidden=not self._include_stop)
        return Step(text, "length" if ends else None)


def _first_stop(text: str, stops: Sequence[str]) -> tuple[int, int] | None:
    """Start and end of the stop string that is complete first in `text`; the longest of several."""
    found = [(start + len(stop), start) for stop in stops if (start := text.find(stop)) >= 0]
    if not found:
        return None
    end, start = min(found)
    return start, end


def _tail_to_hold(text: str, stops: Sequence[str]) -> str:
    """The longest end of `text` that one of `stops` begins with."""
    longest = min(len(text), max(map(len, stops)) - 1)
    for size in range(longest, 0, -1):
        tail = text[-size:]
        if any(stop.startswith(tail) for stop in stops):
            return tail
    return ""
