"""The `tandem` command. What runs a model is imported only once a command needs it, so that --help is quick."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from inspect import BoundArguments, signature
from inspect import Parameter as Argument
from pathlib import Path
from typing import Annotated, Any, TypeVar

from cyclopts import App, CoercionError, CycloptsError, Parameter, Token, convert
from cyclopts.help import ColumnSpec, DefaultFormatter, DescriptionRenderer, NameRenderer

from app.hints import usage
from app.loading import loading
from app.sampling_settings import ChatSettings, SamplingSettings
from app.settings import EngineSettings, ServerSettings, SettingsError
from app.sources import Sources
from app.training_settings import TrainingSettings
from app.version import version

USAGE_ERROR = 2
INTERRUPTED = 130
BROKEN_PIPE = 141

_EPILOGUE = (
    "Every option can also be set in the environment (--page-size as TANDEM_PAGE_SIZE) or in a YAML or TOML file "
    "(--config). A flag goes before the environment, the environment before the file."
)

_NAMES = ColumnSpec(renderer=NameRenderer(), no_wrap=True, style="cyclopts.name")  # a flag is never broken
_DESCRIPTIONS = ColumnSpec(renderer=DescriptionRenderer(newline_metadata=False))

SettingsT = TypeVar("SettingsT")
Flat = Annotated[SettingsT, Parameter(name="*")]


def serve(settings: Flat[ServerSettings] = ServerSettings()) -> int:
    """Serve a model over the OpenAI API."""
    from app.server import serve

    return serve(settings)


def generate(
    prompt: str | None = None,
    /,
    *,
    stats: bool = False,
    settings: Flat[EngineSettings] = EngineSettings(),
    sampling: Flat[SamplingSettings] = SamplingSettings(),
) -> int:
    """Continue a prompt and print the text as it comes, without a server.

    Parameters
    ----------
    prompt
        The text to continue, taken as it is: no chat template is applied (default: standard input).
    stats
        Tell tokens, speed and accept length on stderr at the end.
    """
    with loading(settings):
        from app.terminal import generate

    return generate(settings, sampling, prompt, stats)


def chat(
    *,
    system: str | None = None,
    stats: bool = False,
    settings: Flat[EngineSettings] = EngineSettings(),
    sampling: Flat[ChatSettings] = ChatSettings(),
) -> int:
    """Talk with a model in the terminal, without a server. Ctrl-C ends an answer, /reset the talk, /exit leaves.

    Parameters
    ----------
    system
        A system message that opens the talk.
    stats
        Tell tokens, speed and accept length after each answer.
    """
    with loading(settings):
        from app.terminal import chat

    return chat(settings, sampling, system, stats)


def train_drafter(
    out: Path,
    /,
    *,
    training: Flat[TrainingSettings] = TrainingSettings(),
    settings: Flat[EngineSettings] = EngineSettings(),
) -> int:
    """Train a DFlash drafter for a model, from text that the model writes. Killed, it goes on where it was.

    Parameters
    ----------
    out
        Folder of the drafter; what the training itself needs is in its folder `run`.
    """
    with loading(settings):
        from app.training import train_drafter

    return train_drafter(settings, training, out)


COMMANDS: tuple[Callable[..., int], ...] = (serve, generate, chat, train_drafter)


def _options(command: Callable[..., int]) -> Iterator[str]:
    """What can be set of `command`, spelled as fields."""
    for argument in signature(command).parameters.values():
        if is_dataclass(argument.default):
            yield from (field.name for field in fields(argument.default))
        elif argument.kind is Argument.KEYWORD_ONLY:
            yield argument.name


def converted(hint: Any, tokens: Sequence[Token]) -> Any:
    """`tokens` as cyclopts converts them, but for fractions, which it rounds where a whole number is asked for."""
    for token in tokens if hint in (int, int | None) else ():
        with suppress(ValueError):  # what is no number at all, cyclopts says so
            if not float(token.value).is_integer():
                raise CoercionError(token=token, target_type=int)
    return convert(hint, tokens)


def command_line(environ: Mapping[str, str]) -> App:
    """The command line, with settings that it leaves open taken from `environ`."""
    known = {name for command in COMMANDS for name in _options(command)}
    app = App(
        name="tandem",
        help="Serve language models with a drafter riding along.",
        help_epilogue=_EPILOGUE,
        version=version,
        help_formatter=DefaultFormatter(column_specs=(_NAMES, _DESCRIPTIONS)),
        default_parameter=Parameter(negative=(), converter=converted),
        config=Sources(environ, known),
    )
    for command in COMMANDS:
        app.command(command)
    return app


def parse(
    argv: Sequence[str], environ: Mapping[str, str]
) -> tuple[Callable[..., int | None], BoundArguments]:
    """The command that `argv` names, and its arguments. Raises SettingsError."""
    try:
        command, bound, _ = command_line(environ).parse_args(argv, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise SettingsError(usage(error)) from error
    bound.apply_defaults()
    return command, bound


def server_settings(environ: Mapping[str, str]) -> ServerSettings:
    """What `tandem serve` would take without any flags. Raises SettingsError."""
    _, bound = parse(["serve"], environ)
    return bound.arguments["settings"]


def explain(error: SettingsError) -> int:
    """Say on stderr, in one line, why nothing can be run; returns the exit code for that."""
    print(f"tandem: error: {' '.join(str(error).split())}", file=sys.stderr)
    return USAGE_ERROR


def main(argv: Sequence[str] | None = None) -> int:
    """Run `argv` (default: this process's own); returns the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may write what the terminal cannot show
    try:
        command, bound = parse(sys.argv[1:] if argv is None else argv, os.environ)
        code = command(*bound.args, **bound.kwargs) or 0
        sys.stdout.flush()
        return code
    except SettingsError as error:
        return explain(error)
    except (
        BrokenPipeError
    ):  # whoever reads has seen enough; what is still buffered must not fail again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
