"""A profile of decode steps: parts that add up to a step, on a whole run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import run
from decode_profile import decode_profile, summarise

from tests.tiny_model import save_tiny_model


def test_parts_are_medians_and_shares_of_their_sum() -> None:
    parts = summarise({"pass": [0.004, 0.003, 0.2], "sampling": [0.001]})["parts"]
    assert parts["pass"] == pytest.approx({"ms": 4, "share": 0.8})
    assert parts["sampling"] == pytest.approx({"ms": 1, "share": 0.2})


def test_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("Hello", "x" * 600, "Why?")))
    model = save_tiny_model(tmp_path)
    flags = f"--model {model} --device cpu --dtype float32 --max-total-tokens 512 --chunked-prefill-size 4 --prompts {prompts}"
    assert run(decode_profile, [*flags.split(), "--max-tokens", "12", "--json"]) == 0
    out = capsys.readouterr().out.splitlines()
    parts = json.loads(out[-1])["parts"]
    assert out[0].startswith("prompt 2: skipped")
    assert list(parts) == ["engine", "batch", "pass", "sampling"]
    assert all(part["ms"] > 0 for part in parts.values())
    assert sum(part["share"] for part in parts.values()) == pytest.approx(1)

    assert run(decode_profile, [*flags.split(), "--max-tokens", "600"]) == 2
    assert "no prompt fits" in capsys.readouterr().err
