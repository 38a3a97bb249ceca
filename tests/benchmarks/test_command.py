"""Scripts as commands: flags, exit codes, and one line for what cannot be run."""

from __future__ import annotations

import pytest
from command import print_row, run


def measure(*, count: int = 1, loud: bool = False) -> int:
    """Measure something."""
    if count < 0:
        raise ValueError("a count\nis never negative")
    print(count, loud)
    return count


def test_flags_reach_the_function_and_its_result_is_the_exit_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(measure, ["--count", "3", "--loud"]) == 3
    assert run(measure, []) == 1
    assert capsys.readouterr().out == "3 True\n1 False\n"


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--cuont", "3"], "--cuont"),
        (["--count", "three"], "three"),
        (["--count", "-1"], "error: a count is never negative\n"),
    ],
)
def test_what_cannot_be_run_is_told_in_one_line(
    argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(measure, argv) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1


def test_a_row_of_a_table_is_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    print_row(("name", "x", 3, 1.006, None), (6, 3, 4, 6, 3))
    assert capsys.readouterr().out == "name      x     3    1.01    -\n"
