"""Benchmarks are scripts, not a package: they find their own modules in their own folder, and so must tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
