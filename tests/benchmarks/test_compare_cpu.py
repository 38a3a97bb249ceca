"""Tandem against its peers on a CPU: who is missing is named, and ratios above one mean that Tandem is better."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import gguf
import pytest
from command import run
from compare_cpu import FAILED, Engine, Measured, Workload, compare_cpu, counted, summarise, window

from tests.models.gguf_files import convert
from tests.tiny_model import save_tiny_model


def byte_level(writer: gguf.GGUFWriter) -> None:
    """A token for each byte, one that ends a text, and "or"."""
    folder = Path(writer.path).parent  # type: ignore[arg-type]
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = [*sorted(vocabulary, key=vocabulary.__getitem__)[:256], "</s>", "or"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL, gguf.TokenType.NORMAL])
    writer.add_token_merges(["o r"])
    writer.add_eos_token_id(256)


def test_a_whole_run_names_who_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = convert(save_tiny_model(tmp_path, vocab_size=258), tmp_path / "model.gguf", tokenizer=byte_level)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "to be or not to be or not to be"}) + "\n")
    flags = "--engines tandem llama.cpp --peers-python /nowhere/python --contexts 20 --streams 3 --prefill 40"
    more = f"--repeats 1 --max-tokens 6 --text-tokens 6 --threads 1 --model {path} --prompts {prompts} --json"
    assert run(compare_cpu, [*flags.split(), *more.split()]) == 0
    output = capsys.readouterr().out
    assert "llama.cpp: left out" in output
    summary = json.loads(output.splitlines()[-1])
    assert set(summary["missing"]) == {"llama.cpp"}
    assert summary["ratios"] == {}
    measured = {(row["workload"], row["mode"]) for row in summary["tokens_per_s"]}
    assert measured == {
        *((name, "none") for name in ("decode at 20", "3 streams", "prefill 40", "text")),
        *(("text", mode) for mode in ("ngram", "auto")),
    }
    assert all(row["tokens_per_s"] > 0 for row in summary["tokens_per_s"])
    assert summary["same_tokens_as_tandem"] == {f"tandem {mode}": 6 for mode in ("none", "ngram", "auto")}


def test_ratios_above_one_mean_that_tandem_is_better() -> None:
    def runs(*speeds: float) -> list[Measured]:
        return [Measured(int(speed), 1.0, [[1, 2, 3]]) for speed in speeds]

    class Finished(Engine):
        def __init__(self, peak_mb: float) -> None:
            self.start_seconds, self.peak_mb = 1.0, peak_mb

    results = {
        ("decode at 64", "tandem", "none"): runs(400.0, 200.0, 300.0),
        ("decode at 64", "llama.cpp", "plain"): runs(100.0, 100.0, 100.0),
        ("8 streams", "tandem", "none"): runs(800.0),
        ("8 streams", "openvino", "plain"): runs(500.0),
        ("text", "tandem", "none"): runs(300.0),
        ("text", "tandem", "ngram"): runs(600.0),
        ("text", "tandem", "auto"): [*runs(450.0, 300.0), Measured(250, 0.5, [[1]]), Measured(0, 0.0, [[1]])],
        ("text", "llama.cpp", "plain"): [Measured(100, 1.0, [[1, 9, 3]]) for _ in range(4)],
    }
    summary = summarise(results, {"tandem": Finished(300.0), "llama.cpp": Finished(200.0)}, 10**9, 600.0)
    assert summary["ratios"] == pytest.approx(
        {
            "plain_vs_llamacpp": 3.0,
            "auto_vs_llamacpp": 4.0,  # 1000 tokens in 2.5 s
            "auto_vs_llamacpp_median_text": 4.5,
            "streams8_vs_openvino": 1.6,
            "peak_memory_vs_llamacpp": 1.5,
        }
    )
    assert summary["roofline_share"] == pytest.approx(0.5)
    assert summary["same_tokens_as_tandem"]["llama.cpp plain"] == 1


def test_a_text_that_one_engine_failed_on_counts_for_none() -> None:
    class Finished(Engine):
        def __init__(self) -> None:
            self.start_seconds, self.peak_mb = 1.0, 1.0

    results = {
        ("decode at 64", "tandem", "none"): [Measured(100, 1.0, [[1]])],
        ("text", "tandem", "none"): [Measured(10, 1.0, [[1, 2]]) for _ in range(3)],
        ("text", "tandem", "auto"): [Measured(10, 1.0, [[1, 2]]), Measured(40, 1.0, [[1, 2]]), FAILED],
        ("text", "llama.cpp", "plain"): [FAILED, Measured(10, 1.0, [[1, 2]]), Measured(10, 1.0, [[1, 2]])],
        ("text", "llama.cpp", "lookup"): [FAILED] * 3,
    }
    summary = summarise(results, {"tandem": Finished()}, 10**9, 600.0)
    assert summary["ratios"] == {"auto_vs_llamacpp": 4.0, "auto_vs_llamacpp_median_text": 4.0}
    assert set(summary["same_tokens_as_tandem"]) == {"tandem none", "tandem auto", "llama.cpp plain"}


def test_text_never_begins_twice_alike() -> None:
    tokens = list(range(7))
    windows = window(tokens)
    first, second = (list(itertools.islice(windows, 7)) for _ in range(2))
    assert first != second


def test_what_counts_is_what_was_asked_for() -> None:
    def workload(prompts: int, max_tokens: int) -> Workload:
        return Workload("w", [[1, 2, 3, 4]] * prompts, max_tokens, {})

    assert counted(workload(1, 1), [(0.5, 0.5, [7])]).speed == 8  # tokens of the prompt
    assert counted(workload(1, 9), [(0.5, 1.5, [7, 8, 9])]).speed == 2  # of those after the first
    assert counted(workload(2, 3), [(0.5, 2.0, [7, 8, 9]), (0.6, 2.0, [7, 8, 9])]).speed == 3  # of all
    assert counted(workload(1, 9), [(0.5, 0.5, [2])]).speed == 0  # an answer that ends at once
