"""The version that is installed."""

from __future__ import annotations

from importlib import metadata


def version() -> str:
    """As the package's metadata has it; `unknown` in a source tree that nobody installed."""
    try:
        return metadata.version("tandem")
    except metadata.PackageNotFoundError:
        return "unknown"
