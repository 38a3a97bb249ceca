"""Prompts as token ids, checked against the vocabulary and the context; long ones are encoded off the event loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from anyio import to_thread

from app.deps import TokenizerPort
from app.errors import ApiError, bad_request

_OFF_LOOP_SIZE = 16_384  # below this a thread costs more than the work

T = TypeVar("T")


async def off_loop(work: Callable[[], T], size: float) -> T:
    """`work()`, on a thread where it goes through so much (characters, bytes or tokens) that the loop would stall."""
    return await to_thread.run_sync(work) if size > _OFF_LOOP_SIZE else work()


async def encode_prompts(
    tokenizer: TokenizerPort, prompts: Sequence[str] | Sequence[list[int]], add_special_tokens: bool
) -> list[list[int]]:
    """Token ids of each prompt. Raises ApiError 400 for ids outside the vocabulary and prompts without tokens."""

    def encode() -> list[list[int]]:
        encoded = [tokenizer.encode(p, add_special_tokens) if isinstance(p, str) else p for p in prompts]
        for ids in encoded:
            if not ids:
                raise bad_request("a prompt has no tokens", "prompt")
            check_vocabulary(tokenizer, ids, "prompt")
        return encoded

    return await off_loop(encode, sum(map(len, prompts)))


def check_vocabulary(tokenizer: TokenizerPort, ids: Sequence[int], param: str) -> None:
    """Raises ApiError 400 where a token id does not exist."""
    if ids and max(ids) >= tokenizer.vocab_size:
        raise bad_request(f"token id {max(ids)} is not in the vocabulary of {tokenizer.vocab_size}", param)


def resolve_max_tokens(
    asked: int | None, default: int | None, prompt_len: int, context_len: int, params: tuple[str, str]
) -> int:
    """How many tokens to generate; `default` None is all that the context has room for.

    `params` name the fields of the prompt and of `asked`. Raises ApiError 400 `context_length_exceeded`.
    """
    room = context_len - prompt_len
    if room < (asked != 0):
        raise _too_long(f"the prompt has {prompt_len} tokens and leaves no room", context_len, params[0])
    if asked is None:
        return room if default is None else min(default, room)
    if asked > room:
        detail = f"the prompt has {prompt_len} tokens and {params[1]} asks for {asked} more"
        raise _too_long(detail, context_len, params[1])
    return asked


def _too_long(detail: str, context_len: int, param: str) -> ApiError:
    message = f"This model's maximum context length is {context_len} tokens, but {detail}."
    return bad_request(message, param, "context_length_exceeded")
