"""Each setting of attention and of the KV cache serves a model through the app, and changes what it is to change only."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from dependency_injector import providers
from starlette.testclient import TestClient

from app.application import build, create_app
from app.cli import parse
from app.lifecycle import Lifecycle
from app.settings import SettingsError
from backends.forward import ForwardMode
from backends.kv_pool import DTYPES
from backends.setup import build_attention_backends
from backends.two_batch import TwoBatchBackend
from containers.application import ApplicationContainer
from engine.graphs import NativeGraph
from kernels.triton.attention import INTERPRETED
from tests.backends.fakes import NamedBackend, registry
from tests.models.dflash_reference import make_drafter
from tests.native import needs_native
from tests.tiny_model import save_tiny_model

DEADLINE = 120  # seconds, for what takes one
PROMPTS = ["tick tock tick tock", "abcabcabcabc", "one two three", "tick tock tick tock tick"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@contextmanager
def served(
    model: Path, *flags: str, noting: bool = False, dtype: str = "float32"
) -> Iterator[tuple[TestClient, ApplicationContainer]]:
    """A client of the app that these flags make, once it is ready. `noting`: its backends note their passes."""
    argv = ["serve", "--model", str(model), "--device", "cpu", "--dtype", dtype, "--threads", "1"]
    settings = parse([*argv, "--max-total-tokens", "2048", *flags], {})[1].arguments["settings"]
    container = build(settings)
    if noting:
        container.target.attention_backends.override(
            providers.Callable(partial(build_attention_backends, specs=registry()))
        )
    lifecycle = Lifecycle(container.startup(), container.engine)
    with TestClient(create_app(container, lifecycle, settings)) as client:
        end = time.monotonic() + DEADLINE
        while client.get("/health/ready").status_code != 200:
            assert lifecycle.error is None and time.monotonic() < end, lifecycle.error
            time.sleep(0.01)
        yield client, container


def complete(client: TestClient, prompts: Sequence[str] = PROMPTS, **sampling: Any) -> list[str]:
    """All prompts in one request, so that they are decoded together."""
    body = {"prompt": list(prompts), "max_tokens": 12, "ignore_eos": True, "seed": 5, **sampling}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


def texts(client: TestClient) -> list[list[str]]:
    """Cold and with cached prefixes, speculated and not, greedy and sampled."""
    return [
        complete(client, temperature=temperature, speculation={"algorithm": algorithm})
        for temperature in (0.0, 1.0)
        for algorithm in ("none", "ngram")
    ]


def target(client: TestClient) -> dict[str, Any]:
    return client.get("/server_info").json()["workers"]["target"]


def names(client: TestClient) -> tuple[str, str]:
    info = target(client)
    return info["prefill_attention_backend"], info["decode_attention_backend"]


@pytest.fixture(scope="module")
def plain(model: Path) -> list[list[str]]:
    with served(model) as (client, _):
        assert names(client) == ("torch_native", "torch_native")
        return texts(client)


def passes(backend: object) -> list[tuple[ForwardMode, int]]:
    assert isinstance(backend, NamedBackend)
    return [(batch.mode, len(batch.query_lens)) for batch in backend.seen]


def test_pdmux_serves_as_plain_does_and_decodes_on_the_backend_of_the_group(
    model: Path, plain: list[list[str]]
) -> None:
    flags = ("--enable-pdmux", "--sm-group-num", "2")
    with served(model, *flags, noting=True) as (client, container):
        assert names(client) == ("torch_native", "torch_native")
        assert texts(client) == plain
        runner = container.target.runner()
        group = runner.decode_attn_backend_group
        assert len(group) == 2
        assert {mode for mode, _ in passes(group[0])} == {ForwardMode.DECODE}
        assert ForwardMode.DECODE not in {mode for mode, _ in passes(runner.attn_backend)}


def test_pdmux_on_a_cpu_is_warned_of(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    argv = ["serve", "--model", str(model), "--device", "cpu", "--threads", "1"]
    build(parse(argv, {})[1].arguments["settings"])
    assert not caplog.records
    build(parse([*argv, "--enable-pdmux"], {})[1].arguments["settings"])
    assert "--enable-pdmux" in caplog.text and "needs a GPU" in caplog.text


def test_two_batch_overlap_serves_as_plain_does_and_halves_the_batch(
    model: Path, plain: list[list[str]]
) -> None:
    with served(model, "--enable-two-batch-overlap", noting=True) as (client, container):
        assert names(client) == ("torch_native", "torch_native")
        assert texts(client) == plain
        overlap = container.target.runner().attn_backend
        assert isinstance(overlap, TwoBatchBackend)
        for half in overlap.halves:
            assert {ForwardMode.DECODE, ForwardMode.EXTEND} <= {mode for mode, _ in passes(half)}
            assert max(count for _, count in passes(half)) < len(PROMPTS)


@pytest.mark.skipif(not INTERPRETED, reason="the kernels are compiled for the GPU in this process")
def test_in_decode_mode_a_text_is_verified_where_it_is_decoded(model: Path) -> None:
    flags = ("--prefill-attention-backend", "triton", "--decode-attention-backend", "torch_native")
    with served(model, *flags, "--speculative-attention-mode", "decode") as (client, _):
        assert names(client) == ("triton", "torch_native")
        sampled = dict(prompts=PROMPTS[:2], temperature=1.0)
        assert complete(client, **sampled, speculation={"algorithm": "none"}) == complete(client, **sampled)


@pytest.mark.parametrize(
    ("asked", "name"), [("fp8", "fp8_e4m3"), ("int8", "int8"), ("bf16", "bfloat16"), ("float16", "float16")]
)
def test_a_narrow_cache_serves_and_speculation_changes_nothing(model: Path, asked: str, name: str) -> None:
    with served(model, "--kv-cache-dtype", asked) as (client, _):
        assert target(client)["kv_cache_dtype"] == name
        greedy, greedy_speculated, sampled, sampled_speculated = texts(client)
        assert greedy == greedy_speculated
        assert sampled == sampled_speculated


def make_dflash(folder: Path) -> Path:
    """Write a DFlash drafter of the tiny model into `folder`, which is returned."""
    make_drafter(
        folder,
        vocab_size=257,
        block_size=4,
        hidden_size=32,
        num_target_layers=1,
        dflash_config={"target_layer_ids": [0]},
    )
    return folder


@needs_native
@pytest.mark.parametrize("asked", ["int8", "fp8"])
def test_target_and_drafter_run_native_plans_over_a_quantised_cache(
    model: Path, tmp_path: Path, asked: str
) -> None:
    flags = (
        "--speculative-algorithm",
        "dflash",
        "--speculative-draft-model-path",
        str(make_dflash(tmp_path)),
    )
    with served(model, *flags, "--kv-cache-dtype", asked, dtype="auto") as (client, container):
        for worker in (container.target, container.draft):
            assert isinstance(worker.graphs(), NativeGraph)
            assert worker.runner().kv_pool.layout.dtype == DTYPES[asked]
        for temperature in (0.0, 1.0):
            plain = complete(client, temperature=temperature, speculation={"algorithm": "none"})
            assert complete(client, temperature=temperature) == plain


@pytest.mark.skipif(not INTERPRETED, reason="the kernels are compiled for the GPU in this process")
@pytest.mark.parametrize("algorithm", ["dflash", "standalone"])
def test_target_and_drafter_have_backends_and_caches_of_their_own(
    model: Path, tmp_path: Path, algorithm: str
) -> None:
    """MLA apart, what crashed in the seed: the drafter on another backend, and a prompt whose beginning is cached."""
    drafter = make_dflash(tmp_path) if algorithm == "dflash" else model
    flags = [
        *("--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(drafter)),
        *("--speculative-num-draft-tokens", "4", "--speculative-draft-attention-backend", "triton"),
        *("--attention-backend", "torch_native"),
        *("--kv-cache-dtype", "int8", "--speculative-draft-kv-cache-dtype", "fp8"),
    ]
    with served(model, *flags) as (client, container):
        workers = client.get("/server_info").json()["workers"]
        chosen = {
            role: [
                worker["prefill_attention_backend"],
                worker["decode_attention_backend"],
                worker["kv_cache_dtype"],
            ]
            for role, worker in workers.items()
        }
        assert chosen == {
            "target": ["torch_native", "torch_native", "int8"],
            "draft": ["triton", "triton", "fp8_e4m3"],
        }
        asked = dict(prompts=PROMPTS[:2], max_tokens=8, temperature=1.0)
        plain = complete(client, **asked, speculation={"algorithm": "none"})
        assert complete(client, **asked) == plain
        assert complete(client, **asked) == plain
        pool = container.draft.runner().kv_pool
        assert pool.key.float().any()


@pytest.mark.parametrize(
    ("setting", "name", "problem"),
    [
        ("attention-backend", "fast", "is unknown"),
        ("prefill-attention-backend", "flashinfer", "cannot run on cpu"),
        ("decode-attention-backend", "flashinfer_mla", "cannot run on cpu"),
        ("speculative-draft-attention-backend", "fast", "is unknown"),
    ],
)
def test_a_backend_that_cannot_run_here_is_refused_before_anything_loads(
    model: Path, setting: str, name: str, problem: str
) -> None:
    argv = ["serve", "--model", str(model), "--device", "cpu", f"--{setting}", name]
    if "draft" in setting:
        argv += ["--speculative-algorithm", "standalone", "--speculative-draft-model-path", str(model)]
    with pytest.raises(SettingsError) as caught:
        build(parse(argv, {})[1].arguments["settings"])
    text = str(caught.value)
    assert f"--{setting} {name}: attention backend {name!r} {problem}; usable here: torch_native" in text
    assert "; flashinfer: it needs CUDA; flashinfer_mla: it needs CUDA" in text
