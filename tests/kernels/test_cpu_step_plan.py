"""The native step plan: logits of transformers, and bits that no company, chunk, thread or page layout changes."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    DynamicCache,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from backends.kv_pool import FP8, INT8
from kernels.cpu import library
from kernels.cpu.kv import KV_DTYPES, KVTensors
from kernels.cpu.step_plan import StepPlan, StepSpec, unsupported
from tests.backends.streams import stored
from tests.kernels.step_plans import (
    SIZES,
    SLOTS,
    VOCAB,
    WIDTH,
    Pool,
    gemma3,
    llama,
    mistral,
    plan_of,
    q8_0,
    qwen2,
    qwen3,
    randomised,
    tokens,
)
from tests.native import BF16_ATTENTION, needs_native

pytestmark = needs_native


@contextmanager
def running_on(isa: str, threads: int) -> Iterator[None]:
    before = library.isa(), library.threads()
    assert library.set_isa(isa)
    library.set_threads(threads)
    yield
    library.set_isa(before[0])
    library.set_threads(before[1])


def isas_here() -> list[str]:
    """Instruction sets that this processor has."""
    if not library.available():
        return []
    used = library.isa()
    found = [name for name in library.ISAS if library.set_isa(name)]
    library.set_isa(used)
    return found


ISAS = st.sampled_from(isas_here() or ["none"])


@functools.cache
def quantised_plan(make: Callable[[], PreTrainedModel]) -> StepPlan:
    return plan_of(randomised(make), q8_0)


@pytest.fixture(scope="module")
def quantised() -> StepPlan:
    return quantised_plan(llama)


@pytest.mark.parametrize("make", (llama, mistral, qwen2, qwen3, gemma3))
def test_logits_and_states_are_those_of_transformers(isa: str, make: object) -> None:
    model, ids = randomised(make), tokens(70)
    with torch.inference_mode():
        expected = model(ids[None], output_hidden_states=True)
    pool = Pool(plan_of(model))
    logits, states = pool.plan.run(pool.batch([(1, ids, 70)], capture_layers=[0]))
    torch.testing.assert_close(logits, expected.logits[0].float(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(states[0], expected.hidden_states[1][0], atol=1e-4, rtol=1e-4)


def test_contexts_longer_than_a_split_are_those_of_transformers(isa: str) -> None:
    model, ids = randomised(qwen3), tokens(600)
    with torch.inference_mode():
        expected = model(ids[None]).logits[0]
    pool = Pool(plan_of(model))
    prompt, last = pool.logits((0, ids[:-1], 599)), pool.logits((0, ids, 1))
    torch.testing.assert_close(torch.cat([prompt, last]), expected, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("make", (llama, gemma3))
@pytest.mark.parametrize("rows", ([], [69], [3, 3, 0], list(range(17, 57))), ids=len)
@pytest.mark.parametrize("threads", (1, 3))
def test_logits_of_some_rows_are_those_of_all_rows(
    make: Callable[[], PreTrainedModel], rows: list[int], threads: int
) -> None:
    """Rows that no logits are wanted of leave the last layer, but for their keys and values, unless it is captured."""
    plan, ids = quantised_plan(make), tokens(70)
    with running_on(library.isa(), threads):
        for captured in ([], [0], [1]):
            whole, part = Pool(plan), Pool(plan)
            logits, states = whole.plan.run(whole.batch([(0, ids, 70)], capture_layers=captured))
            batch = part.batch([(0, ids, 70)], capture_layers=captured, logits_rows=torch.tensor(rows).long())
            some, some_states = part.plan.run(batch)
            assert torch.equal(some, logits[rows])
            assert all(torch.equal(some_states[layer], states[layer]) for layer in captured)
            assert torch.equal(part.logits((0, ids, 1)), whole.logits((0, ids, 1)))


def test_queries_see_each_other_both_ways_when_not_causal() -> None:
    model, ids = randomised(llama), tokens(40)
    mask = torch.zeros(1, 1, 40, 40)
    mask[:, :, :24, 24:] = -torch.inf  # 24 causal tokens of context, then a block of 16 that sees itself
    mask[:, :, :24, :24] += torch.full((24, 24), -torch.inf).triu(1)
    with torch.inference_mode():
        expected = model(ids[None], attention_mask=mask).logits[0, 24:]
    pool = Pool(plan_of(model))
    pool.logits((0, ids[:24], 24))
    block, _ = pool.plan.run(pool.batch([(0, ids, 16)], causal=False))
    torch.testing.assert_close(block, expected, atol=1e-4, rtol=1e-4)


def test_layers_that_are_causal_stay_so_in_a_batch_that_is_not() -> None:
    model, ids = randomised(llama), tokens(40)
    pool = Pool(plan_of(model, causal=True))
    expected = pool.logits((0, ids, 40))
    block, _ = pool.plan.run(pool.batch([(0, ids, 16)], causal=False))
    assert torch.equal(block, expected[24:])


def test_the_head_may_have_another_vocabulary_than_the_embedding() -> None:
    model, ids = randomised(llama), tokens(20)
    assert ids.max() >= 48
    full = Pool(plan_of(model)).logits((0, ids, 20))
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight[:48])
    assert torch.equal(Pool(plan_of(model)).logits((0, ids, 20)), full[:, :48])


BF16_ERROR = 0.01  # of logits, where attention is in bfloat16


class RoundedCache(DynamicCache):
    """Of transformers, with keys and values as a pool of `dtype` gives them back."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def update(self, key: torch.Tensor, value: torch.Tensor, *where: Any, **more: Any) -> Any:
        rounded = (stored(entries, self.dtype).float() for entries in (key, value))
        return super().update(*rounded, *where, **more)


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8, INT8], ids=str)
@pytest.mark.parametrize(("head_dim", "window"), ((16, None), (48, 21), (64, 150), (80, None), (128, 21)))
def test_a_narrow_pool_costs_only_its_rounding(
    isa: str, head_dim: int, window: int | None, dtype: torch.dtype
) -> None:
    config = MistralConfig(**{**SIZES, "head_dim": head_dim}, sliding_window=window)
    model, ids = randomised(lambda: MistralForCausalLM(config)), tokens(300)
    with torch.inference_mode():
        expected = model(ids[None], past_key_values=RoundedCache(dtype)).logits[0]
        unrounded = model(ids[None]).logits[0]
    pool = Pool(plan_of(model), dtype)
    found = torch.cat([pool.logits((0, ids[:-1], 299)), pool.logits((0, ids, 1))])
    error, cost = (found - expected).norm(), (unrounded - expected).norm()
    assert error < (BF16_ERROR if isa in BF16_ATTENTION else 5e-4) * expected.norm()
    assert error < cost


@pytest.mark.parametrize("dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("exponent", (-124, -10, 0, 100))
def test_a_pool_holds_what_the_torch_path_writes(isa: str, dtype: torch.dtype, exponent: int) -> None:
    """Byte for byte, scales included; of the first layer, whose keys and values depend on no pool."""
    model, ids = randomised(qwen3), tokens(70)
    attention = model.model.layers[0].self_attn
    attention.k_norm.weight.data *= 2.0**exponent
    attention.v_proj.weight.data *= 2.0**exponent
    attention.v_proj.weight.data[:48] = 0  # one head's
    exact, written, expected = (Pool(plan_of(model), kind) for kind in (torch.float32, dtype, dtype))
    for pool in (
        written,
        expected,
    ):  # those that fp8 divides by; some numbers are too large then, others too small
        pool.kv.key_scale[0], pool.kv.value_scale[0] = (
            2.0 ** max(exponent - 8, -126),
            2.0 ** max(exponent - 2, -126),
        )
    for pool in (exact, written):
        pool.logits((0, ids, 70))
    slots = exact.table[0, :70].long()
    expected.kv.write(0, slots, *(data[0, slots] for data in (exact.kv.key, exact.kv.value)))
    for name in ("key", "value", "key_slot_scales", "value_slot_scales"):
        a, b = (getattr(pool.kv, name) for pool in (written, expected))
        assert (a is None) == (b is None)
        if a is not None:
            assert torch.equal(a[0].view(torch.uint8), b[0].view(torch.uint8)), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8, INT8], ids=str)
def test_ties_and_what_is_too_large_are_written_as_the_torch_path_does(isa: str, dtype: torch.dtype) -> None:
    """Values are biases here, so they are any numbers: first of each head 127, by which int8 has a scale of 1."""
    model = randomised(llama)
    finite = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    halves = torch.arange(127) + 0.5
    large = torch.tensor([447.0, 448.0, 464.0, 1e9, 2.0**127, 3e38, torch.inf])
    numbers = torch.cat(
        [(finite[1:] + finite[:-1]) / 2, halves, torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8])]
    )
    values = torch.cat([numbers, -numbers, large, -large, torch.tensor([0.0, -0.0, 2.0**-120])])
    values = torch.nn.functional.pad(values, (0, -len(values) % 31)).view(-1, 31)
    values = torch.cat([torch.full((len(values), 1), 127.0), values], dim=1)
    attention = model.model.layers[0].self_attn
    attention.v_proj.weight.data *= 0
    for pair in values.split(2):
        attention.v_proj.bias.data[: pair.numel()] = pair.flatten()
        written, expected = Pool(plan_of(model), dtype), Pool(plan_of(model), dtype)
        written.logits((0, tokens(1), 1))
        slot, stored_values = written.table[0, :1].long(), attention.v_proj.bias.detach().view(1, 2, 32)
        expected.kv.write(0, slot, torch.zeros(1, 2, 32), stored_values)
        assert torch.equal(written.kv.value[0, slot].float(), expected.kv.value[0, slot].float())
        if dtype == INT8:
            assert torch.equal(written.kv.value_slot_scales[0], expected.kv.value_slot_scales[0])


@pytest.mark.parametrize("dtype", [FP8, INT8], ids=str)
def test_attention_reads_what_the_torch_path_reads(isa: str, dtype: torch.dtype) -> None:
    """Every number of the format, by scales of all sizes. The last token reads another slot than it writes to."""
    pool, ids = Pool(plan_of(randomised(qwen3)), dtype), tokens(300)
    random = torch.Generator().manual_seed(0)
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes != 128] if dtype == INT8 else codes[codes.view(FP8).float().isfinite()]
    for data in (pool.kv.key, pool.kv.value):
        drawn = torch.randint(len(codes), data.shape, generator=random)
        data.view(torch.uint8).copy_(codes[drawn])
    for scales in (pool.kv.key_slot_scales, pool.kv.value_slot_scales):
        if scales is not None:
            scales.copy_(0.02 * torch.rand(scales.shape, generator=random) ** 4)
    pool.kv.key_scale, pool.kv.value_scale = [2.0**-8, 2.0**-7], [2.0**-6, 2.0**-9]
    wide, slots = Pool(pool.plan), torch.arange(SLOTS)
    for layer in range(2):
        wide.kv.write(layer, slots, *pool.kv.gather(layer, slots))
    elsewhere = torch.tensor([int(pool.table[2, 0])])
    found, expected = (
        some.plan.run(some.batch([(0, ids, 1)], out_slots=elsewhere))[0] for some in (pool, wide)
    )
    assert (found - expected).norm() < (BF16_ERROR if isa in BF16_ATTENTION else 1e-4) * expected.norm()


MODELS = st.sampled_from([llama, mistral, qwen3])
KV = st.sampled_from([*KV_DTYPES])


def chunks(total: int) -> st.SearchStrategy[list[int]]:
    """Ways to cut `total` tokens into passes."""
    cuts = st.sets(st.integers(1, total - 1), max_size=8)
    return cuts.map(lambda c: [b - a for a, b in zip([0, *sorted(c)], [*sorted(c), total], strict=True)])


@settings(deadline=None, max_examples=40)
@given(
    make=MODELS,
    cut=chunks(330),
    threads=st.integers(1, 4),
    seed=st.integers(0, 5),
    dtype=KV,
    isa=ISAS,
)
def test_chunks_threads_and_pages_change_no_bit(
    make: Callable[[], PreTrainedModel],
    cut: list[int],
    threads: int,
    seed: int,
    dtype: torch.dtype,
    isa: str,
) -> None:
    ids, plan, done, parts = tokens(330), quantised_plan(make), 0, []
    whole, pool = Pool(plan, dtype), Pool(plan, dtype, seed)
    with running_on(isa, 1):
        expected = whole.logits((0, ids, 330))
    with running_on(isa, threads):
        for count in cut:
            done += count
            parts.append(pool.logits((2, ids[:done], count)))
    assert torch.equal(torch.cat(parts), expected)


@settings(deadline=None, max_examples=40)
@given(
    make=MODELS,
    queries=st.lists(st.integers(1, 20), min_size=3, max_size=3),
    lengths=st.lists(st.integers(20, 400), min_size=3, max_size=3),
    order=st.permutations([0, 1, 2]),
    threads=st.integers(1, 4),
    dtype=KV,
    isa=ISAS,
)
def test_sequences_beside_one_another_change_no_bit(
    make: Callable[[], PreTrainedModel],
    queries: list[int],
    lengths: list[int],
    order: list[int],
    threads: int,
    dtype: torch.dtype,
    isa: str,
) -> None:
    ids = [tokens(length, seed) for seed, length in enumerate(lengths)]
    pool = Pool(quantised_plan(make), dtype)
    with running_on(isa, 1):
        for row, length in enumerate(lengths):
            context = length - queries[row]
            if context > 0:
                pool.logits((row, ids[row][:context], context))
        expected = torch.cat([pool.logits((row, ids[row], queries[row])) for row in order])
    for row, length in enumerate(lengths):
        new = pool.table[row, length - queries[row] : length].long()
        pool.kv.copy(pool.table[row, length : length + queries[row]].long(), new)  # forget them
    with running_on(isa, threads):
        assert torch.equal(pool.logits(*[(row, ids[row], queries[row]) for row in order]), expected)


@pytest.mark.parametrize("threads", [1, 3])
def test_tokens_chosen_in_the_pass_are_the_best_by_its_logits_and_the_first_of_equals(
    isa: str, threads: int
) -> None:
    model = randomised(llama)
    model.lm_head.weight.data[50:] = model.lm_head.weight.data[: VOCAB - 50].clone()  # every logit twice
    pool, ids = Pool(plan_of(model)), tokens(60)
    batch = pool.batch([(0, ids, 60)], logits_rows=torch.tensor([59, 3, 3]))
    with running_on(isa, threads):
        logits, _ = pool.plan.run(batch)
        found = pool.plan.choose(batch, chances=True)
        assert pool.plan.choose(batch).token_ids == found.token_ids
    assert found.token_ids == logits.argmax(-1).tolist() and max(found.token_ids) < 50
    torch.testing.assert_close(torch.tensor(found.chances), logits.softmax(-1).amax(-1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("values", [(torch.nan, 0.0), (torch.inf, -torch.inf)], ids=str)
def test_no_token_is_chosen_where_a_logit_is_not_finite(isa: str, values: tuple[float, float]) -> None:
    model = randomised(llama)
    model.lm_head.weight.data[70:72, 3] = torch.tensor(values)
    pool, ids = Pool(plan_of(model)), tokens(8)
    batch = pool.batch([(0, ids, 8)], logits_rows=torch.tensor([7]))
    assert pool.plan.choose(batch).token_ids == [-1]
    found = pool.plan.choose(batch, chances=True)
    assert found.token_ids == [-1] and np.isnan(found.chances).all()


def test_a_pass_without_outputs_only_fills_the_cache(quantised: StepPlan) -> None:
    ids, pool, silent = tokens(33), Pool(quantised), Pool(quantised)
    expected = pool.logits((0, ids, 33))[-1:]
    logits, _ = quantised.run(silent.batch([(0, ids[:-1], 32)], logits_rows=torch.arange(0)))
    assert logits.shape == (0, VOCAB)
    assert torch.equal(silent.logits((0, ids, 1)), expected)


def test_passes_on_two_threads_at_once_take_turns(quantised: StepPlan) -> None:
    ids = tokens(120)
    expected = Pool(quantised).logits((0, ids, 120))
    results: list[torch.Tensor] = []

    def work() -> None:
        for _ in range(5):
            results.append(Pool(quantised).logits((0, ids, 120)))

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(results) == 15
    assert all(torch.equal(result, expected) for result in results)


@pytest.mark.parametrize(
    ("changes", "text"),
    (
        ({"input_ids": torch.tensor([0, VOCAB])}, "token id"),
        ({"input_ids": torch.tensor([-1, 0])}, "token id"),
        ({"positions": torch.tensor([0, WIDTH])}, "position"),
        ({"out_slots": torch.tensor([0, SLOTS])}, "slot"),
        ({"query_lens": [3]}, "lengths"),
        ({"context_lens": [1]}, "lengths"),
        ({"context_lens": [WIDTH + 1]}, "lengths"),
        ({"logits_rows": torch.tensor([2])}, "lengths"),
    ),
)
def test_a_batch_out_of_range_is_refused(quantised: StepPlan, changes: dict[str, object], text: str) -> None:
    pool = Pool(quantised)
    with pytest.raises(library.NativeError, match=text):
        quantised.run(pool.batch([(0, tokens(2), 2)], **changes))


def test_a_pool_of_another_shape_or_type_is_refused(quantised: StepPlan) -> None:
    pool = Pool(quantised)
    key, value, scales = pool.kv.key, pool.kv.value, torch.ones(2)
    for kv, text in (
        (KVTensors(key=key[:, :, :1], value=value), "KV pool"),
        (KVTensors(key=key.half(), value=value.half()), "float16"),
        (KVTensors(key=key.bfloat16(), value=value), "KV pool"),
        (KVTensors(key=key, value=value, key_scales=scales, value_scales=scales), "scales"),
        (KVTensors(key=key.to(FP8), value=value.to(FP8)), "scales"),
        (KVTensors(key=key.char(), value=value.char(), key_scales=scales, value_scales=scales), "scales"),
    ):
        with pytest.raises(ValueError, match=text):
            quantised.run(pool.batch([(0, tokens(2), 2)], kv=kv))


@pytest.mark.parametrize(
    ("sizes", "text"),
    (({"head_dim": 40}, "head_dim 40"), ({"intermediate": 100}, "100"), ({"kv_heads": 4}, "6 heads")),
)
def test_sizes_without_a_kernel_are_named(quantised: StepPlan, sizes: dict[str, int], text: str) -> None:
    spec = StepSpec(**{**{name: getattr(quantised.spec, name) for name in StepSpec.__slots__}, **sizes})
    assert text in str(unsupported(spec))
    assert unsupported(quantised.spec) is None
