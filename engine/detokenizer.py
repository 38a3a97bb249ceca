"""Token ids to text, one at a time, in the order they are generated."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol


class TokenDecoder(Protocol):
    """The side of a tokenizer that turns ids into text."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class IncrementalDetokenizer:
    """Text of a growing sequence: the pieces, joined, are `decode` of all its ids.

    Text comes out as soon as no later token can change it, so a character whose bytes are spread over several
    tokens comes with the last of them. Bytes that have turned out not to be UTF-8 come out as U+FFFD. (Some
    decoders give up a whole run of byte tokens for one bad byte; here the good characters of a run are kept.)
    The cost of a token does not depend on how many came before.
    """

    def __init__(self, tokenizer: TokenDecoder, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = True

    def push(self, token_id: int) -> str:
        """The text that is settled now and was not before. It may be empty."""
        if self._skip_special and self._is_special(token_id):
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if self._at_start and data:
            self._at_start = False
            data = self._strip_leading_space(token_id, data)
        return self._utf8.decode(data)

    def flush(self) -> str:
        """The rest, when no token follows: U+FFFD for a character that was never completed, or nothing."""
        return self._utf8.decode(b"", final=True)

    def _is_special(self, token_id: int) -> bool:
        decode = self._tokenizer.decode
        return not decode([token_id], skip_special_tokens=True) and bool(
            decode([token_id], skip_special_tokens=False)
        )

    def _strip_leading_space(self, token_id: int, data: bytes) -> bytes:
        """SentencePiece puts a space before the first word, which is not part of the text."""
        if not data.startswith(b" "):
            return data
        shown = self._tokenizer.decode([token_id], skip_special_tokens=self._skip_special)
        rest = data[1:]
        return rest if shown == rest.decode("utf-8", "replace") else data
