"""Prompts from JSON lines, and the options that say which of them a script runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from cyclopts import Parameter
from cyclopts.validators import Number

DEFAULT_FILE = Path(__file__).with_name("prompts.jsonl")

ItemT = TypeVar("ItemT")


class Prompt(msgspec.Struct, frozen=True):
    """`turns` are what the user says, in order; an answer comes after each."""

    id: str
    category: str
    turns: tuple[str, ...]


class _Line(msgspec.Struct):
    """A line of the file: `turns`, or one `prompt`."""

    id: int | str | None = None
    category: str = "all"
    turns: tuple[str, ...] = ()
    prompt: str | None = None


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """Which prompts a script runs, and how it answers."""

    prompts: Annotated[
        Path, Parameter(help='JSON lines: {"id", "category", "turns": [...]} or {"prompt"}.')
    ] = DEFAULT_FILE
    limit: Annotated[
        int | None,
        Parameter(validator=Number(gte=1), help="Run only so many prompts, spread evenly over the file."),
    ] = None
    json: Annotated[bool, Parameter(help="End with one line of JSON on stdout.")] = False

    def read(self) -> list[Prompt]:
        """Raises ValueError for a file that cannot be used."""
        return spread(read_prompts(self.prompts), self.limit)


def read_prompts(path: Path) -> list[Prompt]:
    """All prompts of a file. Raises ValueError that names the file, and the line where one is at fault."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    prompts = [_parse(line, f"{path}:{n}", n) for n, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ValueError(f"{path}: holds no prompts")
    return prompts


def spread(items: Sequence[ItemT], limit: int | None) -> list[ItemT]:
    """`limit` of the items (None: all), in order and evenly spaced: files are often sorted by category."""
    count = min(len(items), limit or len(items))
    return [items[i * len(items) // count] for i in range(count)]


def _parse(text: str, where: str, number: int) -> Prompt:
    try:
        line = msgspec.json.decode(text, type=_Line)
    except msgspec.DecodeError as error:
        raise ValueError(f"{where}: {error}") from error
    turns = line.turns if line.prompt is None else (line.prompt,)
    if not turns:
        raise ValueError(f"{where}: needs `turns` or `prompt`")
    return Prompt(str(number if line.id is None else line.id), line.category, turns)
