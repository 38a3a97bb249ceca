"""Which attention backends there are, which of them can run here, and how each one handles a latent cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points

import torch

from backends import flashinfer, flashinfer_mla, triton
from backends.base import AttentionBackend, Workspace
from backends.flashinfer import FlashInferBackend
from backends.flashinfer_mla import FlashInferMLABackend
from backends.handlers import Handler, always_absorbed, by_prefix_length
from backends.kv_pool import KVLayout
from backends.torch_native import TorchNativeBackend
from backends.triton import TritonBackend

ENTRY_POINTS = "tandem.attention_backends"


class BackendError(Exception):
    """A backend that is unknown or cannot run here. The text lists what can."""


@dataclass(frozen=True, slots=True)
class BackendArgs:
    """What a backend is made for: one worker, on its device, over its KV pool. It may use `workspace`."""

    device: torch.device
    layout: KVLayout
    workspace: Workspace


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """One entry of the registry.

    make: gives a new backend.
    unusable: why a backend of this name cannot serve a KV layout on a device, or None if it can.
    handler: which method a pass of an MLA model takes under this name.
    inexact: which rows have results that depend, by rounding, on what shares their pass; None if none do.
    """

    make: Callable[[BackendArgs], AttentionBackend]
    unusable: Callable[[torch.device, KVLayout], str | None]
    handler: Handler = by_prefix_length
    inexact: str | None = None


BackendSpecs = Mapping[str, BackendSpec]


def _runs_anywhere(device: torch.device, layout: KVLayout) -> str | None:
    return None


_BUILT_IN: BackendSpecs = {
    TorchNativeBackend.name: BackendSpec(lambda args: TorchNativeBackend(), _runs_anywhere),
    TritonBackend.name: BackendSpec(lambda args: TritonBackend(), triton.unusable, always_absorbed),
    FlashInferBackend.name: BackendSpec(
        lambda args: FlashInferBackend(args.device, args.workspace),
        flashinfer.unusable,
        inexact="prompts, and blocks verified in speculative attention mode 'prefill',",
    ),
    FlashInferMLABackend.name: BackendSpec(
        lambda args: FlashInferMLABackend(args.device, args.workspace),
        flashinfer_mla.unusable,
        flashinfer_mla.handler,
        inexact="all rows",
    ),
}

# Keys and values, and latent entries, as most models have them.
_COMMON_LAYOUTS = (KVLayout(1, 8, 128, 128, torch.bfloat16), KVLayout(1, 1, 576, 0, torch.bfloat16))

# Where no name is given, in order of preference. Only built-in ones are chosen unasked.
_AUTOMATIC = {"cuda": (TritonBackend.name, TorchNativeBackend.name)}
_AUTOMATIC_ELSEWHERE = (TorchNativeBackend.name,)


def load_specs(entries: Iterable[EntryPoint]) -> BackendSpecs:
    """The built-in backends, and those of `entries`, each of which names a BackendSpec.

    One that cannot be imported is listed with the reason; a built-in name cannot be taken.
    """
    specs = {}
    for entry in entries:
        try:
            spec = entry.load()
        except Exception as error:
            spec = _broken(f"{entry.value} cannot be loaded: {error}")
        specs[entry.name] = (
            spec if isinstance(spec, BackendSpec) else _broken(f"{entry.value} is no BackendSpec")
        )
    return {**specs, **_BUILT_IN}


@cache
def installed_specs() -> BackendSpecs:
    """The built-in backends and those of installed packages (entry points of `tandem.attention_backends`)."""
    return load_specs(entry_points(group=ENTRY_POINTS))


def usable_spec(name: str, device: torch.device, layout: KVLayout, specs: BackendSpecs) -> BackendSpec:
    """The backend called `name`. Raises BackendError if there is none, or if it cannot serve here."""
    _check(name, device, {other: spec.unusable(device, layout) for other, spec in specs.items()})
    return specs[name]


def check_name(name: str, device: torch.device, specs: BackendSpecs) -> None:
    """Raises BackendError if there is no backend called `name`, or if it can serve no model on `device`."""
    reasons = {
        other: [spec.unusable(device, layout) for layout in _COMMON_LAYOUTS] for other, spec in specs.items()
    }
    _check(name, device, {other: None if None in each else each[0] for other, each in reasons.items()})


def _check(name: str, device: torch.device, reasons: Mapping[str, str | None]) -> None:
    if name in reasons and reasons[name] is None:
        return
    usable = ", ".join(sorted(other for other, reason in reasons.items() if reason is None)) or "none"
    others = "".join(
        f"; {other}: {reason}" for other, reason in sorted(reasons.items()) if reason is not None
    )
    problem = f"cannot run on {device}" if name in reasons else "is unknown"
    raise BackendError(f"attention backend {name!r} {problem}; usable here: {usable}{others}")


def automatic_name(device: torch.device, layout: KVLayout, specs: BackendSpecs) -> str:
    """The preferred backend of the device that can serve here. Raises BackendError if there is none."""
    preferred = _AUTOMATIC.get(device.type, _AUTOMATIC_ELSEWHERE)
    for name in preferred:
        if specs[name].unusable(device, layout) is None:
            return name
    raise BackendError(f"none of {', '.join(preferred)} can serve this model on {device}")


def _broken(reason: str) -> BackendSpec:
    def make(args: BackendArgs) -> AttentionBackend:
        raise BackendError(reason)

    return BackendSpec(make, lambda device, layout: reason)
