"""What a device needs around the building of backends: two hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from backends.setup import AttentionBackends


class Platform:
    """A device that needs nothing."""

    def prepare_device(self, device: torch.device) -> None:
        """Called for every worker, before its backends are resolved."""

    def after_backends_built(self, device: torch.device, backends: AttentionBackends) -> None:
        """Called for every worker but drafters, before stamping and before any graph is captured."""


class BlasPlatform(Platform):
    """CUDA and MUSA make their BLAS handle when it is first used, which must not happen inside a capture."""

    def prepare_device(self, device: torch.device) -> None:
        one = torch.ones(1, 1, device=device)
        torch.mm(one, one)


def platform_of(device: torch.device) -> Platform:
    """The hooks of `device`."""
    return BlasPlatform() if device.type in ("cuda", "musa") else Platform()
