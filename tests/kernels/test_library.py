"""The native library, where it is not the one that this version was made with."""

from __future__ import annotations

import _ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu.build import SOURCES
from tests.native import needs_native


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


@needs_native
def test_one_built_from_other_sources_is_not_used(tmp_path: Path) -> None:
    """Calls pass structs, whose layout may have changed."""
    shutil.copytree(SOURCES.parents[2] / "kernels", tmp_path / "kernels")
    with (tmp_path / "kernels" / "cpu" / "src" / "step.h").open("a") as header:
        header.write("// changed\n")
    code = "from kernels.cpu import library; print(library.reason())"
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "another version" in out.stdout
