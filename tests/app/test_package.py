"""What holds as soon as anything of the package is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("given", "expected"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_threads_of_torch_are_told_not_to_spin_unless_the_user_says_so(
    given: dict[str, str], expected: str
) -> None:
    code = "import app.cli, os; print(os.environ['OMP_WAIT_POLICY'])"
    environ = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | given
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == expected
