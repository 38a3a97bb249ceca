"""Training text in the target's own words: conversations that it makes up, its answers to prompts, passages it ends.

Each text is a generator that asks for completions and ends with a record, a line of a data file; many of them run at
once through one engine, so that its steps are wide.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import count, repeat
from math import ceil
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import msgspec

from engine.errors import InvalidRequest
from engine.request import OutputEvent, Request, SamplingParams
from engine.tokenizer import Tokenizer
from speculative.training.data import DataError, records
from speculative.training.topics import OPENINGS, TOPICS

logger = logging.getLogger(__name__)

Messages = list[dict[str, str]]


class _Message(msgspec.Struct):
    role: str
    content: str


class _PromptLine(msgspec.Struct):
    """What a line of a prompt file may have; other fields do not matter."""

    messages: list[_Message] | None = None
    turns: list[str] | None = None
    prompt: str | None = None


SELF = "self"
_MARK = "the user's words"
_USER_TOKENS = 160
_GREEDY_SHARE = 0.7  # of answers; the others are sampled at a temperature that people use
_TEMPERATURE = 0.8
_SECOND_TURN_SHARE = 0.3
_PASSAGE_WORDS = 40


class Ask(NamedTuple):
    """A completion that a conversation waits for."""

    prompt_ids: list[int]
    sampling: SamplingParams


class Completion(NamedTuple):
    """What came of it. `finished`: it ended by itself."""

    token_ids: list[int]
    text: str
    finished: bool


Record = dict[str, Any]
Writing = Generator[Ask, Completion, Record]


def made_up(tokenizer: Tokenizer, choice: random.Random, max_tokens: int) -> Writing:
    """The target plays the user too: it goes on from an opening, behind the template's user prefix."""
    messages: Messages = []
    answers = Answers(tokenizer, choice, max_tokens)
    for turn in range(2):
        if turn and choice.random() > _SECOND_TURN_SHARE:
            break
        opening = choice.choice(OPENINGS).format(topic=choice.choice(TOPICS)) if not turn else ""
        rendered = tokenizer.apply_chat_template([*messages, {"role": "user", "content": _MARK}])
        prompt = rendered.partition(_MARK)[0] + opening
        sampling = SamplingParams(
            max_tokens=_USER_TOKENS, temperature=1.0, top_p=0.95, seed=choice.getrandbits(62)
        )
        completion = yield Ask(tokenizer.encode(prompt, add_special_tokens=False), sampling)
        text = (opening + completion.text).strip()
        if not text:
            break
        messages.append({"role": "user", "content": text})
        yield from answers.add(messages)
    return answers.record(messages)


def answered(
    tokenizer: Tokenizer, given: Sequence[dict[str, str]], choice: random.Random, max_tokens: int
) -> Writing:
    """A given conversation, with every answer written anew by the target."""
    messages: Messages = []
    answers = Answers(tokenizer, choice, max_tokens)
    for message in given:
        if message["role"] == "assistant":
            continue
        messages.append({"role": message["role"], "content": message["content"]})
        if message["role"] == "user":
            yield from answers.add(messages)
    return answers.record(messages)


def continued(tokenizer: Tokenizer, text: str, choice: random.Random, max_tokens: int) -> Writing:
    """The beginning of a passage, and how the target goes on, without any template."""
    prompt_ids = tokenizer.encode(text)
    completion = yield Ask(prompt_ids, sampling_of(choice, max_tokens))
    ids = prompt_ids + completion.token_ids
    return {"text": text, "token_ids": ids, "answers": [[len(prompt_ids), len(ids)]]}


class Answers:
    """The answers of one conversation, as token ids."""

    def __init__(self, tokenizer: Tokenizer, choice: random.Random, max_tokens: int) -> None:
        self._tokenizer, self._choice, self._max_tokens = tokenizer, choice, max_tokens
        self._ids: list[int] = []
        self._spans: list[list[int]] = []
        self._finished = True

    def add(self, messages: Messages) -> Generator[Ask, Completion, None]:
        """Have the last message answered, and append the answer."""
        prompt = self._tokenizer.apply_chat_template(messages)
        prompt_ids = self._tokenizer.encode(prompt, add_special_tokens=False)
        completion = yield Ask(prompt_ids, sampling_of(self._choice, self._max_tokens))
        if prompt_ids[: len(self._ids)] != self._ids:  # the text of earlier answers has other tokens now
            self._spans = []
        self._ids = prompt_ids + completion.token_ids
        self._spans.append([len(prompt_ids), len(self._ids)])
        self._finished = completion.finished
        messages.append({"role": "assistant", "content": completion.text})

    def record(self, messages: Messages) -> dict[str, Any]:
        """A line of a data file."""
        return {
            "messages": messages,
            "finished": self._finished,
            "token_ids": self._ids,
            "answers": self._spans,
        }


def sampling_of(choice: random.Random, max_tokens: int) -> SamplingParams:
    """How an answer is drawn: mostly greedy."""
    temperature = 0.0 if choice.random() < _GREEDY_SHARE else _TEMPERATURE
    return SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=choice.getrandbits(62))


def write_out(
    writings: Iterable[tuple[str, Writing]],
    submit: Callable[[Request], None],
    concurrency: Callable[[], int],
) -> Iterator[Record]:
    """Run `writings`, named, `concurrency` at a time; their records, with an `id`, in the order of completion.

    `concurrency` is asked before each one begins; at 0 those that run are the last. Those that do not fit in the
    context, and those without an answer, are left out. Raises RuntimeError where the engine ends a request with an
    error.
    """
    done: SimpleQueue[tuple[str, Writing, Completion | str]] = SimpleQueue()
    numbers, waiting, running = count(), iter(writings), 0

    def ask(name: str, writing: Writing, completion: Completion | None) -> Record | bool:
        """Let `writing` go on: its record if it has ended, else whether it waits for an answer now."""
        try:
            wanted = writing.send(completion)  # type: ignore[arg-type]
            submit(_request(f"training-{next(numbers)}", wanted, lambda end: done.put((name, writing, end))))
        except StopIteration as end:
            return {"id": name, **end.value}
        except InvalidRequest as error:
            logger.warning("%s is left out: %s", name, error)
            return False
        return True

    while True:
        while running < concurrency() and (found := next(waiting, None)) is not None:
            running += ask(*found, None) is True
        if not running:
            return
        name, writing, completion = done.get()
        if isinstance(completion, str):
            raise RuntimeError(f"the engine failed: {completion}")
        result = ask(name, writing, completion)
        running -= result is not True
        if isinstance(result, dict) and result["answers"]:
            yield result


class Quota:
    """How many tokens are still to be made up, and how many texts at once they call for."""

    def __init__(self, tokens: int, answer_tokens: int, most: int) -> None:
        """`answer_tokens`: what a text is taken to be worth before one is there. `most`: texts at once."""
        self._wanted, self._most = tokens, most
        self._guessed = answer_tokens
        self._texts = self.written = 0

    def add(self, tokens: int) -> None:
        """One more text is complete."""
        self._texts += 1
        self.written += tokens

    def texts(self) -> int:
        """Texts that may be under way now. What they cost on average is told by those so far, and by the guess as
        by one of them, since the first ones that are complete are the short ones."""
        missing = max(0, self._wanted - self.written)
        cost = (self._guessed + self.written) / (1 + self._texts)
        return min(self._most, ceil(missing / cost))


def _request(request_id: str, ask: Ask, tell: Callable[[Completion | str], None]) -> Request:
    """The request for `ask`; `tell` gets what came of it, or why nothing did."""
    events: list[OutputEvent] = []

    def sink(event: OutputEvent) -> None:
        events.append(event)
        if event.finish_reason in ("error", "abort"):
            tell(event.error or event.finish_reason)
        elif event.finish_reason is not None:
            token_ids = [token for part in events for token in part.token_ids]
            tell(Completion(token_ids, "".join(part.text for part in events), event.finish_reason == "stop"))

    return Request(request_id, ask.prompt_ids, ask.sampling, sink)


def writings(source: str, tokenizer: Tokenizer, seed: int, max_tokens: int) -> Iterator[tuple[str, Writing]]:
    """Texts of a source, named `source-number`: `self` without end, or those of a file.

    A .jsonl file has prompts or conversations; any other is text, whose paragraphs' beginnings are continued.
    """
    name = Path(source).name
    for number, given in enumerate(_given(source)):
        choice = random.Random(f"{seed} {name} {number}")
        if given is None:
            writing = made_up(tokenizer, choice, max_tokens)
        elif isinstance(given, str):
            writing = continued(tokenizer, given, choice, max_tokens)
        else:
            writing = answered(tokenizer, given, choice, max_tokens)
        yield f"{name}-{number}", writing


def _given(source: str) -> Iterator[Messages | str | None]:
    if source == SELF:
        yield from repeat(None)
    elif source.endswith(".jsonl"):
        yield from _prompts(Path(source))
    else:
        try:
            text = Path(source).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{source}: not UTF-8 ({error.reason})") from error
        for paragraph in text.split("\n\n"):
            words = paragraph.split()
            if len(words) >= 2 * _PASSAGE_WORDS:
                yield " ".join(words[:_PASSAGE_WORDS])


def _prompts(path: Path) -> Iterator[Messages]:
    """Conversations of a JSONL file: `messages`, a `prompt`, or the `turns` of a user."""
    for where, record in records(path):
        try:
            line = msgspec.convert(record, _PromptLine)
        except msgspec.ValidationError as error:
            raise DataError(f"{where}: {error}") from error
        turns = line.turns or ([] if line.prompt is None else [line.prompt])
        messages = line.messages or [_Message(role="user", content=turn) for turn in turns]
        if not messages:
            raise DataError(f"{where}: neither `messages` nor `turns` nor a `prompt`")
        yield [msgspec.to_builtins(message) for message in messages]
