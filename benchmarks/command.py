"""A script's function as a command, and the tables that it prints."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from cyclopts import App, CycloptsError, Parameter

from app.cli import converted

USAGE_ERROR = 2


def run(
    command: Callable[..., int],
    argv: Sequence[str] | None = None,
    config: Callable[..., None] | None = None,
) -> int:
    """Call `command` with flags from `argv` (default: this process's own), and give back its exit code.

    `config` fills in what the flags leave open. A ValueError, from either, is told in one line and gives 2.
    """
    app = App(
        name=f"benchmarks/{command.__name__}.py",
        help=command.__doc__,
        default_parameter=Parameter(negative=(), converter=converted),
        config=config,
        version_flags=(),
    )
    app.default(command)
    try:
        function, bound, _ = app.parse_args(
            sys.argv[1:] if argv is None else argv, exit_on_error=False, print_error=False
        )
        return function(*bound.args, **bound.kwargs) or 0
    except (CycloptsError, ValueError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return USAGE_ERROR


def print_row(cells: Sequence[Any], widths: Sequence[int]) -> None:
    """One line of a table: the first column to the left, the others to the right; None is a dash."""
    texts = [_text(cell) for cell in cells]
    padded = [text.rjust(width) for text, width in zip(texts[1:], widths[1:], strict=True)]
    print("  ".join([texts[0].ljust(widths[0]), *padded]), flush=True)


def _text(cell: Any) -> str:
    if cell is None:
        return "-"
    return f"{cell:.2f}" if isinstance(cell, float) else str(cell)
