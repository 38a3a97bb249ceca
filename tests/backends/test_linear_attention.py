"""Recurrent state over passes: drafts that fall leave no trace of themselves, and a state is never the wrong one."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from backends.linear_attention import HybridLinearBackend
from backends.options import AttentionOptions
from backends.registry import BackendError
from backends.setup import build_attention_backends
from backends.state_pool import StateLayout, StatePool
from backends.torch_native import TorchNativeBackend
from engine.options import CacheOptions
from engine.request import Request, SamplingParams
from engine.runner import ModelRunner, Role
from engine.worker import SequenceStep
from kernels.linear import TILE
from kernels.linear_attention import CHUNK
from models.base import CausalLM
from models.loader import inspect_model, load_model
from models.options import ModelOptions
from models.weights import Precision
from speculative.worker import SpeculativeWorker
from tests.backends.fakes import registry
from tests.models.checkpoints import make_checkpoint as make_plain_checkpoint
from tests.models.harness import Sequences
from tests.models.hybrid_checkpoints import make_checkpoint

OPTIONS = {
    "plain": AttentionOptions(attention_backend="one"),
    "hybrid": AttentionOptions(prefill_attention_backend="one", decode_attention_backend="two"),
    "two-batch": AttentionOptions(attention_backend="one", enable_two_batch_overlap=True),
    "pd-mux": AttentionOptions(attention_backend="one", enable_pdmux=True, sm_group_num=2),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("qwen3-next")
    make_checkpoint("qwen3-next-dense-layers", made)
    return made


# The delta rule with and without experts, Mamba-2 beside experts and without attention, and short convolutions alone.
STATES = ["qwen3-next-dense-layers", "qwen3-5", "nemotron-h-experts", "mamba2", "lfm2"]


@pytest.fixture(scope="module", params=STATES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    made = tmp_path_factory.mktemp(request.param)
    make_checkpoint(request.param, made)
    files = inspect_model(ModelOptions(model=str(made)))
    return load_model(files, torch.device("cpu"), Precision(torch.float32))


def states(sequences: Sequences, row: int) -> list[torch.Tensor]:
    """All that is the state of `row`: the rows of a chunk that it does not have yet are not."""
    pool = sequences.state_pool
    assert pool is not None
    assert pool.lengths[row] == sequences.lengths[row]
    recent = pool.recent[:, row, : pool.lengths[row] % CHUNK]
    return [pool.conv[:, row], pool.recurrent[:, row], recent]


def assert_same_state(left: Sequences, right: Sequences, row: int, row_there: int | None = None) -> None:
    there = states(right, row if row_there is None else row_there)
    assert all(torch.equal(a, b) for a, b in zip(states(left, row), there, strict=True))


def some_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, 240) for _ in range(count)]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_the_state_after_a_verify_is_that_of_decoding_one_by_one(
    model: CausalLM, seed: int, native: bool
) -> None:
    rng = random.Random(seed)
    speculated, plain = Sequences(model, native=native), Sequences(model, native=native)
    rows = (0, 2, 3)
    prompts = {row: some_tokens(rng, rng.randint(1, 40)) for row in rows}
    assert speculated.extend(prompts).keys() == plain.extend(prompts).keys()
    for _ in range(5):
        blocks = {row: some_tokens(rng, rng.choice([1, 2, 3, 8, 16, 17, 33])) for row in rows}
        kept = {row: rng.randint(1, len(block)) for row, block in blocks.items()}
        logits = speculated.extend(blocks, drafts={row: len(block) - 1 for row, block in blocks.items()})
        speculated.keep({row: count for row, count in kept.items() if len(blocks[row]) > 1})
        for row, block in blocks.items():
            for index, token in enumerate(block[: kept[row]]):
                assert torch.equal(plain.extend({row: [token]})[row][0], logits[row][index])
            assert_same_state(speculated, plain, row)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_checkpoints_are_the_states_at_their_positions_whatever_pass_crosses_them(
    model: CausalLM, seed: int, native: bool
) -> None:
    rng = random.Random(seed)
    sequences = Sequences(model, native=native)
    pool = sequences.state_pool
    assert pool is not None
    boundaries = (16, 32, 64, 80)
    sequences.checkpoints = {2: dict(zip(boundaries, pool.checkpoint_rows, strict=True))}
    ids: list[int] = []
    while len(ids) < 90:
        block = some_tokens(rng, rng.choice([1, 5, 16, 40]))
        beside = {3: some_tokens(rng, 3)}
        if rng.random() < 0.5:  # a chunk of a prompt
            sequences.extend({2: block, **beside})
        else:
            sequences.extend({**beside, 2: block}, drafts={2: len(block) - 1})
            kept = rng.randint(1, len(block))
            if len(block) > 1:
                sequences.keep({2: kept})
            block = block[:kept]
        ids += block
    alone = Sequences(model, native=native)
    for position, token in enumerate(ids, 1):
        logits = alone.extend({0: [token]})[0]
        row = sequences.checkpoints[2].get(position)
        if row is not None:
            conv, recurrent, _ = states(alone, 0)
            assert torch.equal(pool.conv[:, row], conv) and torch.equal(pool.recurrent[:, row], recurrent)
    last = boundaries[-1]
    pool.resume(2, sequences.checkpoints[2][last], last)
    sequences.lengths[2] = last
    assert torch.equal(sequences.extend({2: ids[last:]})[2][-1:], logits)
    assert_same_state(sequences, alone, 2, 0)


def test_drafts_that_fall_write_no_checkpoint(model: CausalLM) -> None:
    sequences = Sequences(model)
    pool = sequences.state_pool
    assert pool is not None
    row = pool.checkpoint_rows[0]
    sequences.checkpoints = {0: {CHUNK: row}}
    sequences.extend({0: some_tokens(random.Random(0), CHUNK - 2)})
    sequences.extend({0: [5, 6, 7, 8]}, drafts={0: 3})
    sequences.keep({0: 1})
    kept = [tensor[:, row] for tensor in (pool.conv, pool.recurrent) if tensor.numel()]
    assert not any(tensor.any() for tensor in kept)
    sequences.extend({0: [9, 8]}, drafts={0: 1})
    sequences.keep({0: 1})
    assert all(tensor.any() for tensor in kept)


def test_a_block_whose_drafts_all_fall_leaves_the_state_of_its_first_row(model: CausalLM) -> None:
    sequences, plain = Sequences(model), Sequences(model)
    prompt = some_tokens(random.Random(0), CHUNK - 1)
    for each in (sequences, plain):
        each.extend({1: prompt})
    sequences.extend({1: [5, 6, 7]}, drafts={1: 2})
    sequences.keep({1: 1})
    plain.extend({1: [5]})
    assert_same_state(sequences, plain, 1)


class Operations(TorchDispatchMode):
    """Counts what torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_commit_writes_the_states_of_all_sequences_at_once(model: CausalLM) -> None:
    counts = set()
    for rows in ((0,), (0, 1, 2, 3)):
        sequences = Sequences(model)
        sequences.extend({row: [4] * (CHUNK - 2) for row in rows})
        sequences.extend({row: [5, 6, 7, 8, 9] for row in rows}, drafts=dict.fromkeys(rows, 4))
        with Operations() as operations:
            sequences.keep(dict.fromkeys(rows, 3))  # across the end of a chunk
        counts.add(operations.count)
    assert len(counts) == 1 and counts != {0}


@pytest.mark.parametrize("model", ["qwen3-5", "mamba2", "lfm2"], indirect=True)  # experts are asked by token
def test_a_prompt_is_computed_by_chunks_not_token_by_token(model: CausalLM) -> None:
    counts = set()
    for length in (2 * CHUNK - TILE[torch.float32] + 1, 2 * CHUNK - 1):  # in as many tiles of products
        with Operations() as operations:
            Sequences(model).extend({0: [4] * length})
        counts.add(operations.count)
    assert len(counts) == 1


def test_a_verify_that_was_not_committed_is_found_out(model: CausalLM) -> None:
    sequences = Sequences(model)
    sequences.extend({0: [4, 5, 6]})
    sequences.extend({0: [7, 8]}, drafts={0: 1})
    with pytest.raises(RuntimeError, match="row 0 is that of position 3, but its sequence goes on at 5"):
        sequences.extend({0: [9]})


def test_a_row_that_is_given_to_another_request_starts_with_no_state(model: CausalLM) -> None:
    used, new = Sequences(model), Sequences(model)
    used.extend({0: some_tokens(random.Random(1), 50)})
    used.lengths[0] = 0
    for length in (1, 4, 1, 20):
        ids = some_tokens(random.Random(2), length)
        assert torch.equal(used.extend({0: ids})[0], new.extend({0: ids})[0])


def test_a_pool_says_what_a_request_costs() -> None:
    layout = StateLayout(3, 40, 4, torch.bfloat16, num_heads=4, num_key_heads=2, key_dim=8, value_dim=6)
    pool = StatePool(layout, 5, torch.device("cpu"), num_checkpoints=3)
    tensors = (pool.conv, pool.recurrent, pool.recent)
    assert len(pool.checkpoint_rows) == 3
    expected = 5 * layout.bytes_per_request + 3 * layout.bytes_per_checkpoint
    assert sum(t.nbytes for t in tensors) == expected
    assert pool.recurrent[0, 0].numel() == 4 * 8 * 6
    short = StateLayout(3, 40, 3, torch.float32)
    assert short.bytes_per_request == 3 * 40 * 2 * 4


def make_runner(
    folder: Path, options: AttentionOptions, role: Role = "target", **replaced: Any
) -> ModelRunner:
    """`replaced` are arguments of `build_attention_backends`."""
    model_options = ModelOptions(model=str(folder), dtype="float32", device="cpu")
    runner = ModelRunner(
        role,
        inspect_model(model_options),
        model_options,
        CacheOptions(max_total_tokens=256),
        options,
        max_running_requests=4,
        build_backends=lambda **given: build_attention_backends(**{**given, "specs": registry(), **replaced}),
        capture_graph=lambda *_: None,
    )
    runner.load()
    runner.init_attention_backends()
    return runner


def passes(runner: ModelRunner) -> list[torch.Tensor]:
    """Prompts, one beside a decode row; a verify of which a part stands, beside one whose drafts fall; a decode."""
    requests = []
    for index, length in enumerate((22, 20, 9)):
        request = Request(
            str(index), list(range(3 + index, 3 + index + length)), SamplingParams(), lambda event: None
        )
        assert runner.slot_table is not None
        request.table_row = runner.slot_table.acquire()
        request.slots = list(range(index * 60, index * 60 + 60))
        runner.slot_table.write(request.table_row, 0, request.slots)
        requests.append(request)
    first, second, third = requests
    logits = []

    def run(*steps: SequenceStep, kept: dict[int, int] | None = None) -> None:
        logits.append(runner.forward(runner.batch(steps)).logits)
        if kept is not None:
            runner.commit_state(kept)
        for step in steps:
            emitted = (kept or {}).get(step.request.table_row, 1) if step.samples else 0
            step.request.cached_len += step.num_tokens + max(0, emitted - 1)
            step.request.output_ids.extend([*step.drafts, 7][:emitted])

    run(SequenceStep(first, 22, True), SequenceStep(third, 9, True))
    run(SequenceStep(first, 1, True), SequenceStep(second, 12, False))
    run(SequenceStep(second, 8, True), SequenceStep(first, 1, True), SequenceStep(third, 1, True))
    run(
        SequenceStep(first, 1, True, (9, 8, 7)),
        SequenceStep(second, 1, True),
        SequenceStep(third, 1, True, (6, 5)),
        kept={first.table_row: 3, third.table_row: 1},
    )
    run(SequenceStep(third, 1, True), SequenceStep(first, 1, True), SequenceStep(second, 1, True))
    return logits


@pytest.mark.parametrize("variant", OPTIONS)
def test_every_way_to_build_backends_gives_the_same_logits(folder: Path, variant: str) -> None:
    expected = passes(make_runner(folder, AttentionOptions()))
    logits = passes(make_runner(folder, OPTIONS[variant]))
    assert all(torch.equal(got, wanted) for got, wanted in zip(logits, expected, strict=True))


@pytest.mark.parametrize("variant", OPTIONS)
def test_a_commit_is_detected_through_every_wrapper(folder: Path, variant: str) -> None:
    worker = SpeculativeWorker(make_runner(folder, OPTIONS[variant]), frozenset())
    assert not worker.need_mamba_verify_commit
    worker.detect_mamba_commit()
    assert worker.need_mamba_verify_commit


@pytest.mark.parametrize("name", ["llama", "granite-attention"])
def test_a_model_that_only_attends_has_nothing_to_commit(tmp_path: Path, name: str) -> None:
    make = make_plain_checkpoint if name == "llama" else make_checkpoint
    make(name, tmp_path)
    runner = make_runner(tmp_path, OPTIONS["hybrid"])
    worker = SpeculativeWorker(runner, frozenset())
    worker.detect_mamba_commit()
    assert not worker.need_mamba_verify_commit
    assert (runner.state_pool, runner.make_checkpoints()) == (None, None)


@pytest.mark.parametrize(
    ("name", "wrap"), [("llama", HybridLinearBackend), ("qwen3-next-dense-layers", None)]
)
def test_a_commit_takes_a_model_with_state_and_a_backend_that_keeps_it(
    tmp_path: Path, name: str, wrap: type[HybridLinearBackend] | None
) -> None:
    make = make_plain_checkpoint if name == "llama" else make_checkpoint
    make(name, tmp_path)
    worker = SpeculativeWorker(make_runner(tmp_path, OPTIONS["plain"], wrap=wrap), frozenset())
    worker.detect_mamba_commit()
    assert not worker.need_mamba_verify_commit


def test_each_layer_is_routed_once_around_the_hybrid_of_prefill_and_decode(folder: Path) -> None:
    backend = make_runner(folder, OPTIONS["hybrid"]).attn_backend
    assert isinstance(backend, HybridLinearBackend)
    (attention,) = backend.children()
    assert attention.name == "hybrid"
    assert not any(isinstance(child, HybridLinearBackend) for child in attention.children())


def test_a_layer_with_state_needs_the_wrapper(model: CausalLM) -> None:
    sequences = Sequences(model)
    sequences.backend = TorchNativeBackend()
    with pytest.raises(RuntimeError, match="torch_native keeps no recurrent state"):
        sequences.extend({0: [4]})


def test_a_drafter_with_recurrent_state_is_refused(folder: Path) -> None:
    with pytest.raises(BackendError, match="keeps recurrent state"):
        make_runner(folder, OPTIONS["plain"], role="draft")
