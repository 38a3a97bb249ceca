"""Speculation against none: the same tokens, and measures that follow from the counters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from command import run
from in_process import Answer, InProcess, sources
from prompts import Prompt
from speculation import Row, converse, report, speculation, summarise
from timing import Timing

from engine.request import SamplingParams, SpeculationStats
from tests.app.fakes import CONTEXT_LEN, ByteTokenizer, FakeEngine
from tests.models.dflash_reference import make_drafter
from tests.tiny_model import save_tiny_model


def answer(tokens: Sequence[int], seconds: float, steps: int = 0, emitted: int = 0) -> Answer:
    stats = SpeculationStats(verify_steps=steps, verify_emitted_tokens=emitted)
    return Answer("text", tuple(tokens), Timing(0.1, len(tokens) - 1, seconds), stats)


def test_measures_by_category_and_in_all() -> None:
    rows = [
        Row("qa", {"none": answer(range(11), 1.0), "ngram": answer(range(11), 1.0, 2, 4)}),
        Row("code", {"none": answer(range(21), 2.0), "ngram": answer(range(21), 0.5, 4, 20)}),
    ]
    summary = summarise(rows, ["none", "ngram"])
    assert summary["identical"]
    assert summary["none"] == {
        "accept_length": 1.0,
        "tokens_per_s": 10.0,
        "speedup": 1.0,
        "verified_share": 0.0,
    }
    assert summary["ngram"] == {
        "accept_length": 4.0,
        "tokens_per_s": 20.0,
        "speedup": 2.0,
        "verified_share": 0.75,
    }
    assert summary["categories"]["qa"]["ngram"]["speedup"] == 1.0
    assert summary["categories"]["code"]["ngram"]["speedup"] == 4.0


@pytest.mark.parametrize("tokens", [(1, 2, 4), (1, 2), (1, 2, 3, 4)])
def test_one_different_token_is_told(tokens: tuple[int, ...], capsys: pytest.CaptureFixture[str]) -> None:
    same = Row("qa", {"none": answer((1, 2, 3), 1.0), "ngram": answer((1, 2, 3), 1.0)})
    different = Row("qa", {"none": answer((1, 2, 3), 1.0), "ngram": answer(tokens, 1.0)})
    assert report([same], ["none", "ngram"], [], as_json=True) == 0
    assert report([same, different], ["none", "ngram"], ["9"], as_json=True) == 1
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["identical"] is False
    assert (summary["different_rows"], summary["skipped"]) == (1, ["9"])


def test_turns_see_the_same_history_with_every_algorithm() -> None:
    engine = FakeEngine(ByteTokenizer(), reply="yes")
    with engine:
        local = InProcess(engine, engine.tokenizer, CONTEXT_LEN)
        rows = converse(
            local, Prompt("1", "chat", ("one", "two")), SamplingParams(max_tokens=8), ["ngram", "none"]
        )
    assert [row.category for row in rows] == ["chat", "chat"]
    asked = [
        engine.tokenizer.decode(request.prompt_ids, skip_special_tokens=False) for request in engine.requests
    ]
    assert asked == 2 * ["<user>one</s><assistant>"] + 2 * [
        "<user>one</s><assistant>yes</s><user>two</s><assistant>"
    ]
    assert [request.speculation.algorithm for request in engine.requests] == ["ngram", "none"] * 2
    assert rows[0].answers["ngram"].speculation.verify_steps == 3
    assert rows[0].answers["none"].speculation.verify_steps == 0
    expected = tuple(engine.tokenizer.encode("yes"))
    assert [row.answers[name].token_ids for row in rows for name in row.answers] == [expected] * 4


def test_what_the_first_step_brings_is_not_decoding() -> None:
    engine = FakeEngine(ByteTokenizer(), reply="Hello, world", tokens_per_step=5)
    with engine:
        got = InProcess(engine, engine.tokenizer, CONTEXT_LEN).generate([1, 2], SamplingParams(max_tokens=64))
    assert got.text == "Hello, world"
    assert got.timing.decode_tokens == len("Hello, world") - 5


def test_a_request_that_fails_ends_the_benchmark() -> None:
    engine = FakeEngine(ByteTokenizer(), fail="out of memory")
    with engine, pytest.raises(RuntimeError, match="error: out of memory"):
        InProcess(engine, engine.tokenizer, CONTEXT_LEN).generate([1, 2], SamplingParams(max_tokens=8))


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_a_whole_run(tmp_path: Path, temperature: str, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    long = "x" * 600  # does not fit
    lines = [
        {"id": 7, "turns": ["aaaa", "bb"]},
        {"prompt": "abcabc", "category": "qa"},
        {"id": 8, "prompt": long},
    ]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    model = save_tiny_model(tmp_path)
    flags = (
        f"--model {model} --device cpu --max-total-tokens 2048 --context-length 512 --max-tokens 24 --json"
    )
    assert run(speculation, [*flags.split(), "--prompts", str(prompts), "--temperature", temperature]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["identical"] is True
    assert summary["rows"] == 3
    assert summary["skipped"] == ["8"]
    assert set(summary["categories"]) == {"all", "qa"}
    for algorithm in ("none", "ngram"):
        assert {"accept_length", "tokens_per_s", "speedup"} <= set(summary[algorithm])
        assert summary[algorithm]["tokens_per_s"] > 0


@pytest.mark.parametrize("always", [[], ["--always"]], ids=["where it pays", "always"])
def test_auto_is_compared_with_all_that_it_chooses_from(
    tmp_path: Path, always: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "abcabc"}) + "\n")
    model = save_tiny_model(tmp_path)
    make_drafter(
        tmp_path / "drafter",
        vocab_size=257,
        hidden_size=32,
        num_target_layers=1,
        block_size=4,
        dflash_config={"target_layer_ids": [0]},
    )
    flags = (
        f"--model {model} --device cpu --max-total-tokens 512 --max-tokens 24 --json --speculative-algorithm auto "
        f"--speculative-draft-model-path {tmp_path / 'drafter'} --prompts {prompts}"
    )
    assert run(speculation, [*flags.split(), *always]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["identical"] is True
    for algorithm in ("none", "ngram", "dflash", "auto"):
        assert {"accept_length", "tokens_per_s", "speedup"} <= set(summary[algorithm])
    if always:
        assert summary["dflash"]["verified_share"] > 0.9


def test_engine_settings_also_come_from_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    environ = {"TANDEM_MODEL": "/nowhere/model.gguf"}
    assert run(speculation, [], config=sources(environ)) == 2
    assert "/nowhere/model.gguf" in capsys.readouterr().err
    assert run(speculation, [], config=sources({"TANDEM_MODLE": "x"})) == 2
    assert "TANDEM_MODLE" in capsys.readouterr().err


def test_an_algorithm_by_itself_drafts_from_its_earlier_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same prompt three times: compared with others, each of which has just answered, it must not."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text((json.dumps({"prompt": "to be or not"}) + "\n") * 3)
    flags = f"--model {save_tiny_model(tmp_path)} --device cpu --max-total-tokens 512 --max-tokens 24 --always --json"
    accept_lengths = []
    for only in (["--only", "ngram"], []):
        assert run(speculation, [*flags.split(), "--prompts", str(prompts), *only]) == 0
        summary = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert summary["identical"] is True
        accept_lengths.append(summary["ngram"]["accept_length"])
        assert ("auto" in summary) == (not only)
    alone, compared = accept_lengths
    assert alone > 1.5 * compared


def test_an_algorithm_that_is_not_offered_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = f"--model {save_tiny_model(tmp_path)} --device cpu --max-total-tokens 512 --only dflash"
    assert run(speculation, flags.split()) == 2
    assert "--only dflash: the engine offers none, ngram, auto" in capsys.readouterr().err
