"""Tandem against transformers: the same tokens from the same weights, and ratios that say who is better."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command import run
from compare_transformers import Run, compare_transformers, generate, load_reference, summarise
from in_process import same_tokens
from timing import Timing

from models.loader import inspect_model
from models.options import ModelOptions
from tests.models.checkpoints import make_checkpoint
from tests.models.gguf_files import convert
from tests.tiny_model import save_tiny_model

CPU = torch.device("cpu")


def run_of(ttft: float, seconds: float, tokens: tuple[int, ...] = (1, 2, 3, 4, 5)) -> Run:
    return Run(tokens, Timing(ttft, len(tokens) - 1, seconds))


def test_ratios_above_one_mean_that_tandem_is_better() -> None:
    rows = [
        {"tandem": run_of(0.1, 1.0), "slow": run_of(0.4, 3.0, (1, 2, 9, 4, 5)), "fast": run_of(0.05, 0.5)},
        {"tandem": run_of(0.2, 2.0), "slow": run_of(0.4, 8.0), "fast": run_of(0.1, 1.0)},
        {"tandem": run_of(0.1, 1.0), "slow": run_of(0.3, 5.0), "fast": run_of(0.05, 0.5)},
    ]
    summary = summarise(rows, ["slow", "fast"])
    assert summary["ratios"] == pytest.approx({"decode_tokens_per_s": 4.0, "ttft": 3.0})
    assert summary["against"]["fast"]["decode_tokens_per_s"] == pytest.approx(0.5)
    assert summary["against"]["fast"]["ttft"] == pytest.approx(0.5)
    assert summary["against"]["slow"]["identical"] == 2
    assert summary["engines"]["tandem"] == pytest.approx({"decode_tokens_per_s": 4.0, "ttft_ms": 100.0})


def test_tokens_in_common_end_at_the_first_difference() -> None:
    assert same_tokens((1, 2, 3), (1, 2, 3)) == 3
    assert same_tokens((1, 2, 3), (1, 9, 3)) == 1
    assert same_tokens((1, 2, 3), (1, 2)) == 2
    assert same_tokens((), (1,)) == 0


def test_generate_times_every_token_and_does_not_stop_at_eos(tmp_path: Path) -> None:
    files = inspect_model(ModelOptions(model=str(save_tiny_model(tmp_path))))
    model = load_reference(files, torch.float32, CPU)
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
        model.get_output_embeddings().weight[256] = 1.0  # every token is the one that ends a text, or token 0
    result = generate(model, [5, 6, 7], 10)
    assert len(result.token_ids) == 10
    assert 256 in result.token_ids
    assert result.timing.decode_tokens == 9
    assert result.timing.ttft > 0
    assert result.timing.decode_seconds > 0


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen3"])
def test_a_gguf_file_gives_the_logits_of_its_checkpoint(tmp_path: Path, name: str) -> None:
    reference = make_checkpoint(name, tmp_path)
    path = convert(tmp_path, tmp_path / "model.gguf")
    model = load_reference(inspect_model(ModelOptions(model=str(path))), torch.float32, CPU)
    ids = torch.arange(1, 30)[None]
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, reference(ids).logits, rtol=0, atol=1e-5)


def test_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("Hello", "x" * 600, "Why?")))
    model = save_tiny_model(tmp_path)
    flags = f"--model {model} --device cpu --dtype float32 --max-total-tokens 2048 --context-length 512 --max-tokens 12"
    assert run(compare_transformers, [*flags.split(), "--prompts", str(prompts), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(summary["ratios"]) == {"decode_tokens_per_s", "ttft"}
    assert all(ratio > 0 for ratio in summary["ratios"].values())
    assert set(summary["against"]) == {"transformers float32", "transformers bfloat16"}
    assert summary["ratios"] == {
        name: summary["against"]["transformers float32"][name] for name in ("decode_tokens_per_s", "ttft")
    }
    assert summary["prompts"] == 2  # one does not fit
    assert summary["against"]["transformers float32"]["identical"] == 2
    assert summary["threads"] == torch.get_num_threads()
