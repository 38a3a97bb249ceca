"""Products timed by themselves, on a small shape."""

from __future__ import annotations

import json

import pytest
from command import run
from kernels_cpu import kernels_cpu

from tests.native import needs_native


@needs_native
def test_a_whole_run(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--formats Q4_1 F32 --shape 64 96 --batch 1 16 --repeats 1 --json"
    assert run(kernels_cpu, flags.split()) == 0
    products = json.loads(capsys.readouterr().out.splitlines()[-1])["products"]
    assert [(found["format"], found["rows"]) for found in products] == [
        ("Q4_1", 1),
        ("Q4_1", 16),
        ("F32", 1),
        ("F32", 16),
    ]
    assert all(found["us"] > 0 and found["gb_per_s"] > 0 for found in products)


@needs_native
@pytest.mark.parametrize("flags", ["--formats q9", "--shape 64 40 --formats Q4_1", "--batch 0"])
def test_what_cannot_be_timed_is_told(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(kernels_cpu, [*flags.split(), "--repeats", "1"]) == 2
    assert capsys.readouterr().err.startswith("error: ")
