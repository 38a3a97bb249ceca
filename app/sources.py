"""Where settings come from beside flags: the environment (`TANDEM_*`) and a YAML or TOML file (`--config`).

A flag goes before the environment, the environment before the file, the file before the default.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import yaml
from cyclopts import App, ArgumentCollection, Token

from app.settings import SettingsError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PREFIX = "TANDEM_"
_OF_KERNELS = PREFIX + "CPU_"  # read by kernels/cpu itself
_PARSERS: dict[str, Callable[[str], Any]] = {
    ".toml": tomllib.loads,
    ".yaml": yaml.safe_load,
    ".yml": yaml.safe_load,
}


class Sources:
    """Fills in what the command line leaves open. Raises SettingsError for names that no command has."""

    def __init__(self, environ: Mapping[str, str], known: Collection[str]) -> None:
        """`known` are the names of all settings, spelled as fields (`page_size`)."""
        self._environ = environ
        self._known = known

    def __call__(self, _app: App, _commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        found = {
            key.removeprefix(PREFIX).lower(): value
            for key, value in self._environ.items()
            if key.startswith(PREFIX) and not key.startswith(_OF_KERNELS)
        }
        self._fill(arguments, found, "the environment", lambda name: PREFIX + name.upper())
        path = next((a.tokens[0].value for a in arguments if a.name == "--config" and a.tokens), None)
        if path is not None:
            self._fill(arguments, _read(Path(path)), path, lambda name: name)

    def _fill(
        self,
        arguments: ArgumentCollection,
        values: Mapping[str, Any],
        source: str,
        spell: Callable[[str], str],
    ) -> None:
        for name in values:
            if name not in self._known:
                near = difflib.get_close_matches(name, self._known, 1)
                hint = f"; did you mean {spell(near[0])}?" if near else ""
                raise SettingsError(f"unknown setting {spell(name)} in {source}{hint}")
        for argument in arguments:
            name = argument.name.removeprefix("--").replace("-", "_")
            value = values.get(name)
            if value is None or argument.tokens:
                continue
            takes_many = argument.token_count()[1]
            if isinstance(value, list) and not takes_many:
                raise SettingsError(f"{spell(name)} in {source}: one value is needed, not a list")
            for index, item in enumerate(value if isinstance(value, list) else [value]):
                argument.append(Token(keyword=spell(name), value=str(item), source=source, index=index))


def _read(path: Path) -> dict[str, Any]:
    """The settings in a file, names spelled as fields."""
    parse = _PARSERS.get(path.suffix)
    if parse is None:
        raise SettingsError(f"--config {path}: its name must end in .yaml, .yml or .toml")
    try:
        values = parse(path.read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        # A ValueError is a number or a date that is none, as well as text or TOML that cannot be decoded.
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise SettingsError(f"--config {path}: cannot be read ({reason})") from error
    if not isinstance(values, dict) or any(isinstance(value, dict) for value in values.values()):
        raise SettingsError(f"--config {path}: must be a flat list of settings, as `page-size: 16`")
    return {str(name).replace("-", "_"): value for name, value in values.items()}
