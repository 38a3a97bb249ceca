"""Which method an MLA pass takes: by the worker of the pass that this thread is in, and by the mode of the pass."""

from __future__ import annotations

import dataclasses
import threading

import pytest

from backends.base import AttentionBackend
from backends.dispatch import Dispatch, dispatch_attn_forward_method
from backends.forward import ForwardBatch, ForwardMode, forward_context, get_attn_backend
from backends.handlers import MHA_PREFIX_THRESHOLD, AttnForwardMethod, always_absorbed, by_prefix_length
from backends.options import AttentionOptions
from backends.parts import Piece, cut
from backends.registry import BackendSpec
from backends.setup import Role, build_attention_backends
from backends.torch_native import TorchNativeBackend
from tests.backends.fakes import CPU, LAYOUT, named, registry
from tests.backends.streams import Layer, Streams

MHA, MQA = AttnForwardMethod.MHA, AttnForwardMethod.MQA
DECODING = [ForwardMode.DECODE, ForwardMode.IDLE]
SPECULATIVE = [ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND]
OTHER = [ForwardMode.EXTEND, ForwardMode.MIXED]


def batch_of(mode: ForwardMode) -> ForwardBatch:
    return Streams(Layer(), [4]).batch({0: 4}, mode)


def backend_of(options: AttentionOptions, role: Role = "target") -> AttentionBackend:
    return build_attention_backends(
        options=options, role=role, device=CPU, layout=LAYOUT, specs=registry()
    ).attn_backend


def dispatch(backend: AttentionBackend, mode: ForwardMode) -> Dispatch:
    batch = batch_of(mode)
    with forward_context(batch, backend):
        return dispatch_attn_forward_method(batch, registry())


@pytest.mark.parametrize("speculative_mode", ["prefill", "decode"])
@pytest.mark.parametrize("mode", list(ForwardMode))
def test_the_mode_decides_between_the_two_names(mode: ForwardMode, speculative_mode: str) -> None:
    backend = backend_of(
        AttentionOptions(
            prefill_attention_backend="one",
            decode_attention_backend="two",
            speculative_attention_mode=speculative_mode,
        )
    )
    decodes = mode in DECODING or (mode in SPECULATIVE and speculative_mode == "decode")
    assert dispatch(backend, mode).backend == ("two" if decodes else "one")


@pytest.mark.parametrize("mode", [*DECODING, *SPECULATIVE, ForwardMode.MIXED])
def test_only_prefill_is_decompressed(mode: ForwardMode) -> None:
    backend = backend_of(AttentionOptions(attention_backend="one"))
    assert dispatch(backend, mode).method is MQA
    assert dispatch(backend_of(AttentionOptions()), ForwardMode.EXTEND).method is MHA


def test_the_handler_of_the_name_chooses_and_sees_the_pass() -> None:
    seen = []

    def handler(batch: ForwardBatch) -> AttnForwardMethod:
        seen.append(batch)
        return MQA

    specs: dict[str, BackendSpec] = {**registry(), "one": named("one", handler=handler)}
    backend = backend_of(AttentionOptions(attention_backend="one"))
    batch = batch_of(ForwardMode.EXTEND)
    with forward_context(batch, backend):
        assert dispatch_attn_forward_method(batch, specs) == (MQA, "one")
    assert seen == [batch]


@pytest.mark.parametrize(
    ("prefixes", "method"),
    [
        ([0, 0], MHA),
        ([0, 1], MQA),
        ([MHA_PREFIX_THRESHOLD - 1], MQA),
        ([MHA_PREFIX_THRESHOLD, 0], MHA),
    ],
)
def test_by_prefix_length_a_short_prefix_is_read_as_it_is_cached(
    prefixes: list[int], method: AttnForwardMethod
) -> None:
    batch = dataclasses.replace(
        batch_of(ForwardMode.EXTEND),
        query_lens=(2,) * len(prefixes),
        context_lens=tuple(prefix + 2 for prefix in prefixes),
    )
    assert by_prefix_length(batch) is method
    assert always_absorbed(batch) is MQA


def test_by_prefix_length_a_prompts_own_chunks_are_no_prefix() -> None:
    batch = dataclasses.replace(
        batch_of(ForwardMode.EXTEND),
        query_lens=(2, 2),
        context_lens=(102, 102),
        table_rows=(0, 0),
        prefix_lens=(0, 100),
    )
    assert by_prefix_length(cut(batch, [Piece(0, 0, 2)]).batch) is MHA
    assert by_prefix_length(cut(batch, [Piece(1, 0, 2)]).batch) is MQA


@pytest.mark.parametrize("mode", list(ForwardMode))
def test_an_unstamped_backend_falls_back_on_the_resolver(mode: ForwardMode) -> None:
    assert dispatch(TorchNativeBackend(), mode).backend == "torch_native"


def test_outside_a_pass_there_is_no_backend() -> None:
    with pytest.raises(RuntimeError, match="forward_context"):
        dispatch_attn_forward_method(batch_of(ForwardMode.DECODE))
    with pytest.raises(RuntimeError, match="forward_context"):
        get_attn_backend()


def test_contexts_nest_and_end() -> None:
    batch, outer, inner = batch_of(ForwardMode.EXTEND), TorchNativeBackend(), TorchNativeBackend()
    with forward_context(batch, outer):
        with pytest.raises(KeyError), forward_context(batch, inner):
            assert get_attn_backend() is inner
            raise KeyError
        assert get_attn_backend() is outer
    with pytest.raises(RuntimeError):
        get_attn_backend()


@pytest.mark.parametrize("first", ["target", "draft"])
def test_two_workers_with_passes_interleaved_on_two_threads_each_see_their_own(first: Role) -> None:
    """The seed's crash: the drafter's start-up, and its passes, changed what the target dispatched to."""
    options = AttentionOptions(attention_backend="one", speculative_draft_attention_backend="two")
    order: list[Role] = ["target", "draft"] if first == "target" else ["draft", "target"]
    backends = {role: backend_of(options, role) for role in order}
    turn = threading.Barrier(2, timeout=10)
    got: dict[Role, list[tuple[AttentionBackend, str]]] = {"target": [], "draft": []}

    def run(role: Role) -> None:
        for mode in ForwardMode:
            batch = batch_of(mode)
            turn.wait()
            with forward_context(batch, backends[role]):
                turn.wait()  # both are inside
                got[role].append(
                    (get_attn_backend(), dispatch_attn_forward_method(batch, registry()).backend)
                )
                turn.wait()

    threads = [threading.Thread(target=run, args=(role,)) for role in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert got["target"] == [(backends["target"], "one")] * len(ForwardMode)
    assert got["draft"] == [(backends["draft"], "two")] * len(ForwardMode)
