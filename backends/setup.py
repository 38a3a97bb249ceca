"""Which backends a worker runs, and building them. Each worker gets its own; nothing here is shared or kept."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import msgspec
import torch

from backends.base import AttentionBackend, Workspace, reachable
from backends.forward import ForwardBatch
from backends.hybrid import HybridBackend
from backends.kv_pool import KVLayout
from backends.options import AttentionOptions
from backends.platform import Platform, platform_of
from backends.registry import (
    BackendArgs,
    BackendError,
    BackendSpecs,
    automatic_name,
    installed_specs,
    usable_spec,
)
from backends.two_batch import TwoBatchBackend

logger = logging.getLogger(__name__)

Role = Literal["target", "draft"]
Wrap = Callable[[AttentionBackend], AttentionBackend]


class ResolvedAttentionBackends(msgspec.Struct, frozen=True):
    """The names that a worker runs, and whether the drafter's own setting decided them."""

    prefill: str
    decode: str
    is_draft_override: bool


class AttentionBackends(msgspec.Struct, frozen=True):
    """A worker's backends. Outside PD-mux the decode fields are None and ()."""

    attn_backend: AttentionBackend
    decode_attn_backend: AttentionBackend | None
    decode_attn_backend_group: tuple[AttentionBackend, ...]
    prefill_attention_backend_str: str
    decode_attention_backend_str: str

    def for_pass(self, batch: ForwardBatch, sm_group: int = 0) -> AttentionBackend:
        """Who runs `batch`: with PD-mux, decode goes to the backend of the group of multiprocessors it is on."""
        if self.decode_attn_backend_group and batch.mode.is_decode_or_idle():
            return self.decode_attn_backend_group[sm_group]
        return self.attn_backend

    def reachable(self) -> list[AttentionBackend]:
        """Every backend of this worker: those named here, and those below them, each once."""
        found = {
            id(backend): backend
            for top in (self.attn_backend, *self.decode_attn_backend_group)
            for backend in reachable(top)
        }
        return list(found.values())


class CapturesHiddenStates(Protocol):
    """What a drafter's set-up asks of the target."""

    @property
    def capturable_layers(self) -> range:
        """Ids of the layers whose outputs a pass can give back."""


def configure_aux_hidden_state_capture(
    model: CapturesHiddenStates, layer_ids: Sequence[int]
) -> tuple[int, ...]:
    """The layers that every pass of the target captures for its drafter, in order.

    Raises BackendError, naming the model, if it cannot give the output of one of them.
    """
    capturable = model.capturable_layers
    missing = [layer for layer in layer_ids if layer not in capturable]
    if missing:
        can = f"layers {capturable.start} to {capturable.stop - 1}" if capturable else "no layer"
        raise BackendError(
            f"{type(model).__name__} cannot give the drafter the hidden states of layers "
            f"{', '.join(map(str, missing))}: it captures {can}"
        )
    return tuple(layer_ids)


def resolve_attention_backends(
    options: AttentionOptions,
    *,
    role: Role,
    device: torch.device,
    layout: KVLayout,
    specs: BackendSpecs | None = None,
) -> ResolvedAttentionBackends:
    """Two usable names for a worker with this KV layout. Raises BackendError for a name that was asked for and is not.

    Order: a drafter's own name (for both), the prefill or decode name, the common name, the automatic one. A
    drafter that cannot run a name it inherits takes the automatic one, with a warning. `specs` are the installed
    ones unless given.
    """
    specs = installed_specs() if specs is None else specs
    override = options.speculative_draft_attention_backend if role == "draft" else None
    if override is not None:
        usable_spec(override, device, layout, specs)
        return ResolvedAttentionBackends(override, override, True)

    def resolve(asked: str | None) -> str:
        name = asked or options.attention_backend
        if name is None:
            return automatic_name(device, layout, specs)
        try:
            usable_spec(name, device, layout, specs)
        except BackendError as error:
            if role == "target":
                raise
            automatic = automatic_name(device, layout, specs)
            logger.warning("the drafter runs attention backend %r: %s", automatic, error)
            return automatic
        return name

    return ResolvedAttentionBackends(
        resolve(options.prefill_attention_backend), resolve(options.decode_attention_backend), False
    )


def build_attention_backends(
    *,
    options: AttentionOptions,
    role: Role,
    device: torch.device,
    layout: KVLayout,
    wrap: Wrap | None = None,
    platform: Platform | None = None,
    specs: BackendSpecs | None = None,
) -> AttentionBackends:
    """Build and stamp a worker's backends.

    wrap: what a model with recurrent state puts around a backend, once, whatever that is made of.
    platform, specs: the device's own and the installed ones unless given.
    """
    specs = installed_specs() if specs is None else specs
    platform = platform_of(device) if platform is None else platform
    platform.prepare_device(device)
    resolved = resolve_attention_backends(options, role=role, device=device, layout=layout, specs=specs)
    workspace = Workspace(device)  # this worker's own

    def build(init_new_workspace: bool = False) -> AttentionBackend:
        args = BackendArgs(device, layout, Workspace(device) if init_new_workspace else workspace)
        prefill = specs[resolved.prefill].make(args)
        backend = prefill
        if resolved.decode != resolved.prefill:
            backend = HybridBackend(
                prefill, specs[resolved.decode].make(args), options.speculative_attention_mode
            )
        return backend if wrap is None else wrap(backend)

    group: tuple[AttentionBackend, ...] = ()
    if options.enable_pdmux:
        attn_backend = build(init_new_workspace=True)
        group = tuple(build() for _ in range(options.sm_group_num))
    elif options.enable_two_batch_overlap and role == "target":
        attn_backend = TwoBatchBackend.make(build)
    else:
        attn_backend = build()

    backends = AttentionBackends(
        attn_backend, group[0] if group else None, group, resolved.prefill, resolved.decode
    )
    if role == "target":
        platform.after_backends_built(device, backends)
    if resolved.decode != resolved.prefill and options.speculative_attention_mode == "prefill":
        logger.warning(
            "%s worker: blocks are verified on %r and decoded on %r, so a speculated text may part from a plain "
            "one by rounding; speculative attention mode 'decode' keeps them equal",
            role,
            resolved.prefill,
            resolved.decode,
        )
    for name in dict.fromkeys((resolved.prefill, resolved.decode)) if role == "target" else ():
        if (inexact := specs[name].inexact) is not None:
            logger.warning(
                "on %r, %s depend by rounding on what shares their pass, so a speculated text may part from a plain "
                "one",
                name,
                inexact,
            )
    for backend in backends.reachable():
        backend.stamp(resolved.prefill, resolved.decode, options.speculative_attention_mode, specs)
    return backends
