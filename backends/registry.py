"""Which attention backends there are, and which of them can run here."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import NamedTuple

import torch

from backends.base import AttentionBackend
from backends.torch_native import TorchNativeBackend

ENTRY_POINTS = "tandem.attention_backends"


class BackendError(Exception):
    """A backend that is unknown or cannot run here. The text lists what can."""


class BackendSpec(NamedTuple):
    """`make()` gives a new backend; `unusable(device)` says why it cannot run on a device, or None if it can."""

    make: Callable[[], AttentionBackend]
    unusable: Callable[[torch.device], str | None]


def _anywhere(device: torch.device) -> str | None:
    return None


_BUILT_IN = {TorchNativeBackend.name: BackendSpec(TorchNativeBackend, _anywhere)}


def backend_specs() -> dict[str, BackendSpec]:
    """All backends by name: the built-in ones, then those that installed packages register."""
    specs = dict(_BUILT_IN)
    for entry in entry_points(group=ENTRY_POINTS):
        specs[entry.name] = entry.load()
    return specs


def usable_backend(name: str, device: torch.device) -> BackendSpec:
    """The backend called `name`. Raises BackendError if there is none, or if it cannot run on `device`."""
    specs = backend_specs()
    reasons = {other: spec.unusable(device) for other, spec in specs.items()}
    if name in specs and reasons[name] is None:
        return specs[name]
    usable = ", ".join(other for other, reason in reasons.items() if reason is None)
    others = "".join(f"; {other}: {reason}" for other, reason in reasons.items() if reason is not None)
    raise BackendError(f"attention backend {name!r} cannot run on {device}; usable here: {usable}{others}")
