"""What tests of the native kernels need."""

from __future__ import annotations

import pytest

from kernels.cpu.library import available, reason

needs_native = pytest.mark.skipif(not available(), reason=f"no native kernels: {reason()}")

BF16_ATTENTION = ("amx", "avx512_bf16")
"""Instruction sets that round queries and the weights of values to bfloat16, over caches that are no wider."""
