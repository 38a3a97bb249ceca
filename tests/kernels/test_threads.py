"""How many threads are used where nobody says."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernels.cpu.library import physical_cores
from kernels.threads import default_threads


@pytest.mark.parametrize(
    ("quota", "threads"),
    [
        ("max 100000", physical_cores()),
        ("100000 100000", 1),
        ("50000 100000", 1),
        ("199999 100000", 1),
        ("6400000 100000", physical_cores()),
        ("gibberish", physical_cores()),
    ],
)
def test_the_physical_cores_within_the_quota(quota: str, threads: int, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text(quota + "\n")
    assert default_threads(tmp_path / "cpu.max") == threads


def test_without_a_quota_all_physical_cores(tmp_path: Path) -> None:
    assert default_threads(tmp_path / "absent") == physical_cores()
