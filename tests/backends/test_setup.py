"""Each worker's names are resolved by one function, and every backend it can reach is its own and says so."""

from __future__ import annotations

import itertools
import logging

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backends.base import AttentionBackend
from backends.hybrid import HybridBackend
from backends.options import AttentionOptions
from backends.parts import Part, PartedBackend
from backends.platform import Platform
from backends.registry import BackendError
from backends.setup import (
    AttentionBackends,
    Role,
    build_attention_backends,
    configure_aux_hidden_state_capture,
    resolve_attention_backends,
)
from backends.two_batch import TwoBatchBackend
from tests.backends.fakes import CPU, LATENT, LAYOUT, NamedBackend, registry

names = st.sampled_from([None, "one", "two", "torch_native"])
some_options = st.builds(
    AttentionOptions,
    attention_backend=names,
    prefill_attention_backend=names,
    decode_attention_backend=names,
    speculative_draft_attention_backend=names,
    speculative_attention_mode=st.sampled_from(["prefill", "decode"]),
    enable_pdmux=st.booleans(),
    sm_group_num=st.integers(1, 3),
    enable_two_batch_overlap=st.booleans(),
)
roles = st.sampled_from(["target", "draft"])


class RecordingPlatform(Platform):
    """Notes its hooks, and what the backends looked like then."""

    def __init__(self) -> None:
        self.events: list[object] = []

    def prepare_device(self, device: torch.device) -> None:
        self.events.append("prepare")

    def after_backends_built(self, device: torch.device, backends: AttentionBackends) -> None:
        self.events.append([backend.prefill_attention_backend_str for backend in backends.reachable()])


class Wrapper(PartedBackend):
    """As a model with recurrent state would put around its backends."""

    def __init__(self, inner: AttentionBackend) -> None:
        self.inner = inner

    def children(self):
        yield self.inner

    def assign(self, batch):
        yield self.inner, Part(batch)


def build(
    options: AttentionOptions, role: Role = "target", layout=LAYOUT, **kwargs: object
) -> AttentionBackends:
    return build_attention_backends(
        options=options, role=role, device=CPU, layout=layout, specs=registry(), **kwargs
    )


@given(options=some_options, role=roles)
def test_names_resolve_in_one_order(options: AttentionOptions, role: Role) -> None:
    resolved = resolve_attention_backends(options, role=role, device=CPU, layout=LAYOUT, specs=registry())
    override = options.speculative_draft_attention_backend if role == "draft" else None
    for got, flag in (
        (resolved.prefill, options.prefill_attention_backend),
        (resolved.decode, options.decode_attention_backend),
    ):
        assert got == next(n for n in (override, flag, options.attention_backend, "torch_native") if n)
    assert resolved.is_draft_override == (override is not None)


def test_nothing_asked_for_is_automatic_and_builds() -> None:
    built = build_attention_backends(options=AttentionOptions(), role="target", device=CPU, layout=LAYOUT)
    assert built.prefill_attention_backend_str == built.decode_attention_backend_str == "torch_native"


@pytest.mark.parametrize(
    "options",
    [
        AttentionOptions(attention_backend="nowhere"),
        AttentionOptions(decode_attention_backend="mla"),
        AttentionOptions(attention_backend="misspelt"),
    ],
)
def test_a_target_that_cannot_run_what_was_asked_for_is_refused(options: AttentionOptions) -> None:
    with pytest.raises(BackendError, match="usable here: one, torch_native, two"):
        build(options)


def test_a_drafter_that_cannot_run_an_inherited_name_takes_its_automatic_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = AttentionOptions(attention_backend="mla", decode_attention_backend="one")
    assert build(options, layout=LATENT).prefill_attention_backend_str == "mla"
    with caplog.at_level(logging.WARNING):
        drafter = build(options, "draft")
    assert drafter.prefill_attention_backend_str == "torch_native"
    assert drafter.decode_attention_backend_str == "one"
    assert "'mla' cannot run" in caplog.text


def test_a_drafter_cannot_run_an_unusable_name_of_its_own() -> None:
    with pytest.raises(BackendError, match="'mla' cannot run"):
        build(AttentionOptions(speculative_draft_attention_backend="mla"), "draft")


@given(options=some_options, role=roles, wrapped=st.booleans())
def test_every_reachable_backend_is_stamped_once_with_the_workers_names(
    options: AttentionOptions, role: Role, wrapped: bool
) -> None:
    built = build(options, role, wrap=Wrapper if wrapped else None)
    for backend in built.reachable():
        assert backend.prefill_attention_backend_str == built.prefill_attention_backend_str
        assert backend.decode_attention_backend_str == built.decode_attention_backend_str
        assert backend.speculative_attention_mode == options.speculative_attention_mode
        with pytest.raises(RuntimeError, match="already stamped"):
            backend.stamp("one", "one")


@given(options=some_options, role=roles)
def test_names_decide_what_is_built(options: AttentionOptions, role: Role) -> None:
    built = build(options, role)
    wanted = {built.prefill_attention_backend_str, built.decode_attention_backend_str}
    leaves = [backend for backend in built.reachable() if isinstance(backend, NamedBackend)]
    assert {leaf.given_name for leaf in leaves} == wanted


def test_plain_has_no_decode_backends() -> None:
    built = build(AttentionOptions(attention_backend="one"))
    assert isinstance(built.attn_backend, NamedBackend)
    assert built.decode_attn_backend is None
    assert built.decode_attn_backend_group == ()


@pytest.mark.parametrize("role", ["target", "draft"])
def test_pdmux_comes_first_and_has_a_decode_backend_for_each_group(role: Role) -> None:
    options = AttentionOptions(enable_pdmux=True, sm_group_num=3, enable_two_batch_overlap=True)
    built = build(options, role)
    assert isinstance(built.attn_backend, NamedBackend)
    assert len(set(map(id, built.decode_attn_backend_group))) == 3
    assert built.decode_attn_backend is built.decode_attn_backend_group[0]
    assert built.attn_backend not in built.decode_attn_backend_group
    workspaces = [backend.args.workspace for backend in built.reachable()]
    assert workspaces.count(workspaces[0]) == 1
    assert workspaces[1:] == [workspaces[1]] * 3


def test_two_batch_overlap_wraps_the_targets_backends_and_leaves_a_drafter_plain() -> None:
    options = AttentionOptions(attention_backend="one", enable_two_batch_overlap=True)
    target = build(options)
    assert isinstance(target.attn_backend, TwoBatchBackend)
    assert len(target.reachable()) == 4
    assert target.decode_attn_backend is None
    assert isinstance(build(options, "draft").attn_backend, NamedBackend)


def test_different_names_make_a_hybrid_which_is_wrapped_once_as_a_whole() -> None:
    options = AttentionOptions(prefill_attention_backend="one", decode_attention_backend="two")
    wrapper = build(options, wrap=Wrapper).attn_backend
    assert isinstance(wrapper, Wrapper)
    assert isinstance(wrapper.inner, HybridBackend)
    assert [half.given_name for half in wrapper.inner.children()] == ["one", "two"]


@pytest.mark.parametrize(
    ("changes", "warned"),
    [
        ({}, True),
        ({"speculative_attention_mode": "decode"}, False),
        ({"decode_attention_backend": "one"}, False),
    ],
)
def test_start_up_says_where_verify_and_decode_run_different_backends(
    changes: dict[str, str], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    options = AttentionOptions(prefill_attention_backend="one", decode_attention_backend="two")
    with caplog.at_level(logging.WARNING):
        build(msgspec.structs.replace(options, **changes))
    assert ("verified on 'one' and decoded on 'two'" in caplog.text) == warned


@given(first=some_options, second=some_options, both=st.permutations(["target", "draft"]))
def test_workers_share_neither_backends_nor_workspaces(
    first: AttentionOptions, second: AttentionOptions, both: list[Role]
) -> None:
    one, other = build(first, both[0]), build(second, both[1])
    assert not {id(b) for b in one.reachable()} & {id(b) for b in other.reachable()}

    def workspaces(backends: AttentionBackends) -> set[int]:
        return {id(b.args.workspace) for b in backends.reachable() if isinstance(b, NamedBackend)}

    assert not workspaces(one) & workspaces(other)


def test_building_a_drafter_leaves_the_target_as_it_was_in_both_orders() -> None:
    options = AttentionOptions(
        attention_backend="one",
        decode_attention_backend="two",
        speculative_draft_attention_backend="torch_native",
    )
    before = msgspec.json.encode(options)
    for order in itertools.permutations(["target", "draft"]):
        built = {role: build(options, role) for role in order}
        assert built["target"].prefill_attention_backend_str == "one"
        assert built["target"].decode_attention_backend_str == "two"
        assert {b.prefill_attention_backend_str for b in built["target"].reachable()} == {"one"}
        assert {b.decode_attention_backend_str for b in built["draft"].reachable()} == {"torch_native"}
        assert {b.prefill_attention_backend_str for b in built["draft"].reachable()} == {"torch_native"}
    assert msgspec.json.encode(options) == before


def test_platform_hooks_run_around_building_and_before_stamping() -> None:
    platform = RecordingPlatform()
    build(AttentionOptions(enable_pdmux=True, sm_group_num=2), platform=platform)
    assert platform.events == ["prepare", [None, None, None]]


def test_a_drafter_gets_the_first_platform_hook_only() -> None:
    platform = RecordingPlatform()
    build(AttentionOptions(), "draft", platform=platform)
    assert platform.events == ["prepare"]


def test_the_device_is_prepared_before_names_are_resolved() -> None:
    platform = RecordingPlatform()
    with pytest.raises(BackendError):
        build(AttentionOptions(attention_backend="misspelt"), platform=platform)
    assert platform.events == ["prepare"]


class ThreeLayers:
    capturable_layers = range(3)


class NoLayers:
    capturable_layers = range(0)


def test_layers_to_capture_are_those_that_the_model_can_give() -> None:
    assert configure_aux_hidden_state_capture(ThreeLayers(), [2, 0]) == (2, 0)
    assert configure_aux_hidden_state_capture(NoLayers(), []) == ()


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (ThreeLayers(), "ThreeLayers cannot give .* layers 3, -1: it captures layers 0 to 2"),
        (NoLayers(), "NoLayers cannot give .* it captures no layer"),
    ],
)
def test_a_model_that_cannot_give_its_hidden_states_is_refused_by_name(model: object, text: str) -> None:
    with pytest.raises(BackendError, match=text):
        configure_aux_hidden_state_capture(model, [1, 3, -1])


def test_group_count_must_be_positive() -> None:
    with pytest.raises(ValueError, match="sm_group_num"):
        AttentionOptions(sm_group_num=0)
