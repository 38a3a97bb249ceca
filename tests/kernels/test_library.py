"""The native library, where it is not the one that this version was made with."""

from __future__ import annotations

import _ctypes
import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("path", "reason"),
    [(_ctypes.__file__, "another version"), (__file__, "cannot be loaded"), ("/", "loaded")],
)
def test_one_that_is_not_ours_is_done_without_and_says_why(path: str, reason: str) -> None:
    environ = {**os.environ, "TANDEM_CPU_LIBRARY": path}
    code = "from kernels.cpu import library; print(library.available(), library.reason())"
    out = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    assert out.stdout.startswith("False ")
    assert reason in out.stdout
