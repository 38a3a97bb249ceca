"""The `tandem` command: its help, its errors, and the commands that need no server."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from app.cli import main, parse
from app.sampling_settings import ChatSettings, SamplingSettings
from app.settings import EngineSettings, ServerSettings, SettingsError
from app.terminal import Session, complete, piped, started, talk
from app.training_settings import TrainingSettings
from app.version import version
from tests.engine.fakes import CountingWorker, LetterTokenizer, letters, running_engine
from tests.tiny_model import save_tiny_model

FLAGS = {
    "serve": (ServerSettings,),
    "generate": (EngineSettings, SamplingSettings),
    "chat": (EngineSettings, ChatSettings),
    "train-drafter": (EngineSettings, TrainingSettings),
}


@pytest.mark.parametrize("command", FLAGS)
def test_help_lists_every_flag(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    words = capsys.readouterr().out.split()
    flags = ["--" + field.name.replace("_", "-") for schema in FLAGS[command] for field in fields(schema)]
    assert [flag for flag in flags if flag not in words] == []


def test_help_is_quick_because_it_loads_nothing_heavy() -> None:
    script = "import sys; from app.cli import main; main(['serve', '--help']); print(*sys.modules, file=sys.stderr)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(result.stderr.split())
    assert loaded & {"torch", "tokenizers", "transformers", "uvicorn", "dependency_injector"} == set()


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == version()


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["serve", "--prot", "1"], "--port"),
        (["srve"], "serve"),
        (["generate", "hi", "--model", "/nowhere.gguf"], "/nowhere.gguf"),
        (["chat", "--model", "/nowhere.gguf"], "/nowhere.gguf"),
        (["serve", "--model", "/nowhere.gguf"], "/nowhere.gguf"),
        (["generate", "hi", "--temperature", "-1"], "--temperature"),
        (["generate", "hi", "--stop", ""], "--stop"),
        (["generate", "hi", "--min-tokens", "3", "--max-tokens", "2"], "--max-tokens"),
        (["serve", "--api-key", ""], "--api-key"),
        (["serve", "--host", ""], "--host"),
        (["serve", "--model", ""], "--model"),
        (["train-drafter", "/nowhere", "--data", "/nowhere", "--cache-gb", "inf"], "--cache-gb"),
    ],
)
def test_what_cannot_be_run_is_said_in_one_line_with_exit_code_2(
    argv: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("tandem: error: ")
    assert part in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["serve", "--max-model-len", "512"], "did you mean --context-length?"),
        (["serve", "--tensor-parallel-size", "2"], "did you mean --tp-size?"),
        (["serve", "--tp=2"], "did you mean --tp-size?"),
        (["serve", "-c", "512"], "did you mean --context-length?"),
        (["chat", "-m", "x.gguf"], "did you mean --model?"),
        (["generate", "hi", "-n", "8"], "did you mean --max-tokens?"),
        (["serve", "--gpu-memory-utilization", "0.9"], "did you mean --mem-fraction-static?"),
        (["serve", "--max-num-seqs", "8"], "did you mean --max-running-requests?"),
        (["serve", "--trust-remote-code"], "not needed"),
        (["serve", "-ngl", "99"], "not needed"),
        (["serve", "nosuch"], "--model nosuch"),
        (["chat", "nosuch"], "--model nosuch"),
        (["generate", "two", "words"], "quotes"),
        (["generate", "-"], "standard input is read"),
    ],
)
def test_an_error_says_what_was_meant(argv: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--max-tokens", "-n", "--foo"])
def test_what_a_command_has_nothing_like_is_left_without_a_hint(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", flag, "1"]) == 2
    assert capsys.readouterr().err == f"tandem: error: unknown option {flag}\n"


def test_flags_of_a_command_alone_can_be_set_in_the_environment_too() -> None:
    _, bound = parse(["chat"], {"TANDEM_STATS": "1", "TANDEM_SYSTEM": "be brief"})
    assert (bound.arguments["stats"], bound.arguments["system"]) == (True, "be brief")
    assert parse(["serve"], {"TANDEM_STATS": "1"})[0].__name__ == "serve"


@pytest.mark.parametrize("variable", ["TANDEM_PROMPT", "TANDEM_SETTINGS", "TANDEM_OUT"])
def test_what_is_no_flag_is_no_setting(variable: str) -> None:
    with pytest.raises(SettingsError, match=variable):
        parse(["generate", "hi"], {variable: "1"})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    return ["--model", str(folder), "--dtype", "float32", "--device", "cpu", "--context-length", "256"]


def test_generate_prints_the_continuation(model: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", "abc", *model, "--max-tokens", "8", "--ignore-eos", "--seed", "1"]
    texts = []
    for more in ([], ["--speculative-algorithm", "none", "--stats"]):
        assert main([*argv, *more]) == 0
        captured = capsys.readouterr()
        texts.append(captured.out)
        assert ("8 tokens" in captured.err) == ("--stats" in more)
    assert texts[0] == texts[1]
    assert texts[0].strip()


def generate(arguments: Sequence[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
    """`tandem generate` as a process."""
    command = [sys.executable, "-m", "app.cli", "generate", "abc", *arguments, "--ignore-eos"]
    return subprocess.run(command, stderr=subprocess.PIPE, check=False, **options)


def test_a_reader_that_leaves_early_ends_it_quietly(model: list[str]) -> None:
    ended, left = os.pipe()
    os.close(ended)
    with os.fdopen(left, "wb") as stdout:
        done = generate(model, stdout=stdout)
    assert (done.returncode, done.stderr) == (141, b"")


def test_what_the_terminal_cannot_show_is_replaced(model: list[str]) -> None:
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = generate([*model, "--max-tokens", "50", "--seed", "1"], stdout=subprocess.PIPE, env=environ)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.isascii() and b"?" in done.stdout


def test_chat_without_stdin_is_refused() -> None:
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m app.cli chat <&-"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("tandem: error: chat reads from stdin")


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("a" * 256, "the prompt has 256 tokens, which leaves no room in a context of 256"),
        ("", "the prompt has no tokens"),
    ],
)
def test_generate_refuses_a_prompt_that_cannot_be_continued(
    model: list[str], prompt: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", prompt, *model]) == 2
    assert capsys.readouterr().err == f"tandem: error: {reason}\n"


def test_without_a_prompt_generate_continues_what_is_piped_in() -> None:
    assert piped(io.StringIO("one\ntwo\n")) == "one\ntwo"
    with pytest.raises(SettingsError, match="not text"):
        piped(io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8"))


class Keyboard(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stdin", [None, Keyboard()])
def test_generate_needs_a_prompt_where_nothing_is_piped_in(stdin: io.StringIO | None) -> None:
    with pytest.raises(SettingsError, match="PROMPT"):
        piped(stdin)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_is_told_which_model_loads_and_shows_nothing_of_it_afterwards(
    model: list[str], terminal: bool
) -> None:
    screen = io.StringIO()
    settings = parse(["chat", *model], {})[1].arguments["settings"]
    with started(settings, Console(file=screen, force_terminal=terminal, width=200)):
        shown = screen.getvalue()
    assert (f"loading {Path(model[1]).name}…" in shown) == terminal
    assert shown.endswith(ERASE_LINE) == terminal


class ChatTokenizer(LetterTokenizer):
    """A chat is its messages' letters, one after another."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return letters("".join(letter for letter in text if letter.isalpha()))

    def apply_chat_template(self, messages: Sequence[dict[str, Any]]) -> str:
        self.seen = [(message["role"], message["content"]) for message in messages]
        return "".join(message["content"] for message in messages)


class Screen(io.StringIO):
    """A terminal at which somebody hits Ctrl-C once they have seen `enough`."""

    def __init__(self, enough: str | None = None) -> None:
        super().__init__()
        self._enough = enough

    def write(self, text: str) -> int:
        written = super().write(text)
        if self._enough is not None and text == self._enough:
            self._enough = None
            raise KeyboardInterrupt
        return written


ERASE_LINE = "\x1b[2K"


@pytest.fixture
def session() -> Iterator[Session]:
    """Whose engine goes on with the alphabet, four letters an answer."""
    with running_engine(CountingWorker()) as engine:
        yield Session(engine, ChatTokenizer(), SamplingSettings(max_tokens=4))


def hold_talk(
    session: Session, lines: Sequence[str | type[BaseException]], screen: Screen, **options: Any
) -> int:
    entered = iter([*lines, EOFError])

    def read(_prompt: str) -> str:
        line = next(entered)
        if isinstance(line, str):
            return line
        raise line

    options = {"system": None, "stats": False, **options}
    return talk(session, Console(file=screen, width=200), read, **options)


def test_chat_answers_knowing_what_was_said(session: Session) -> None:
    screen = Screen()
    assert hold_talk(session, ["abc", "  ", "x"], screen, system="s") == 0
    assert "defg\n" in screen.getvalue()
    assert "yzab\n" in screen.getvalue()
    assert session.tokenizer.seen == [
        ("system", "s"),
        ("user", "abc"),
        ("assistant", "defg"),
        ("user", "x"),
    ]


@pytest.mark.parametrize("line", ["/reset", "/reset now"])
def test_reset_forgets_all_but_the_system_message(session: Session, line: str) -> None:
    hold_talk(session, ["abc", line, "x"], Screen(), system="s")
    assert session.tokenizer.seen == [("system", "s"), ("user", "x")]


@pytest.mark.parametrize(
    ("sampling", "prompt", "mark"),
    [
        (SamplingSettings(max_tokens=4), "abc", "(cut: --max-tokens)"),
        (ChatSettings(), "abc", "(cut: the context is full)"),
        (SamplingSettings(max_tokens=4, stop=("e",)), "abc", ""),
    ],
)
def test_an_answer_that_was_cut_says_by_what(
    session: Session, sampling: SamplingSettings, prompt: str, mark: str
) -> None:
    screen = Screen()
    hold_talk(replace(session, sampling=sampling), [prompt], screen)
    assert screen.getvalue().splitlines()[-1].startswith("(cut") == bool(mark)
    assert mark in screen.getvalue()


def test_an_answer_in_a_chat_has_an_end() -> None:
    assert ChatSettings().max_tokens == 1024


def test_exit_leaves(session: Session) -> None:
    assert hold_talk(session, ["abc", "/exit", "x"], Screen()) == 0
    assert session.tokenizer.seen == [("user", "abc")]


@pytest.mark.parametrize("line", ["/help", "/quit", "/set temperature 2"])
def test_what_begins_as_a_command_goes_to_no_model_and_the_commands_are_named(
    session: Session, line: str
) -> None:
    screen = Screen()
    hold_talk(session, [line, "abc"], screen)
    told = screen.getvalue().splitlines()[1]
    assert "/reset" in told and "/exit" in told
    assert (line.split()[0] in told) == (line != "/help")
    assert session.tokenizer.seen == [("user", "abc")]


def test_a_path_is_no_command(session: Session) -> None:
    hold_talk(session, ["/etc/hosts"], Screen())
    assert session.tokenizer.seen == [("user", "/etc/hosts")]


def test_ctrl_c_ends_an_answer_and_what_was_shown_of_it_stands(session: Session) -> None:
    hold_talk(session, ["abc", "x"], Screen(enough="e"))
    assert session.tokenizer.seen == [("user", "abc"), ("assistant", "de"), ("user", "x")]


def test_ctrl_c_at_the_prompt_does_not_leave(session: Session) -> None:
    hold_talk(session, [KeyboardInterrupt, "abc"], Screen())
    assert session.tokenizer.seen == [("user", "abc")]


def test_a_talk_that_has_become_too_long_goes_on_after_a_reset(session: Session) -> None:
    screen = Screen()
    assert hold_talk(session, ["a" * 128, "abc"], screen) == 0
    assert "/reset" in screen.getvalue()
    assert session.tokenizer.seen == [("user", "abc")]


def test_stats_are_told_on_stderr(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    hold_talk(session, ["abc"], Screen(), stats=True)
    assert "4 tokens" in capsys.readouterr().err


def test_ctrl_c_ends_generate_with_what_there_is(session: Session) -> None:
    screen = Screen(enough="e")
    assert complete(session, "abc", False, screen) == 130
    assert screen.getvalue() == "de\n"


def test_a_request_that_fails_is_told_and_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    with running_engine(CountingWorker(fail_on=lambda request: "the logits are not numbers")) as engine:
        session = Session(engine, ChatTokenizer(), SamplingSettings(max_tokens=4))
        assert complete(session, "abc", False, Screen()) == 1
        assert hold_talk(session, ["abc"], Screen()) == 1
    assert capsys.readouterr().err.count("the logits are not numbers") == 2
