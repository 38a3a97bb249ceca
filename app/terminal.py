"""`tandem generate` and `tandem chat`: the same engine, in this process and without a server."""

from __future__ import annotations

import logging
import re
import sys
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TextIO

from anyio.from_thread import start_blocking_portal
from rich.console import Console

from app.application import build
from app.lifecycle import EngineFailed, Lifecycle
from app.loading import loading
from app.sampling_settings import SamplingSettings
from app.settings import EngineSettings, SettingsError
from containers.application import ApplicationContainer
from containers.startup import StartUpError
from engine.chat_template import ChatTemplateError
from engine.engine import Engine
from engine.errors import InvalidRequest
from engine.request import OutputEvent, Request
from engine.tokenizer import Tokenizer

FAILED, INTERRUPTED = 1, 130
_HELP, _RESET, _EXIT = "/help", "/reset", "/exit"
_KEYS = f"Ctrl-C ends an answer, {_RESET} the talk, {_EXIT} or Ctrl-D leaves."
_COMMAND = re.compile(r"/[a-z]+")


@dataclass(frozen=True, slots=True)
class Session:
    """An engine that decodes, and how to ask it."""

    engine: Engine
    tokenizer: Tokenizer
    sampling: SamplingSettings

    def answer(self, prompt_ids: Sequence[int]) -> Generator[OutputEvent, None, None]:
        """What follows `prompt_ids`, as it comes; closing the iterator ends it. Raises InvalidRequest."""
        room = self.engine.max_context_len - len(prompt_ids)
        if room < 1:
            raise InvalidRequest(
                f"the prompt has {len(prompt_ids)} tokens, which leaves no room in a context of "
                f"{self.engine.max_context_len}"
            )
        events: SimpleQueue[OutputEvent] = SimpleQueue()
        request = Request(uuid.uuid4().hex, list(prompt_ids), self.sampling.params(room), events.put)
        self.engine.submit(request)
        try:
            while True:
                event = events.get()
                yield event
                if event.finish_reason is not None:
                    return
        finally:
            self.engine.abort(request.request_id)


@contextmanager
def started(settings: EngineSettings, console: Console | None = None) -> Iterator[ApplicationContainer]:
    """Load the model and decode meanwhile; `console` (default: stderr) is told that it loads.

    Raises SettingsError where that cannot be.
    """
    level = "warning" if settings.log_level == "info" else settings.log_level  # the terminal is for the text
    logging.basicConfig(level=level.upper())
    with start_blocking_portal() as portal:
        try:
            with loading(settings, console):
                container = build(settings)
                lifecycle = Lifecycle(container.startup(), container.engine)
                run, _ = portal.start_task(lifecycle.run)
        except (StartUpError, EngineFailed) as error:
            raise SettingsError(str(error)) from error
        try:
            yield container
        finally:
            portal.call(lifecycle.stop)
            with suppress(EngineFailed):  # its request has been told
                run.result()


@contextmanager
def running(settings: EngineSettings, sampling: SamplingSettings) -> Iterator[Session]:
    """A session with a model that decodes meanwhile. Raises SettingsError where that cannot be."""
    with started(settings) as container:
        yield Session(container.engine(), container.tokenizer(), sampling)


def generate(settings: EngineSettings, sampling: SamplingSettings, prompt: str | None, stats: bool) -> int:
    """Continue `prompt`, or what stdin says, on stdout; returns the exit code. Raises SettingsError."""
    text = piped(sys.stdin) if prompt is None else prompt
    with running(settings, sampling) as session:
        return complete(session, text, stats, sys.stdout)


def piped(stdin: TextIO | None) -> str:
    """All that comes in, without the last end of a line. Raises SettingsError where nobody pipes anything."""
    if stdin is None or stdin.isatty():
        raise SettingsError("generate needs a PROMPT: give it in quotes, or pipe it in")
    try:
        return stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise SettingsError(f"the prompt on standard input is not text ({error})") from error


def complete(session: Session, prompt: str, stats: bool, out: TextIO) -> int:
    """Continue `prompt` on `out`; returns the exit code. Raises SettingsError for a prompt that does not fit."""

    def write(text: str) -> None:
        out.write(text)
        out.flush()

    try:
        answer = show(session.answer(session.tokenizer.encode(prompt)), write)
    except InvalidRequest as error:
        raise SettingsError(str(error)) from error
    out.write("\n")
    return close(answer, stats) or (0 if answer.last is not None else INTERRUPTED)


def chat(settings: EngineSettings, sampling: SamplingSettings, system: str | None, stats: bool) -> int:
    """Talk until the end of input; returns the exit code. Raises SettingsError."""
    if sys.stdin is None:
        raise SettingsError(
            "chat reads from stdin, which is closed; `tandem generate` takes its prompt as an argument"
        )
    with suppress(ImportError):
        import readline  # noqa: F401  (gives the prompt line editing and history)
    console = Console(highlight=False)
    with running(settings, sampling) as session:
        return talk(session, console, console.input, system, stats)


def talk(
    session: Session, console: Console, read: Callable[[str], str], system: str | None, stats: bool
) -> int:
    """The turns of a chat; `read` asks for a line, and raises EOFError at the end of input."""
    opening = [{"role": "system", "content": system}] if system is not None else []
    messages: list[dict[str, Any]] = list(opening)
    console.print(_KEYS, style="dim")
    while True:
        try:
            line = read("[bold cyan]>[/] ").strip()
        except EOFError:
            return 0
        except KeyboardInterrupt:
            console.print()
            continue
        if not line:
            continue
        command = line.split()[0]
        if _COMMAND.fullmatch(command):
            if command == _EXIT:
                return 0
            if command == _RESET:
                messages = list(opening)
            else:
                unknown = "" if command == _HELP else f"{command} is none of {_HELP}, {_RESET} and {_EXIT}. "
                console.print(unknown + _KEYS, style="dim", markup=False)
            continue
        turn = {"role": "user", "content": line}
        try:
            prompt = session.tokenizer.apply_chat_template([*messages, turn])
            prompt_ids = session.tokenizer.encode(prompt, add_special_tokens=False)
            answer = show(session.answer(prompt_ids), lambda text: console.out(text, end="", highlight=False))
        except ChatTemplateError as error:
            raise SettingsError(str(error)) from error
        except InvalidRequest as error:
            console.print(f"{error} ({_RESET} begins anew)", style="red", markup=False)
            continue
        console.print()
        if close(answer, stats) != 0:
            return FAILED
        if reason := cut_by(answer, session.sampling):
            console.print(f"(cut: {reason})", style="dim")
        messages += [turn, {"role": "assistant", "content": answer.text}]


@dataclass(slots=True)
class Answer:
    """What was shown, and when: times are of `time.monotonic`. `last` is None for one that was interrupted."""

    start: float
    text: str = ""
    tokens: int = 0
    first_token: float = 0.0
    end: float = 0.0
    last: OutputEvent | None = None


def show(events: Generator[OutputEvent, None, None], write: Callable[[str], object]) -> Answer:
    """Write each piece as it comes. Ctrl-C ends the answer; what was shown of it stands."""
    answer = Answer(time.monotonic())
    with suppress(KeyboardInterrupt), closing(events):
        for event in events:
            answer.end = time.monotonic()
            if event.token_ids and not answer.tokens:
                answer.first_token = answer.end
            answer.tokens += len(event.token_ids)
            answer.text += event.text
            if event.text:
                write(event.text)
            answer.last = event if event.finish_reason is not None else None
    return answer


def close(answer: Answer, stats: bool) -> int:
    """Tell errors, and the `stats` of an answer, on stderr; returns the exit code."""
    if answer.last is not None and answer.last.finish_reason == "error":
        print(f"tandem: error: {answer.last.error}", file=sys.stderr)
        return FAILED
    if stats and answer.tokens:
        print(describe(answer), file=sys.stderr)
    return 0


def cut_by(answer: Answer, sampling: SamplingSettings) -> str | None:
    """What ended an answer that the model would have gone on with."""
    if answer.last is None or answer.last.finish_reason != "length":
        return None
    return "--max-tokens" if answer.tokens == sampling.max_tokens else "the context is full"


def describe(answer: Answer) -> str:
    """One line of figures."""
    figures = [f"{answer.tokens} tokens", f"TTFT {1000 * (answer.first_token - answer.start):.0f} ms"]
    if answer.end > answer.first_token:
        figures.append(f"{(answer.tokens - 1) / (answer.end - answer.first_token):.1f} tokens/s")
    speculation = answer.last.speculation if answer.last is not None else None
    if speculation is not None and speculation.verify_steps:
        figures.append(f"accept length {speculation.verify_emitted_tokens / speculation.verify_steps:.2f}")
    return ", ".join(figures)
