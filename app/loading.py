"""What a terminal shows while a model loads."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from rich.console import Console
from rich.text import Text

from app.settings import EngineSettings


def loading(settings: EngineSettings, console: Console | None = None) -> AbstractContextManager[object]:
    """Say what loads while it does, on stderr unless another `console` is given, and only on a terminal."""
    name = "the default model" if settings.model is None else Path(settings.model).name
    screen = console or Console(stderr=True)
    return screen.status(Text(f"loading {name}…"))
