"""Conversations as token ids, with what of them the target wrote, and batches of blocks drawn from them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.tokenizer import Tokenizer

Positions = npt.NDArray[np.integer[Any]]

HELD_OUT_SHARE = 50  # one conversation of so many is for evaluation only


class DataError(ValueError):
    """A file that cannot be trained on. The text names it."""


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One text. `ids` int32 [L]; `ends` int32 [L]: behind the answer that a token is in, 0 outside one."""

    ids: Positions
    ends: Positions

    @property
    def checksum(self) -> int:
        """Of the tokens; never 0."""
        return zlib.crc32(self.ids.tobytes()) | 1 << 32

    @property
    def anchors(self) -> Positions:
        """Positions that the target decoded from: answer tokens with an answer token behind them."""
        positions = np.arange(len(self.ids))
        return np.flatnonzero(self.ends > positions + 1)


def read_examples(paths: Iterable[Path], tokenizer: Tokenizer, max_length: int) -> Iterator[Example]:
    """What lines of JSONL files hold, cut to `max_length` tokens; lines without an answer in that are left out.

    Raises DataError for a line that holds no conversation.
    """
    for path in paths:
        for where, record in records(path):
            try:
                example = _example(record, tokenizer, max_length)
            except (KeyError, TypeError, ValueError) as error:
                raise DataError(f"{where}: not a conversation with answers ({error!r})") from error
            if len(example.anchors):
                yield example


def records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a JSONL file, and where each stands. A last line that is cut short is one that is being written.

    Raises DataError, which names file and line, for what is no object.
    """
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                where = f"{path}, line {number}"
                try:
                    record = json.loads(line)
                except ValueError as error:
                    if not line.endswith("\n"):
                        return
                    raise DataError(f"{where}: not JSON ({error})") from error
                if not isinstance(record, dict):
                    raise DataError(f"{where}: not a JSON object")
                yield where, record
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 ({error.reason})") from error


def _example(record: dict[str, Any], tokenizer: Tokenizer, max_length: int) -> Example:
    """`token_ids` and `answers` (pairs of start and end) where the record has them, else the messages' tokens."""
    if "token_ids" in record:
        ids, answers = record["token_ids"], record["answers"]
    else:
        ids, answers = encode(tokenizer, record["messages"], record.get("finished", True))
    ids = ids[:max_length]
    if strange := [token for token in ids if not 0 <= token < tokenizer.vocab_size]:
        raise ValueError(f"token id {strange[0]} is not in the vocabulary of {tokenizer.vocab_size}")
    ends = np.zeros(len(ids), np.int32)
    for start, end in answers:
        ends[start:end] = min(end, len(ids))
    return Example(np.asarray(ids, np.int32), ends)


def encode(
    tokenizer: Tokenizer, messages: Sequence[dict[str, str]], finished: bool
) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids of a conversation as the server would have them, and where its answers are.

    An answer ends with the token that ended it, unless it is the last one and was not `finished`.
    """
    ids: list[int] = []
    answers: list[tuple[int, int]] = []
    text = ""
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = tokenizer.apply_chat_template(messages[:index])
        shared = prompt.startswith(text)
        ids = [*(ids if shared else ()), *_plain(tokenizer, prompt[len(text) if shared else 0 :])]
        text = prompt + message["content"]
        start = len(ids)
        ids += _plain(tokenizer, message["content"])
        if finished or index + 1 < len(messages):
            whole = tokenizer.apply_chat_template(messages[: index + 1], add_generation_prompt=False)
            ending = _plain(tokenizer, whole[len(text) :])[:1] if whole.startswith(text) else []
            if ending and ending[0] in tokenizer.eos_token_ids:
                ids += ending
                text += tokenizer.decode(ending, skip_special_tokens=False)
        answers = [*(answers if shared else ()), (start, len(ids))]
    return ids, answers


def _plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def held_out(example: Example) -> bool:
    """Whether a conversation is for evaluation. It goes by its content, so that more data changes nothing."""
    return example.checksum % HELD_OUT_SHARE == 0


def frequent_tokens(examples: Iterable[Example], vocab_size: int, size: int) -> Tensor:
    """The `size` tokens that answers have most often, ascending int64."""
    counts = np.zeros(vocab_size, np.int64)
    for example in examples:
        counts += np.bincount(example.ids[example.ends > 0], minlength=vocab_size)
    # Tokens that never occur are in order of their ids: in a BPE vocabulary, by frequency.
    best = np.argsort(-counts, kind="stable")[:size]
    return torch.from_numpy(np.sort(best))


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Blocks of G sequences: `members` are indexes into the data; anchors [G, A]; tokens [G, A, B] holds what the
    target wrote from the anchor on, -1 behind the end of the answer."""

    members: list[int]
    anchors: Tensor
    tokens: Tensor


def blocks_at(
    examples: Sequence[Example], members: list[int], anchors: Sequence[Positions], block_size: int
) -> Blocks:
    """Blocks of `examples[members[i]]` at `anchors[i]`, which are equally many for each."""
    rows = []
    for member, starts in zip(members, anchors, strict=True):
        example = examples[member]
        positions = starts[:, None] + np.arange(block_size)
        inside = positions < example.ends[starts][:, None]
        rows.append(np.where(inside, example.ids[np.minimum(positions, len(example.ids) - 1)], -1))
    return Blocks(
        members,
        torch.from_numpy(np.stack(anchors).astype(np.int64)),
        torch.from_numpy(np.stack(rows).astype(np.int64)),
    )


class Sampler:
    """Random blocks, a pure function of (seed, epoch, batch): a resumed run goes on as if nothing had happened."""

    def __init__(self, examples: Sequence[Example], members: Sequence[int], group: int, seed: int) -> None:
        """Batches are of `group` of the `examples` with the indexes `members`."""
        self._examples, self._group, self._seed = examples, group, seed
        self._members = np.asarray(members)
        self._lengths = np.array([len(examples[member].ids) for member in members])

    @property
    def batches(self) -> int:
        """Batches an epoch."""
        return -(-len(self._members) // self._group)

    def batch(self, epoch: int, index: int, block_size: int, anchors: int) -> Blocks:
        """Batch `index` of `epoch`, `anchors` blocks of each of its sequences, which are of like length."""
        members = self._members_of(epoch, index)
        random = np.random.default_rng((self._seed, epoch, index))
        starts = [_draw(random, self._examples[member].anchors, anchors) for member in members]
        return blocks_at(self._examples, members, starts, block_size)

    def _members_of(self, epoch: int, index: int) -> list[int]:
        """Sorted by length, roughly and each time otherwise, then cut; the pieces come in random order."""
        random = np.random.default_rng((self._seed, epoch))
        order = np.argsort(self._lengths * random.uniform(0.8, 1.25, len(self._lengths)))
        piece = np.array_split(order, self.batches)[random.permutation(self.batches)[index]]
        return self._members[piece].tolist()


def _draw(random: np.random.Generator, choices: Positions, count: int) -> Positions:
    return random.choice(choices, count, replace=len(choices) < count)
