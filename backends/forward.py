"""What one forward pass is: its mode, its batch, and the context that says which backend it runs on.

A batch is flat: the query tokens of all sequences lie one after another in `input_ids`, and each sequence
says how many of them are its own and how long its context is once they are written. A decode step, a chunk of
a prompt and a block to verify differ in those lengths only, so they mix freely in one pass.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from backends.base import AttentionBackend
    from backends.kv_pool import KVPool
    from backends.state_pool import StatePool


class ForwardMode(enum.Enum):
    """What a pass is for. Backends and dispatch handlers choose their kernels by it."""

    EXTEND = "extend"  # prompt tokens, whole or a chunk, with or without a cached prefix
    DECODE = "decode"  # one token for every sequence
    MIXED = "mixed"  # prompt chunks beside decode or verify rows
    TARGET_VERIFY = "target_verify"  # the last token and its drafts, for every sequence
    DRAFT_EXTEND = "draft_extend"  # a drafter catching up with accepted tokens
    IDLE = "idle"  # no tokens

    def is_decode_or_idle(self) -> bool:
        return self in (ForwardMode.DECODE, ForwardMode.IDLE)


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One pass over T query tokens of S sequences. Integer tensors are int64 on the runner's device.

    input_ids, positions, out_slots: [T]. `out_slots` is where each token's key and value are written.
    query_lens: S query tokens a sequence, in order; their sum is T.
    context_lens: S lengths of context *after* this pass, queries included, so that query j of a sequence has
        position `context_len - query_len + j`.
    slot_table: [rows, max_context_len] int32; `slot_table[table_rows[s], p]` is the KV slot of position p.
    table_rows: S rows of that table.
    logits_rows: [L] which of the T tokens need logits.
    causal: False lets the query tokens of a sequence see each other both ways (DFlash blocks).
    num_prompt_rows: S counts of query tokens, from a sequence's first, that belong to its prompt. They are computed
        as prefill is, the others as decode and verify are, also when they are recomputed. None: all as `mode` says.
    capture_layers: ids of layers whose output hidden states the caller wants back.
    num_draft_rows: S counts of query tokens, up to a sequence's last, that are guesses. None: none.
    state_pool: recurrent state, by table row; None for models without.
    state_checkpoints: S mappings from a position to the row of `state_pool` in which the state after that many tokens
        is to be kept, as soon as they are certain. None: none.
    prefix_lens: S lengths of context that the prefix cache had for a sequence when it came, however its prompt has
        been cut since. None: all that is before this pass.
    features: [T, hidden_size] what a chain drafter reads beside each token. None for other models.
    """

    mode: ForwardMode
    input_ids: torch.Tensor
    positions: torch.Tensor
    out_slots: torch.Tensor
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    slot_table: torch.Tensor
    table_rows: tuple[int, ...]
    logits_rows: torch.Tensor
    kv_pool: KVPool
    causal: bool = True
    num_prompt_rows: tuple[int, ...] | None = None
    capture_layers: tuple[int, ...] = ()
    num_draft_rows: tuple[int, ...] | None = None
    state_pool: StatePool | None = None
    state_checkpoints: tuple[Mapping[int, int], ...] | None = None
    prefix_lens: tuple[int, ...] | None = None
    features: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """A pass in progress. `plan` is what `backend.plan(batch)` returned: worked out once, read by every layer."""

    batch: ForwardBatch
    backend: AttentionBackend
    plan: object


_context: ContextVar[ForwardContext] = ContextVar("tandem_forward_context")


@contextmanager
def forward_context(
    batch: ForwardBatch, backend: AttentionBackend, plan: object = None
) -> Iterator[ForwardContext]:
    """Make `batch` and `backend` those of the pass that the current thread runs. Contexts nest.

    plan: what `backend.plan(batch)` has returned already; None plans now.
    """
    context = ForwardContext(batch, backend, backend.plan(batch) if plan is None else plan)
    token = _context.set(context)
    try:
        yield context
    finally:
        _context.reset(token)


def get_attn_backend() -> AttentionBackend:
    """The backend of the forward pass that this thread is in. Raises RuntimeError outside one."""
    return get_forward_context().backend


def get_forward_context() -> ForwardContext:
    """The innermost `forward_context` of this thread. Raises RuntimeError outside one."""
    try:
        return _context.get()
    except LookupError:
        raise RuntimeError("no forward pass is running here: enter forward_context() first") from None
