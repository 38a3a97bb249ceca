"""Settings: one schema over flags, environment and file, and errors that name what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import pytest

from app.cli import parse, server_settings
from app.settings import ServerSettings, SettingsError
from backends.kv_pool import DTYPES
from backends.options import AttentionOptions
from engine.options import CacheOptions, SchedulerOptions
from speculative.options import SpeculativeOptions


def settings(*argv: str, environ: Mapping[str, str] | None = None) -> ServerSettings:
    return parse(["serve", *argv], environ or {})[1].arguments["settings"]


def error(*argv: str, environ: Mapping[str, str] | None = None) -> str:
    with pytest.raises(SettingsError) as caught:
        settings(*argv, environ=environ)
    return str(caught.value)


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    path = tmp_path / "tandem.yaml"
    path.write_text("port: 3\npage-size: 4\ndisable_prefix_caching: true\ndtype: float32\n")
    return path


PRECEDENCE = {
    "default": ((), {}, False, 8000),
    "file over default": ((), {}, True, 3),
    "environment over default": ((), {"TANDEM_PORT": "2"}, False, 2),
    "environment over file": ((), {"TANDEM_PORT": "2"}, True, 2),
    "flag over default": (("--port", "1"), {}, False, 1),
    "flag over file": (("--port", "1"), {}, True, 1),
    "flag over environment": (("--port", "1"), {"TANDEM_PORT": "2"}, False, 1),
    "flag over all": (("--port", "1"), {"TANDEM_PORT": "2"}, True, 1),
}


@pytest.mark.parametrize("case", PRECEDENCE)
@pytest.mark.parametrize("named_by", ["flag", "environment"])
def test_precedence(case: str, named_by: str, yaml_file: Path) -> None:
    argv, environ, with_file, port = PRECEDENCE[case]
    if with_file and named_by == "flag":
        argv = (*argv, "--config", str(yaml_file))
    elif with_file:
        environ = {**environ, "TANDEM_CONFIG": str(yaml_file)}
    assert settings(*argv, environ=environ).port == port


def test_a_file_may_spell_names_as_flags_or_as_fields(yaml_file: Path) -> None:
    read = settings("--config", str(yaml_file))
    assert (read.page_size, read.disable_prefix_caching, read.dtype) == (4, True, "float32")


def test_a_toml_file_says_the_same(yaml_file: Path, tmp_path: Path) -> None:
    toml = tmp_path / "tandem.toml"
    toml.write_text('port = 3\npage-size = 4\ndisable_prefix_caching = true\ndtype = "float32"\n')
    from_toml, from_yaml = (settings("--config", str(path)) for path in (toml, yaml_file))
    values = [
        {field.name: getattr(read, field.name) for field in fields(read)} for read in (from_toml, from_yaml)
    ]
    for read in values:
        del read["config"]
    assert values[0] == values[1]


def test_a_value_that_is_null_in_the_file_is_not_set(tmp_path: Path) -> None:
    path = tmp_path / "tandem.yaml"
    path.write_text("port:\n")
    assert settings("--config", str(path)).port == 8000


def test_every_setting_has_an_environment_variable() -> None:
    values = {
        "TANDEM_MODEL": "some/model",
        "TANDEM_MEM_FRACTION_STATIC": "0.25",
        "TANDEM_DISABLE_PREFIX_CACHING": "true",
        "TANDEM_SPECULATIVE_ALGORITHM": "none",
        "TANDEM_DRAIN_TIMEOUT": "1.5",
    }
    read = server_settings(values)
    assert read.model == "some/model"
    assert read.mem_fraction_static == 0.25
    assert read.disable_prefix_caching
    assert read.speculative_algorithm == "none"
    assert read.drain_timeout == 1.5


def test_other_environment_variables_are_nobodys_business() -> None:
    assert settings(environ={"PORT": "1", "TANDEM_CPU_ISA": "avx2"}).port == 8000


UNKNOWN = {
    "flag": (["--pot", "1"], {}, ["--pot", "--port"]),
    "environment": ([], {"TANDEM_PAGE_SIZ": "1"}, ["TANDEM_PAGE_SIZ", "TANDEM_PAGE_SIZE"]),
    "choice": (["--dtype", "int3"], {}, ["--dtype", "int3", "bfloat16"]),
    "type": (["--port", "http"], {}, ["--port", "http"]),
    "type in the environment": ([], {"TANDEM_PORT": "http"}, ["TANDEM_PORT", "http"]),
    "cache dtype": (
        ["--kv-cache-dtype", "fp8_e5m2"],
        {},
        ["--kv-cache-dtype", "fp8_e5m2", "fp8_e4m3", "int8"],
    ),
    "range": (["--mem-fraction-static", "1.5"], {}, ["--mem-fraction-static", "1.5"]),
    "range in the environment": ([], {"TANDEM_PAGE_SIZE": "0"}, ["TANDEM_PAGE_SIZE", "0"]),
    "threads": (["--threads", str(2**31)], {}, ["--threads", str(2**31)]),
    "no end of draining": (["--drain-timeout", "inf"], {}, ["--drain-timeout", "inf"]),
    "no Unicode": ([], {"TANDEM_SERVED_MODEL_NAME": "caf\udce9"}, ["--served-model-name", "Unicode"]),
    "template": (["--chat-template", "/nowhere.jinja"], {}, ["--chat-template", "/nowhere.jinja"]),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_is_not_known_is_named_with_what_is(case: str) -> None:
    argv, environ, parts = UNKNOWN[case]
    message = error(*argv, environ=environ)
    assert [part for part in parts if part not in message] == []


CONTRADICTIONS = {
    "groups of SMs for nothing": (["--sm-group-num", "2"], ["--sm-group-num", "--enable-pdmux"]),
    "a batch cut in two ways": (
        ["--enable-pdmux", "--enable-two-batch-overlap"],
        ["--enable-pdmux", "--enable-two-batch-overlap"],
    ),
    "pool below a page": (
        ["--max-total-tokens", "8", "--page-size", "16"],
        ["--max-total-tokens", "--page-size"],
    ),
    "context above the pool": (
        ["--context-length", "100", "--max-total-tokens", "99"],
        ["--context-length", "--max-total-tokens"],
    ),
    "a backend for no drafter": (
        ["--speculative-algorithm", "ngram", "--speculative-draft-attention-backend", "triton"],
        ["--speculative-draft-attention-backend", "--speculative-draft-model-path"],
    ),
    "a cache for no drafter": (
        ["--speculative-algorithm", "ngram", "--speculative-draft-kv-cache-dtype", "int8"],
        ["--speculative-draft-kv-cache-dtype", "--speculative-draft-model-path"],
    ),
    "bits for no drafter": (
        ["--speculative-algorithm", "ngram", "--speculative-draft-model-quantization", "int8"],
        ["--speculative-draft-model-quantization", "--speculative-draft-model-path"],
    ),
    "drafts without speculation": (
        ["--speculative-algorithm", "none", "--speculative-num-draft-tokens", "4"],
        ["--speculative-algorithm", "--speculative-num-draft-tokens"],
    ),
    "match lengths crossed": (
        ["--speculative-ngram-min-match", "9", "--speculative-ngram-max-match", "3"],
        ["--speculative-ngram-min-match", "--speculative-ngram-max-match"],
    ),
}


@pytest.mark.parametrize("flag", ["--page-size", "--max-total-tokens", "--stream-interval"])
def test_a_fraction_is_no_whole_number(flag: str) -> None:
    assert f'{flag}: unable to convert "1.5" into int' in error(flag, "1.5")


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradictions_name_both_sides(case: str) -> None:
    argv, names = CONTRADICTIONS[case]
    message = error(*argv)
    assert [name for name in names if name not in message] == []


def test_the_sides_of_a_contradiction_may_come_from_different_places(tmp_path: Path) -> None:
    path = tmp_path / "tandem.yaml"
    path.write_text("max-total-tokens: 8\n")
    message = error("--config", str(path), environ={"TANDEM_PAGE_SIZE": "16"})
    assert "--page-size" in message


BAD_FILES = {
    "absent": ("tandem.yaml", None, "No such file"),
    "of another kind": ("tandem.ini", "port=1", ".yaml"),
    "broken yaml": ("tandem.yaml", "port: [1", "cannot be read"),
    "broken toml": ("tandem.toml", "port = ", "cannot be read"),
    "binary": ("tandem.yaml", b"\xff\xfe\x00", "cannot be read"),
    "nested": ("tandem.yaml", "server:\n  port: 1\n", "flat"),
    "not a mapping": ("tandem.yaml", "- port\n", "flat"),
    "unknown setting": ("tandem.yaml", "prot: 1\n", "prot"),
    "several values": ("tandem.yaml", "port: [1, 2]\n", "port"),
    "a day that is none": ("tandem.yaml", "served-model-name: 2024-13-01\n", "month"),
    "a number that is none": ("tandem.yml", "port: 0x_\n", "base 16"),
    "a number too long to read": ("tandem.toml", f"port = {'9' * 5000}\n", "4300 digits"),
    "deep yaml": ("tandem.yaml", "[" * 5000, "recursion"),
    "deep toml": ("tandem.toml", "port = " + "[" * 5000, "recursion"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_file_that_cannot_be_used_is_named(case: str, tmp_path: Path) -> None:
    name, content, reason = BAD_FILES[case]
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    message = error("--config", str(path))
    assert str(path) in message
    assert reason in message


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        settings().port = 1  # type: ignore[misc]


def test_an_api_key_is_not_shown() -> None:
    assert "hush" not in repr(settings("--api-key", "hush"))


def test_the_parts_get_their_options() -> None:
    read = settings(
        *("--model", "some/model", "--dtype", "float32", "--device", "cpu", "--context-length", "64"),
        *("--attention-backend", "a", "--prefill-attention-backend", "b", "--decode-attention-backend", "c"),
        *("--mem-fraction-static", "0.5", "--max-total-tokens", "640", "--page-size", "8"),
        *("--speculative-attention-mode", "decode", "--enable-pdmux", "--sm-group-num", "2"),
        *("--kv-cache-dtype", "bf16", "--disable-prefix-caching", "--mamba-track-interval", "48"),
        *("--max-running-requests", "3", "--max-queued-requests", "4", "--chunked-prefill-size", "5"),
        *("--speculative-num-draft-tokens", "6"),
    )
    model, attention = read.model_options(), read.attention_options()
    assert (model.model, model.dtype, model.device, model.context_length) == (
        "some/model",
        "float32",
        "cpu",
        64,
    )
    assert attention == AttentionOptions(
        attention_backend="a",
        prefill_attention_backend="b",
        decode_attention_backend="c",
        speculative_attention_mode="decode",
        enable_pdmux=True,
        sm_group_num=2,
    )
    assert read.cache_options() == CacheOptions(
        mem_fraction_static=0.5,
        max_total_tokens=640,
        page_size=8,
        kv_cache_dtype="bf16",
        enable_prefix_caching=False,
        mamba_track_interval=48,
    )
    assert read.scheduler_options() == SchedulerOptions(
        max_running_requests=3, max_queued_requests=4, chunked_prefill_size=5
    )
    assert read.speculative_options() == SpeculativeOptions(num_draft_tokens=6)


def test_left_alone_the_parts_keep_their_own_defaults() -> None:
    read = settings()
    assert read.attention_options() == AttentionOptions()
    assert read.cache_options() == CacheOptions()
    assert read.scheduler_options() == SchedulerOptions()
    assert read.speculative_options() == SpeculativeOptions(has_drafter=True)
    assert settings("--model", "some/model").speculative_options() == SpeculativeOptions()


def test_a_model_is_not_split_over_devices() -> None:
    assert ServerSettings(tp_size=1) == ServerSettings()
    with pytest.raises(SettingsError, match="--tp-size 2 is not supported: .* start a server on each device"):
        ServerSettings(tp_size=2)


@pytest.mark.parametrize("algorithm", ["auto", "dflash"])
def test_the_default_model_has_a_drafter_and_another_model_only_the_one_that_is_named(algorithm: str) -> None:
    drafting = ("--speculative-algorithm", algorithm)
    ours = settings(*drafting).draft_model_options().model
    assert (Path(ours) / "model.safetensors").is_file()
    assert settings(*drafting).speculative_options().has_drafter
    named = settings(*drafting, "--speculative-draft-model-path", "some/drafter")
    assert named.draft_model_options().model == "some/drafter"
    assert (
        not settings("--speculative-algorithm", "auto", "--model", "some/model")
        .speculative_options()
        .has_drafter
    )
    assert settings().speculative_options().has_drafter, "by default it drafts with it"


def test_two_batch_overlap_can_be_asked_for() -> None:
    assert settings("--enable-two-batch-overlap").attention_options().enable_two_batch_overlap


@pytest.mark.parametrize("name", ["auto", *DTYPES])
def test_a_cache_dtype_may_be_any_that_a_pool_can_have(name: str) -> None:
    assert settings("--kv-cache-dtype", name).cache_options().kv_cache_dtype == name


@pytest.mark.parametrize("interval", ["8", "100"])
def test_checkpoints_of_state_are_at_whole_chunks(interval: str) -> None:
    with pytest.raises(SettingsError, match=f"--mamba-track-interval {interval} is not a multiple of 16"):
        settings("--mamba-track-interval", interval)
