"""Log-probabilities in the two shapes of the OpenAI API."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from app.answers import ChatLogprob, ChatLogprobs, ChosenLogprob, CompletionLogprobs
from app.deps import TokenizerPort
from engine.detokenizer import IncrementalDetokenizer
from engine.request import OutputEvent, TokenLogprob

_FLOOR = -9999.0  # JSON has no -inf


def num_logprobs(outputs: Iterable[OutputEvent]) -> int:
    """How many log-probabilities there are to write, alternatives included."""
    entries = (entry for output in outputs for entry in (*(output.prompt_logprobs or ()), *output.logprobs))
    return sum(1 + len(entry.top) for entry in entries if entry is not None)


def chat_logprobs(tokenizer: TokenizerPort, logprobs: Iterable[TokenLogprob]) -> ChatLogprobs:
    """Tokens that are not whole characters show U+FFFD as text; `bytes` are always exact."""

    def chosen(token_id: int, logprob: float) -> ChosenLogprob:
        raw = tokenizer.token_bytes(token_id)
        return ChosenLogprob(raw.decode("utf-8", "replace"), max(logprob, _FLOOR), list(raw))

    content = []
    for entry in logprobs:
        own = chosen(entry.token_id, entry.logprob)
        tops = [chosen(token_id, logprob) for token_id, logprob in entry.top]
        content.append(ChatLogprob(own.token, own.logprob, own.bytes, tops))
    return ChatLogprobs(content)


class CompletionLogprobWriter:
    """Log-probabilities of one choice's text, piece by piece, with each token's offset in that text.

    A token that is not whole characters is named `bytes:\\xNN...`, so that two of them stay apart in
    `top_logprobs`; the characters that it is part of count where they are completed. One that the text does not show
    takes no place in it.
    """

    def __init__(
        self, tokenizer: TokenizerPort, skip_special_tokens: bool, prompt_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._output = IncrementalDetokenizer(tokenizer, skip_special_tokens, prompt_ids)
        self._offset = 0

    def write_prompt(
        self, tokens: Iterable[tuple[int, TokenLogprob | None]], text: str
    ) -> CompletionLogprobs:
        """The tokens of a prompt that is echoed as `text`: before it, the tokenizer may have put a BOS, or a space."""
        prompt = IncrementalDetokenizer(self._tokenizer, skip_special_tokens=False)
        lists = self._write(tokens, prompt)
        before = max(0, self._offset + len(prompt.flush()) - len(text))
        lists.text_offset = [max(0, offset - before) for offset in lists.text_offset]
        self._offset = len(text)
        return lists

    def write(self, tokens: Iterable[tuple[int, TokenLogprob]]) -> CompletionLogprobs:
        """The tokens of the output that come next."""
        return self._write(tokens, self._output)

    def _write(
        self, tokens: Iterable[tuple[int, TokenLogprob | None]], shown: IncrementalDetokenizer
    ) -> CompletionLogprobs:
        lists = CompletionLogprobs([], [], [], [])
        for token_id, entry in tokens:
            name = _token_name(self._tokenizer, token_id)
            lists.tokens.append(name)
            lists.text_offset.append(self._offset)
            self._offset += len(shown.push(token_id))
            if entry is None:
                lists.token_logprobs.append(None)
                lists.top_logprobs.append(None)
                continue
            lists.token_logprobs.append(max(entry.logprob, _FLOOR))
            tops = [(token_id, entry.logprob), *entry.top]
            lists.top_logprobs.append(
                {_token_name(self._tokenizer, other): max(value, _FLOOR) for other, value in tops}
            )
        return lists


def join_logprobs(parts: Iterable[CompletionLogprobs]) -> CompletionLogprobs:
    """The lists of `parts`, one after another."""
    whole = CompletionLogprobs([], [], [], [])
    for part in parts:
        whole.tokens += part.tokens
        whole.token_logprobs += part.token_logprobs
        whole.top_logprobs += part.top_logprobs
        whole.text_offset += part.text_offset
    return whole


def _token_name(tokenizer: TokenizerPort, token_id: int) -> str:
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
