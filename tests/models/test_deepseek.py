"""Latent attention: transformers' logits by either method, and which rows take which, whoever shares the pass."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from backends.base import AttentionLayer, LatentAttentionLayer
from backends.forward import ForwardBatch, ForwardMode, forward_context
from backends.handlers import MHA_PREFIX_THRESHOLD
from backends.kv_pool import FP8, INT8, KVPool
from backends.torch_native import TorchNativeBackend
from backends.triton import TritonBackend
from models.base import CausalLM, ModelError
from models.loader import inspect_model, load_model
from models.options import ModelOptions
from models.weights import Precision
from tests.models.deepseek_checkpoints import CHECKPOINTS, make_checkpoint
from tests.models.harness import Sequences
from tests.native import needs_native

CPU = torch.device("cpu")
LONG = MHA_PREFIX_THRESHOLD + 50  # tokens of a prefix that is decompressed
Pair = tuple[PreTrainedModel, CausalLM]
Logits = dict[int, torch.Tensor]


class Recorder(TorchNativeBackend):
    """Notes the method of each pass's last layer, and how many rows of each sequence took it."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[tuple[str, tuple[int, ...]]] = []

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: AttentionLayer,
        batch: ForwardBatch,
        plan: object,
    ) -> torch.Tensor:
        if layer.layer_id == 1:
            self.taken.append(("mqa", batch.query_lens))
        return super().forward(query, key, value, layer, batch, plan)

    def forward_mha(
        self,
        query: torch.Tensor,
        entry: torch.Tensor,
        layer: LatentAttentionLayer,
        batch: ForwardBatch,
        plan: object,
    ) -> torch.Tensor:
        if layer.layer_id == 1:
            self.taken.append(("mha", batch.query_lens))
        return super().forward_mha(query, entry, layer, batch, plan)


class Passes(Sequences):
    """Sequences whose passes say which rows are prompts', as the runner's do."""

    def __init__(self, model: CausalLM, rows: int = 3, length: int = 760) -> None:
        self.recorder = Recorder()
        super().__init__(model, rows, length, self.recorder)

    def prefill(self, row: int, tokens: Sequence[int]) -> torch.Tensor:
        """A prompt or a chunk of it, alone in a pass."""
        return self.run({row: tokens}, {row: len(tokens)})[row]

    def run(self, tokens: Mapping[int, Sequence[int]], prompts: Mapping[int, int] | None = None) -> Logits:
        """One pass; the first `prompts[row]` tokens of a row are a prompt's, the others decoded or verified."""
        prompts = prompts or {}
        lengths = [len(ids) for ids in tokens.values()]
        prompt_rows = [prompts.get(row, 0) for row in tokens]
        mode = ForwardMode.DECODE if max(lengths) == 1 else ForwardMode.TARGET_VERIFY
        if any(prompt_rows):
            mode = ForwardMode.EXTEND if lengths == prompt_rows else ForwardMode.MIXED
        batch = dataclasses.replace(self._batch(tokens), mode=mode, num_prompt_rows=tuple(prompt_rows))
        with torch.inference_mode(), forward_context(batch, self.backend):
            logits = self.model.logits(self.model(batch).last)
        return dict(zip(tokens, logits.split(lengths), strict=True))

    def methods(self) -> list[tuple[str, tuple[int, ...]]]:
        """What was noted since the last call."""
        noted = list(self.recorder.taken)
        self.recorder.taken.clear()
        return noted


def load(folder: Path, dtype: torch.dtype = torch.float32, native: bool = False) -> CausalLM:
    return load_model(inspect_model(ModelOptions(model=str(folder))), CPU, Precision(dtype, native))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """Checkpoint by name: transformers' model, and Tandem's loaded from the file that it saved."""
    made: dict[str, Pair] = {}

    def get(name: str) -> Pair:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = make_checkpoint(name, folder), load(folder)
        return made[name]

    return get


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 250, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def expected_logits(reference: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return reference(input_ids=torch.tensor([ids])).logits[0]


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.std() > 0.5, "a reference this flat would prove nothing"
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_equal_transformers(pair: Callable[[str], Pair], name: str) -> None:
    """Cold prompts, chunks, hits on short and long prefixes, decode, and blocks verified after a hit."""
    reference, model = pair(name)
    ids = prompt(LONG + 60)
    expected = expected_logits(reference, ids)
    passes = Passes(model)

    assert_close(passes.prefill(0, ids), expected)
    assert passes.methods() == [("mha", (len(ids),))]

    chunks = [0, 7, 30, 31, LONG, LONG + 20]
    for start, stop in itertools.pairwise(chunks):
        assert_close(passes.prefill(1, ids[start:stop]), expected[start:stop])
    lengths = [(stop - start,) for start, stop in itertools.pairwise(chunks)]
    assert passes.methods() == list(zip(["mha", "mqa", "mqa", "mqa", "mha"], lengths, strict=True))

    passes.lengths[2] = LONG  # a prefix-cache hit: what is there was computed for another sequence
    passes.slot_table[2, :LONG] = passes.slot_table[0, :LONG]
    assert_close(passes.prefill(2, ids[LONG : LONG + 30]), expected[LONG : LONG + 30])
    assert passes.methods() == [("mha", (30,))]
    assert_close(passes.run({2: ids[LONG + 30 : LONG + 38]})[2], expected[LONG + 30 : LONG + 38])
    step = passes.run({1: ids[LONG + 20 : LONG + 21], 2: ids[LONG + 38 : LONG + 39]})
    assert_close(torch.cat((step[1], step[2])), expected[[LONG + 20, LONG + 38]])
    assert passes.methods() == [("mqa", (8,)), ("mqa", (1, 1))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_decode_and_verify_have_the_same_bits_in_any_company(dtype: torch.dtype, tmp_path: Path) -> None:
    make_checkpoint("v3", tmp_path)
    model = load(tmp_path, dtype)
    ids, other = prompt(170, seed=1), prompt(600, seed=2)
    alone = Passes(model)
    alone.prefill(0, ids[:140])
    expected = torch.cat([alone.run({0: [token]})[0] for token in ids[140:]])

    passes = Passes(model)
    passes.prefill(0, ids[:140])
    blocks = [passes.run({0: ids[140:148]})[0]]
    # Beside a prompt's first chunk, its second with a short prefix, a decode row, and a prompt with rows of output.
    blocks.append(passes.run({1: other[:30], 0: ids[148:149]}, {1: 30})[0])
    blocks.append(passes.run({0: ids[149:160], 1: other[30:550]}, {1: 520})[0])
    blocks.append(passes.run({1: other[550:551], 0: ids[160:161]})[0])
    blocks.append(passes.run({2: other[:40], 0: ids[161:]}, {2: 33})[0])
    assert torch.equal(torch.cat(blocks), expected)
    assert passes.methods() == [
        *[("mha", (140,)), ("mqa", (8,))],
        *[("mha", (30,)), ("mqa", (1,))],
        *[("mqa", (520,)), ("mqa", (11,))],
        ("mqa", (1, 1)),
        *[("mha", (33,)), ("mqa", (7, 9))],
    ]


def test_a_prompts_bits_and_method_do_not_depend_on_its_company(pair: Callable[[str], Pair]) -> None:
    _, model = pair("v2")
    ids, other = prompt(LONG + 40, seed=3), prompt(80, seed=4)
    alone = Passes(model)
    expected = torch.cat((alone.prefill(0, ids[:LONG]), alone.prefill(0, ids[LONG:])))

    passes = Passes(model)
    passes.prefill(1, other[:20])
    parts = [passes.run({1: other[20:40], 0: ids[:LONG]}, {1: 20, 0: LONG})[0]]
    parts.append(passes.run({0: ids[LONG:], 1: other[40:41], 2: other}, {0: 40, 2: 80})[0])
    assert torch.equal(torch.cat(parts), expected)
    assert passes.methods()[1:] == [("mqa", (20,)), ("mha", (LONG,)), ("mha", (40, 80)), ("mqa", (1,))]


def test_a_prompt_decompressed_in_chunks_has_the_bits_of_the_whole(pair: Callable[[str], Pair]) -> None:
    _, model = pair("v3")
    ids = prompt(LONG + 80, seed=5)
    whole, chunked = Passes(model), Passes(model)
    parts = [chunked.prefill(0, ids[:LONG]), chunked.prefill(0, ids[LONG : LONG + 33])]
    parts.append(chunked.prefill(0, ids[LONG + 33 :]))
    assert torch.equal(torch.cat(parts), whole.prefill(0, ids))


def test_the_cache_holds_one_narrow_entry_a_token(pair: Callable[[str], Pair]) -> None:
    _, model = pair("v3")
    pool = Passes(model).pool
    assert pool.key.shape[2:] == (1, 32 + 8)
    assert pool.value.numel() == 0
    assert pool.layout.bytes_per_slot == 2 * 40 * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8, INT8], ids=["bf16", "fp8", "int8"])
def test_a_narrow_cache_moves_logits_little_and_keeps_decode_and_verify_equal(
    pair: Callable[[str], Pair], dtype: torch.dtype
) -> None:
    reference, model = pair(
        "v3-dense"
    )  # experts that a rounding chooses differently would hide how little it is
    ids = prompt(LONG + 40)
    expected = expected_logits(reference, ids)
    got = []
    for blocks in ([1] * 10, [4, 6]):
        passes = Passes(model)
        passes.pool = KVPool(model.kv_layout(dtype), passes.pool.num_slots, CPU)
        rows = [passes.prefill(0, ids[:LONG]), passes.prefill(0, ids[LONG : LONG + 30])]
        for block in blocks:
            start = passes.lengths[0]
            rows.append(passes.run({0: ids[start : start + block]})[0])
        got.append(torch.cat(rows))
    assert torch.equal(got[0], got[1])
    divergence = (expected.softmax(-1) * (expected.log_softmax(-1) - got[0].log_softmax(-1))).sum(-1)
    assert divergence.mean() < 0.01
    assert not torch.allclose(got[0], expected, atol=1e-4), "nothing was rounded"


def test_captured_states_are_the_outputs_of_the_layers_asked_for(pair: Callable[[str], Pair]) -> None:
    reference, model = pair("v3")
    ids = prompt(20)
    with torch.inference_mode():
        expected = reference(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
    hidden = Sequences(model).forward({0: ids}, capture_layers=(0,))
    torch.testing.assert_close(hidden.captured[0], expected[1][0], atol=1e-4, rtol=0)


def test_triton_attends_to_the_latent_cache(pair: Callable[[str], Pair]) -> None:
    """Prompts too: it has kernels for the absorbed form alone."""
    reference, model = pair("v3")
    ids = prompt(24)
    expected = expected_logits(reference, ids)
    backend = TritonBackend()
    backend.stamp("triton", "triton")
    sequences = Sequences(model, 2, 40, backend)
    parts = [sequences.extend({0: ids[:12]})[0], sequences.extend({0: ids[12:13], 1: ids[:3]})[0]]
    parts.append(sequences.extend({0: ids[13:]})[0])
    assert_close(torch.cat(parts), expected)


@needs_native
def test_native_weights_give_the_same_logits(tmp_path: Path) -> None:
    reference = make_checkpoint("v3", tmp_path)
    ids = prompt(40)
    passes = Passes(load(tmp_path, native=True))
    parts = [passes.prefill(0, ids[:20]), passes.run({0: ids[20:21]})[0], passes.run({0: ids[21:]})[0]]
    assert_close(torch.cat(parts), expected_logits(reference, ids))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"topk_method": "by_lot"}, "topk_method 'by_lot' is not supported"),
        ({"topk_method": "group_limited_greedy", "n_group": 3}, "3 of 16 experts .* 1 of 3 groups"),
        ({"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 1}, "3 of 16 experts"),
        ({"kv_lora_rank": 0}, "kv_lora_rank"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(
    changes: dict[str, object], problem: str, tmp_path: Path
) -> None:
    make_checkpoint("v2-lite", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ModelError, match=problem):
        inspect_model(ModelOptions(model=str(tmp_path)))


class TestKimi:
    """Its models are DeepSeek-V3's by another name, and K2.5 has one of them within."""

    def test_k2(self, tmp_path: Path) -> None:
        reference = make_checkpoint("v3-one-group", tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "kimi_k2"}))
        ids = prompt(20)
        assert_close(Passes(load(tmp_path)).prefill(0, ids), expected_logits(reference, ids))

    def test_k25_serves_its_text_model(self, tmp_path: Path) -> None:
        reference = make_checkpoint("v3-one-group", tmp_path)
        text = json.loads((tmp_path / "config.json").read_text())
        outer = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25"}
        nested = {**outer, "text_config": {**text, "model_type": "kimi_k2"}, "vision_config": {}}
        (tmp_path / "config.json").write_text(json.dumps(nested))
        weights = load_file(tmp_path / "model.safetensors")
        renamed = {f"language_model.{name}": tensor for name, tensor in weights.items()}
        renamed |= {"vision_tower.patch.weight": torch.zeros(2), "mm_projector.0.weight": torch.zeros(2)}
        save_file(renamed, tmp_path / "model.safetensors")
        ids = prompt(20)
        assert_close(Passes(load(tmp_path)).prefill(0, ids), expected_logits(reference, ids))
