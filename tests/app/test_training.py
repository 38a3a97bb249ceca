"""`tandem train-drafter`, from nothing to a drafter that serves, and on from there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from app.cli import main
from app.settings import EngineSettings
from app.training import every, without_speculation
from models.loader import inspect_model
from models.options import ModelOptions
from speculative.pairing import check_pairing, target_digest
from tests.tiny_model import save_tiny_model

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = save_tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=4)
    template = folder / "chat.jinja"
    template.write_text(CHAT)
    return [
        *("--model", str(folder), "--chat-template", str(template), "--threads", "1"),
        *(
            "--max-total-tokens",
            "2048",
            "--max-running-requests",
            "16",
            "--answer-tokens",
            "12",
            "--layers",
            "1",
            "--draft-vocab-size",
            "64",
        ),
        *("--block-size", "4", "--blocks-per-step", "32"),
    ]


def train(out: Path, arguments: Sequence[str], *more: str) -> int:
    return main(["train-drafter", str(out), *arguments, *more])


def answers_of(out: Path, arguments: Sequence[str]) -> Path:
    """Where what the target wrote is kept."""
    digest = target_digest(inspect_model(ModelOptions(model=arguments[1])))
    return out / "run" / f"answers-{digest[:12]}.jsonl"


def test_text_is_written_a_drafter_trained_and_both_continued(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path, arguments, "--tokens", "18000", "--steps", "2") == 0
    written = answers_of(tmp_path, arguments)
    answers = written.read_text().splitlines()
    tokens = sum(len(json.loads(line)["token_ids"]) for line in answers)
    assert tokens >= 18000
    target = inspect_model(ModelOptions(model=arguments[1]))
    drafter = inspect_model(ModelOptions(model=str(tmp_path)), drafter=True)
    check_pairing(drafter, target)
    assert drafter.dflash is not None
    assert drafter.dflash.target_digest == target_digest(target)
    assert drafter.dflash.accept_length is not None and drafter.dflash.accept_length >= 1.0
    assert f"tandem train-drafter {tmp_path} --tokens 18000" in (tmp_path / "README.md").read_text()
    said = capsys.readouterr().err
    assert f"wrote {len(answers)} texts, {tokens} tokens to {written}\n" in said
    assert "the drafter is in" in said

    assert train(tmp_path, arguments, "--tokens", str(tokens + 200), "--steps", "4") == 0
    more = written.read_text().splitlines()
    assert more[: len(answers)] == answers
    assert len({json.loads(line)["id"] for line in more}) == len(more) > len(answers)


def test_no_minutes_write_text_only(arguments: list[str], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "hello"}) + "\n")
    assert train(tmp_path / "out", arguments, "--data", str(prompts), "--minutes", "0") == 0
    (line,) = answers_of(tmp_path / "out", arguments).read_text().splitlines()
    assert json.loads(line)["id"] == "prompts.jsonl-0"
    assert not (tmp_path / "out" / "config.json").exists()


def test_answers_of_another_target_are_not_trained_on(
    arguments: list[str], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "hello"}) + "\n")
    data = ["--data", str(prompts), "--minutes", "0"]
    assert train(tmp_path / "out", arguments, *data) == 0
    other = save_tiny_model(tmp_path_factory.mktemp("other"), num_hidden_layers=5)
    others = [str(other) if argument == arguments[1] else argument for argument in arguments]
    assert train(tmp_path / "out", others, *data) == 0
    assert answers_of(tmp_path / "out", arguments) != answers_of(tmp_path / "out", others)
    assert len(list((tmp_path / "out" / "run").glob("answers-*.jsonl"))) == 2


def test_a_log_gets_a_line_now_and_then() -> None:
    times = iter([0, 5, 20, 39, 40, 100])
    due = every(20, lambda: next(times))
    assert [due() for _ in range(5)] == [False, True, False, True, True]


@pytest.mark.parametrize(
    ("content", "flags", "complaint"),
    [
        (b'{"prompt": "a"}\n{"text": "b"}\n', [], "data.jsonl, line 2: neither"),
        (
            b'{"messages": 5}\n',
            [],
            "data.jsonl, line 1: Expected `array | null`, got `int` - at `$.messages`",
        ),
        (b'{"turns": ["a", 1]}\n', [], "data.jsonl, line 1: Expected `str`, got `int` - at `$.turns[1]`"),
        (b'{"messages": [{"role": "user"}]}\n', [], "line 1: Object missing required field `content`"),
        (b'{"prompt": "a"}\nhello\n', [], "data.jsonl, line 2: not JSON"),
        (b"[1]\n", [], "data.jsonl, line 1: not a JSON object"),
        (b'{"prompt": "\xff"}\n', [], "data.jsonl: not UTF-8"),
        (
            b'{"messages": [{"role": "assistant"}]}\n',
            ["--keep-answers"],
            "data.jsonl, line 1: not a conversation",
        ),
        (
            b'{"token_ids": [1, 2, 99999999], "answers": [[1, 3]]}\n',
            ["--keep-answers"],
            "data.jsonl, line 1: not a conversation with answers (ValueError('token id 99999999 is not in the",
        ),
        (b'{"prompt": "a"}\n', ["--target-layers", "99"], "--target-layers has [99]"),
        (b'{"prompt": "a"}\n', ["--mask-token", "99999"], "--mask-token 99999"),
    ],
    ids=[
        "no prompt",
        "no messages",
        "no text",
        "no content",
        "no JSON",
        "no object",
        "no UTF-8",
        "no conversation",
        "no token",
        "layers",
        "mask",
    ],
)
def test_mistakes_are_named(
    arguments: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: bytes,
    flags: list[str],
    complaint: str,
) -> None:
    (tmp_path / "data.jsonl").write_bytes(content)
    data = ["--data", str(tmp_path / "data.jsonl"), "--steps", "1"]
    assert train(tmp_path / "out", arguments, *data, *flags) == 2
    assert complaint in capsys.readouterr().err


def test_what_a_server_drafts_with_does_not_matter() -> None:
    server = EngineSettings(
        model="here",
        threads=1,
        speculative_algorithm="dflash",
        speculative_draft_model_path="there",
        speculative_draft_window_size=64,
        speculative_draft_kv_cache_dtype="int8",
    )
    assert without_speculation(server) == EngineSettings(
        model="here", threads=1, speculative_algorithm="none"
    )


def test_a_model_without_a_chat_template_is_told_what_it_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_tiny_model(folder, num_hidden_layers=4)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    flags = ["--model", str(folder), "--threads", "1", "--max-total-tokens", "2048", "--tokens", "100"]
    assert train(tmp_path / "out", flags, "--minutes", "0") == 2
    assert "give one with --chat-template" in capsys.readouterr().err


def test_what_cannot_be_trained_on_is_said(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train-drafter", str(tmp_path / "out"), "--data", "/nowhere.jsonl"]) == 2
    assert "--data /nowhere.jsonl" in capsys.readouterr().err
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "hello"}) + "\n")
    assert train(tmp_path / "out", arguments, "--data", str(prompts), "--steps", "1") == 2
    assert "too few" in capsys.readouterr().err
