"""Backends are found by name, built in or from installed packages; what cannot run says why."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest
import torch

from backends.options import AttentionOptions
from backends.registry import (
    ENTRY_POINTS,
    BackendError,
    automatic_name,
    installed_specs,
    load_specs,
    usable_spec,
)
from backends.setup import build_attention_backends
from tests.backends.fakes import CPU, EXTERNAL, LATENT, LAYOUT, NamedBackend, named, registry


def test_an_unknown_name_lists_what_is_usable_here_and_why_the_rest_is_not() -> None:
    with pytest.raises(BackendError) as caught:
        usable_spec("tow", CPU, LAYOUT, registry())
    text = str(caught.value)
    assert "'tow' is unknown" in text
    assert "usable here: one, torch_native, two;" in text
    assert "nowhere: it needs a device that nobody has" in text
    assert "mla: it reads latent KV caches only" in text


def test_an_unusable_name_says_why() -> None:
    with pytest.raises(BackendError, match=r"'nowhere' cannot run on cpu; usable here: mla, one.*nobody has"):
        usable_spec("nowhere", CPU, LATENT, registry())


def test_something_is_automatic_on_a_cpu() -> None:
    assert automatic_name(CPU, LAYOUT, installed_specs()) == "torch_native"


@pytest.mark.parametrize(("reason", "chosen"), [(None, "triton"), ("it is not installed", "torch_native")])
def test_on_a_gpu_triton_is_automatic_where_it_can_run(reason: str | None, chosen: str) -> None:
    specs = {**registry(), "triton": named("triton", unusable=reason)}
    assert automatic_name(torch.device("cuda"), LAYOUT, specs) == chosen
    assert automatic_name(CPU, LAYOUT, specs) == "torch_native"


def test_without_a_backend_that_fits_nothing_is_automatic() -> None:
    specs = {"torch_native": named("torch_native", unusable="it cannot")}
    with pytest.raises(BackendError, match="none of torch_native can serve this model on cpu"):
        automatic_name(CPU, LAYOUT, specs)


def test_a_backend_of_an_installed_package_is_built_by_its_name() -> None:
    specs = load_specs([EntryPoint("external", "tests.backends.fakes:EXTERNAL", ENTRY_POINTS)])
    assert specs["external"] is EXTERNAL
    built = build_attention_backends(
        options=AttentionOptions(attention_backend="external"),
        role="target",
        device=CPU,
        layout=LAYOUT,
        specs=specs,
    )
    assert isinstance(built.attn_backend, NamedBackend)
    assert built.attn_backend.prefill_attention_backend_str == "external"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("no.such.module:SPEC", "no.such.module:SPEC cannot be loaded: No module named 'no'"),
        ("tests.backends.fakes:NOT_A_SPEC", "tests.backends.fakes:NOT_A_SPEC is no BackendSpec"),
    ],
)
def test_a_broken_package_stops_nobody_else(value: str, reason: str) -> None:
    specs = load_specs([EntryPoint("broken", value, ENTRY_POINTS)])
    assert specs["torch_native"].unusable(CPU, LAYOUT) is None
    with pytest.raises(BackendError) as caught:
        usable_spec("broken", CPU, LAYOUT, specs)
    assert reason in str(caught.value)


def test_a_package_cannot_take_a_built_in_name_nor_become_automatic() -> None:
    mine = installed_specs()["torch_native"]
    specs = load_specs(
        [EntryPoint(name, "tests.backends.fakes:EXTERNAL", ENTRY_POINTS) for name in ("torch_native", "aaa")]
    )
    assert specs["torch_native"] is mine
    assert automatic_name(CPU, LAYOUT, specs) == "torch_native"
