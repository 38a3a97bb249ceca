"""MHA over a latent cache equals dense attention to decompressed entries, and goes through every kind of backend."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import AttentionBackend
from backends.forward import ForwardMode, forward_context
from backends.handlers import MHA_PREFIX_THRESHOLD
from backends.mla import BLOCK, TILE
from backends.options import AttentionOptions
from backends.setup import Role, build_attention_backends
from backends.torch_native import TorchNativeBackend
from backends.triton import TritonBackend
from engine.options import CacheOptions
from engine.request import Request, SamplingParams
from engine.runner import ModelRunner
from engine.worker import SequenceStep
from kernels.linear import linear
from kernels.packed import pack_float
from models.loader import inspect_model
from models.options import ModelOptions
from tests.backends.fakes import NamedBackend, registry
from tests.backends.streams import Layer, Streams, stored
from tests.models.checkpoints import make_checkpoint as make_other_checkpoint
from tests.models.deepseek_checkpoints import make_checkpoint

HEADS, LATENT, ROPE, NOPE, VALUE = 3, 16, 8, 24, 16
MATRIX = torch.randn(HEADS * (NOPE + VALUE), LATENT, generator=torch.Generator().manual_seed(5))


class LatentLayer(Layer):
    """Decompresses an entry by a random matrix: each head has keys of its own, which end on the entry's rope."""

    def decompress(self, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        entries = entries.float()
        nope, value = (
            linear(entries[:, :LATENT], pack_float(MATRIX)).unflatten(1, (HEADS, -1)).split((NOPE, VALUE), -1)
        )
        return torch.cat((nope, entries[:, None, LATENT:].expand(-1, HEADS, -1)), -1), value


LAYER = LatentLayer(num_heads=HEADS, num_kv_heads=1, head_dim=LATENT + ROPE, v_head_dim=LATENT, scale=0.2)


class LatentStreams(Streams):
    """Prompts for MHA, over a pool of latent entries."""

    def __init__(self, lengths: list[int], pool_dtype: torch.dtype = torch.float32) -> None:
        super().__init__(LAYER, lengths, pool_dtype=pool_dtype, latent=True)
        random = torch.Generator().manual_seed(1)
        self.query = [torch.randn(n, HEADS, NOPE + ROPE, generator=random) for n in lengths]

    def prefill(self, backend: AttentionBackend, counts: Mapping[int, int]) -> dict[int, torch.Tensor]:
        """A pass over the next `counts[s]` tokens of each sequence: [count, HEADS, VALUE] for each."""
        batch = self.batch(counts, ForwardMode.EXTEND)
        with forward_context(batch, backend) as context:
            out = backend.forward_mha(
                self.rows(self.query, batch), self.rows(self.key, batch), LAYER, batch, context.plan
            )
        for s, context_len in zip(batch.table_rows, batch.context_lens, strict=True):
            self.done[s] = context_len
        return dict(zip(batch.table_rows, out.split(batch.query_lens), strict=True))

    def dense(self, s: int, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of sequence s in float64, entries as the pool rounds them."""
        entries = stored(self.key[s][:stop, 0], self.pool.layout.dtype)
        both = torch.einsum("kl,hdl->khd", entries[:, :LATENT], MATRIX.double().unflatten(0, (HEADS, -1)))
        key = torch.cat((both[..., :NOPE], entries[:, None, LATENT:].expand(-1, HEADS, -1)), -1)
        scores = torch.einsum("qhd,khd->hqk", self.query[s][start:stop].double(), key) * LAYER.scale
        unseen = torch.arange(stop) > torch.arange(start, stop)[:, None]
        weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, both[..., NOPE:])


@settings(max_examples=15, deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
    prefixes=st.tuples(st.integers(0, 2 * BLOCK + 9), st.integers(0, BLOCK)),
    counts=st.tuples(st.integers(1, 2 * TILE + 1), st.integers(1, BLOCK)),
)
def test_equals_dense_attention(
    dtype: torch.dtype, prefixes: tuple[int, int], counts: tuple[int, int]
) -> None:
    """Two prompts in one pass, each with a cached prefix or none."""
    streams = LatentStreams([prefix + count for prefix, count in zip(prefixes, counts, strict=True)], dtype)
    streams.cache(dict(enumerate(prefixes)))
    for s, rows in streams.prefill(TorchNativeBackend(), {1: counts[1], 0: counts[0]}).items():
        expected = streams.dense(s, prefixes[s], prefixes[s] + counts[s])
        torch.testing.assert_close(rows.double(), expected, atol=1e-4, rtol=1e-4)


@settings(max_examples=10, deadline=None)
@given(cuts=st.lists(st.integers(1, BLOCK + TILE), min_size=1, max_size=5))
def test_a_prompt_has_the_same_bits_whole_and_in_chunks(cuts: list[int]) -> None:
    backend, length = TorchNativeBackend(), sum(cuts)
    whole = LatentStreams([length, length]).prefill(backend, {0: length})[0]
    streams = LatentStreams([length, length])
    chunks = [streams.prefill(backend, {1: cut, 0: cut})[0] for cut in cuts]
    assert torch.equal(torch.cat(chunks), whole)


def test_a_backend_without_it_says_what_is_wrong() -> None:
    with pytest.raises(RuntimeError, match=r"triton does not attend .* choose MQA"):
        LatentStreams([4]).prefill(TritonBackend(), {0: 4})


OPTIONS = {
    "plain": AttentionOptions(attention_backend="one"),
    "hybrid": AttentionOptions(prefill_attention_backend="one", decode_attention_backend="two"),
    "hybrid, verified as decoded": AttentionOptions(
        prefill_attention_backend="one", decode_attention_backend="mla", speculative_attention_mode="decode"
    ),
    "two-batch": AttentionOptions(enable_two_batch_overlap=True),
    "two-batch hybrid": AttentionOptions(enable_two_batch_overlap=True, decode_attention_backend="two"),
    "pd-mux": AttentionOptions(enable_pdmux=True, sm_group_num=2),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[Role, Path]:
    """An MLA target, and a drafter that is none."""
    folders: dict[Role, Path] = {
        "target": tmp_path_factory.mktemp("v3"),
        "draft": tmp_path_factory.mktemp("qwen2"),
    }
    make_checkpoint("v3", folders["target"])
    make_other_checkpoint("qwen2", folders["draft"])
    return folders


def started(models: Mapping[Role, Path], options: AttentionOptions, role: Role = "target") -> ModelRunner:
    model_options = ModelOptions(model=str(models[role]), dtype="float32", device="cpu")
    runner = ModelRunner(
        role,
        inspect_model(model_options),
        model_options,
        CacheOptions(max_total_tokens=2000),
        options,
        max_running_requests=4,
        build_backends=partial(build_attention_backends, specs=registry()),
        capture_graph=lambda *_: None,
    )
    runner.load()
    runner.init_attention_backends()
    return runner


def request(runner: ModelRunner, prompt: list[int], slots: range, cached: int = 0) -> Request:
    """A running request, whose first slots may be another's: a prefix-cache hit."""
    made = Request(str(slots.start), prompt, SamplingParams(), lambda event: None)
    assert runner.slot_table is not None
    made.table_row = runner.slot_table.acquire()
    made.slots = [*range(cached), *slots]
    made.cached_len = cached
    runner.slot_table.write(made.table_row, 0, made.slots)
    return made


class Conversation:
    """Passes over an MLA model: a prompt, another that hits its prefix, decode beside chunks, verify after the hit."""

    LONG = MHA_PREFIX_THRESHOLD + 10

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        random = torch.Generator().manual_seed(3)
        self.ids = torch.randint(3, 250, (self.LONG + 60,), generator=random).tolist()
        self.logits: list[torch.Tensor] = []
        self.steps = iter(self._steps())

    def _steps(self) -> list[list[SequenceStep]]:
        first = request(self.runner, self.ids[: self.LONG], range(900))
        hit = request(self.runner, self.ids[: self.LONG + 20], range(900, 1000), cached=self.LONG - 4)
        short = request(self.runner, self.ids[:60], range(1000, 1100), cached=20)
        return [
            [SequenceStep(first, self.LONG, True)],
            [SequenceStep(first, 1, True), SequenceStep(hit, 24, True)],
            [
                SequenceStep(hit, 1, True, (9, 8, 7)),
                SequenceStep(first, 1, True),
                SequenceStep(short, 40, True),
            ],
            [SequenceStep(hit, 1, True), SequenceStep(first, 1, True), SequenceStep(short, 1, True)],
            [SequenceStep(first, 1, True, (5, 6)), SequenceStep(hit, 1, True, (4,))],
        ]

    def step(self) -> None:
        steps = next(self.steps)
        self.logits.append(self.runner.forward(self.runner.batch(steps)).logits)
        for step in steps:
            step.request.cached_len += step.num_tokens
            step.request.output_ids.append(7)

    def run(self) -> list[torch.Tensor]:
        for _ in range(5):
            self.step()
        return self.logits


@pytest.mark.parametrize("variant", OPTIONS)
def test_every_way_to_build_gives_the_same_logits(models: Mapping[Role, Path], variant: str) -> None:
    expected = Conversation(started(models, AttentionOptions())).run()
    logits = Conversation(started(models, OPTIONS[variant])).run()
    assert all(torch.equal(got, wanted) for got, wanted in zip(logits, expected, strict=True))


@pytest.mark.parametrize("order", [("target", "draft"), ("draft", "target")])
def test_a_prefix_hit_of_an_mla_target_whose_drafter_runs_another_backend(
    models: Mapping[Role, Path], order: tuple[Role, Role]
) -> None:
    """What crashed: the drafter's start-up had the target dispatch to a backend that was not built for it."""
    options = AttentionOptions(attention_backend="mla", speculative_draft_attention_backend="two")
    expected = Conversation(started(models, options)).run()

    runners = {role: started(models, options, role) for role in order}
    target, drafting = Conversation(runners["target"]), runners["draft"]
    drafted = request(drafting, target.ids[:50], range(50))
    for _ in range(5):
        target.step()
        drafting.forward(drafting.batch([SequenceStep(drafted, 9, True)]))
        drafted.cached_len += 9
    assert all(torch.equal(got, wanted) for got, wanted in zip(target.logits, expected, strict=True))

    names = {}
    for role, runner in runners.items():
        backend = runner.attn_backend
        assert isinstance(backend, NamedBackend) and backend.seen
        names[role] = (backend.given_name, backend.prefill_attention_backend_str)
    assert names == {"target": ("mla", "mla"), "draft": ("two", "two")}
