"""Token ids to text, one at a time, in the order they are generated."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol


class TokenDecoder(Protocol):
    """The side of a tokenizer that turns ids into text."""

    @property
    def special_token_ids(self) -> frozenset[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class IncrementalDetokenizer:
    """Text of a growing sequence: the pieces, joined, are what `decode` of it has behind the text of its prompt.

    Text comes out as soon as no later token can change it, so a character whose bytes are spread over several
    tokens comes with the last of them. Bytes that have turned out not to be UTF-8 come out as U+FFFD. (Some
    decoders give up a whole run of byte tokens for one bad byte; here the good characters of a run are kept.)
    The cost of a token does not depend on how many came before.
    """

    def __init__(
        self, tokenizer: TokenDecoder, skip_special_tokens: bool, prompt_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = all(token_id in self._hidden for token_id in prompt_ids)

    def push(self, token_id: int) -> str:
        """The text that is settled now and was not before. It may be empty."""
        if token_id in self._hidden:
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if self._at_start and data:
            self._at_start = False
            data = self._strip_leading_space(token_id, data)
        return self._utf8.decode(data)

    def flush(self) -> str:
        """The rest, when no token follows: U+FFFD for a character that was never completed, or nothing."""
        return self._utf8.decode(b"", final=True)

    def _strip_leading_space(self, token_id: int, data: bytes) -> bytes:
        """SentencePiece puts a space before the first word of a text, which is not part of it."""
        if not data.startswith(b" "):
            return data
        shown = self._tokenizer.decode([token_id], skip_special_tokens=False)
        rest = data[1:]
        return rest if shown == rest.decode("utf-8", "replace") else data
