"""The DFlash drafter: what it drafts is what an eager implementation drafts, over rounds of draft and verify."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from backends.forward import ForwardBatch, ForwardMode, forward_context
from backends.kv_pool import FP8, INT8, KVPool
from backends.torch_native import TorchNativeBackend
from engine.graphs import capture
from kernels.cpu import library
from kernels.cpu.library import NativeError
from models.base import CausalLM, ModelError
from models.dflash import DFlashDrafter
from models.dflash_config import DFlashConfig, read_dflash_config
from models.hf_config import read_config
from models.loader import inspect_model, load_drafter, load_model
from models.options import ModelOptions
from models.weights import Precision
from tests.models.checkpoints import make_checkpoint
from tests.models.dflash_reference import ReferenceDrafter, make_drafter
from tests.models.harness import Sequences
from tests.native import needs_native

CPU = torch.device("cpu")
FLOAT32 = Precision(torch.float32)
# The eager path on plain float32 weights, and both paths of the native kernels.
PATHS = [
    pytest.param(False, False, id="eager"),
    pytest.param(True, False, id="native, layer by layer", marks=needs_native),
    pytest.param(True, True, id="step plan", marks=needs_native),
]
SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 9,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "full attention": {},
    "sliding window": SLIDING,
    "sliding window, not causal": {**SLIDING, "is_causal": False},
    "all causal": {"dflash_config": {"causal": True}},
    "three layers": {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3},
    "block size in dflash_config": {"block_size": None, "dflash_config": {"block_size": 4}},
    "reduced vocabulary": {"dflash_config": {"draft_vocab_size": 40}},
    "attention biases": {"attention_bias": True},
    "scaled embedding": {"dflash_config": {"input_embedding_scale": 3.0}},
}


class Drafting:
    """Sequences of a target, and the drafter's own pool over the same slots with scratch slots behind."""

    def __init__(self, target: CausalLM, drafter: CausalLM, captured: bool, rows: int = 2) -> None:
        assert isinstance(drafter, DFlashDrafter)
        self.drafter = drafter
        self.sequences = Sequences(target, rows, captured=captured)
        self.backend = TorchNativeBackend()
        self.num_slots = self.sequences.pool.num_slots
        layout = drafter.kv_layout(torch.float32)
        self.pool = KVPool(layout, self.num_slots + rows * drafter.block_size, CPU)
        self.graph = capture(drafter, self.pool, self.backend) if captured else None
        assert (self.graph is not None) == captured
        self.table = torch.zeros(rows, self.sequences.slot_table.shape[1], dtype=torch.int32)

    def learn(self, row: int, ids: list[int], keep: int) -> None:
        """The target runs `ids`; the first `keep` of them stay, and the drafter gets their features."""
        sequences, start = self.sequences, self.sequences.lengths[row]
        states = sequences.forward({row: ids}, tuple(sorted(self.drafter.target_layer_ids)))
        sequences.lengths[row] = start + keep
        features = torch.cat(
            [states.captured[layer][:keep] for layer in self.drafter.target_layer_ids], dim=-1
        )
        slots = sequences.slot_table[row, start : start + keep].long()
        self.drafter.write_context(features, torch.arange(start, start + keep), slots, self.pool)

    def draft(self, last: dict[int, int]) -> dict[int, torch.Tensor]:
        """Logits [block, vocab] of each row, all in one block pass."""
        batch = self.batch(last)
        with torch.inference_mode():
            if self.graph is not None:
                logits, _ = self.graph.run(batch)
            else:
                with forward_context(batch, self.backend):
                    logits = self.drafter.logits(self.drafter(batch).last)
        return dict(zip(last, logits.split(self.drafter.block_size), strict=True))

    def batch(self, last: dict[int, int], first: int = 0) -> ForwardBatch:
        """The blocks, with outputs for their rows from `first` on."""
        size, lengths = self.drafter.block_size, self.sequences.lengths
        positions, out_slots = [], []
        for row in last:
            length = lengths[row]
            scratch = self.num_slots + row * size + torch.arange(size)
            self.table[row, :length] = self.sequences.slot_table[row, :length]
            self.table[row, length : length + size] = scratch
            positions.append(torch.arange(length, length + size))
            out_slots.append(scratch)
        block = [[token, *[self.drafter.mask_token_id] * (size - 1)] for token in last.values()]
        return ForwardBatch(
            mode=ForwardMode.EXTEND,
            input_ids=torch.tensor(block).flatten(),
            positions=torch.cat(positions),
            out_slots=torch.cat(out_slots),
            query_lens=(size,) * len(last),
            context_lens=tuple(lengths[row] + size for row in last),
            slot_table=self.table,
            table_rows=tuple(last),
            logits_rows=torch.arange(size * len(last)).view(len(last), size)[:, first:].flatten(),
            kv_pool=self.pool,
            causal=False,
        )


@contextmanager
def team_of(threads: int) -> Iterator[None]:
    before = library.threads()
    library.set_threads(threads)
    yield
    library.set_threads(before)


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, PreTrainedModel]]:
    """Four layers each; gemma3's embedding is scaled, and tied to its head."""
    made = {}
    for name in ("llama-four-layers", "gemma3"):
        folder = tmp_path_factory.mktemp(name)
        made[name] = folder, make_checkpoint(name, folder)
    return made


def load(target: Path, drafter: Path, native: bool) -> tuple[CausalLM, CausalLM]:
    precision = Precision(torch.float32, native=native)
    model = load_model(inspect_model(ModelOptions(model=str(target))), CPU, precision)
    files = inspect_model(ModelOptions(model=str(drafter)), drafter=True)
    return model, load_drafter(files, CPU, precision, model)


def features(reference: PreTrainedModel, ids: list[int]) -> list[torch.Tensor]:
    """transformers' hidden states of all `ids`, [T, hidden] for the embedding and each layer."""
    with torch.inference_mode():
        states = reference(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
    return [state[0] for state in states]


def play(drafting: Drafting, target: PreTrainedModel, references: list[ReferenceDrafter]) -> None:
    """Prompts, then rounds of draft and verify with random accept lengths; every block equals the reference's."""
    generator = torch.Generator().manual_seed(3)

    def some(count: int) -> list[int]:
        return torch.randint(3, 240, (count,), generator=generator).tolist()

    known: list[list[int]] = [[], []]
    last = {0: 5, 1: 9}
    fresh = [some(11), some(2)]  # a prompt, and one that the window or a block is longer than
    keep = [len(ids) for ids in fresh]
    for _ in range(4):
        for row, ids in enumerate(fresh):
            drafting.learn(row, ids, keep[row])
            start = len(known[row])
            known[row] += ids[: keep[row]]
            states = features(target, known[row])
            references[row].learn([state[start:] for state in states], start)
        found = drafting.draft(last)
        for row, reference in enumerate(references):
            torch.testing.assert_close(found[row], reference.draft(target, last[row]), atol=1e-4, rtol=1e-4)
        accepted = torch.randint(0, drafting.drafter.block_size, (2,), generator=generator).tolist()
        fresh = [[last[row], *some(drafting.drafter.block_size - 1)] for row in last]
        keep = [1 + count for count in accepted]
        last = dict(enumerate(some(2)))


@pytest.mark.parametrize(("is_native", "captured"), PATHS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_blocks_are_those_of_the_reference_over_rounds_of_draft_and_verify(
    targets: dict[str, tuple[Path, PreTrainedModel]],
    tmp_path: Path,
    variant: str,
    is_native: bool,
    captured: bool,
) -> None:
    folder, target = targets["gemma3" if variant == "scaled embedding" else "llama-four-layers"]
    references = [make_drafter(tmp_path, **VARIANTS[variant]) for _ in range(2)]
    play(Drafting(*load(folder, tmp_path, is_native), captured), target, references)


@pytest.mark.parametrize(("is_native", "captured"), PATHS[:2])
def test_a_context_pass_has_one_arithmetic_for_one_row_and_many(
    targets: dict[str, tuple[Path, PreTrainedModel]], tmp_path: Path, is_native: bool, captured: bool
) -> None:
    make_drafter(tmp_path)
    drafter = load(targets["llama-four-layers"][0], tmp_path, is_native)[1]
    assert isinstance(drafter, DFlashDrafter)
    generator = torch.Generator().manual_seed(0)
    features, positions = torch.randn(70, 3 * 64, generator=generator), torch.arange(70)
    slots = torch.randperm(100, generator=generator)[:70]
    pools = [KVPool(drafter.kv_layout(torch.bfloat16), 100, CPU) for _ in range(2)]
    drafter.write_context(features, positions, slots, pools[0])
    for start, stop in ((0, 1), (1, 4), (4, 70)):
        rows = slice(start, stop)
        drafter.write_context(features[rows], positions[rows], slots[rows], pools[1])
    assert torch.equal(pools[0].key, pools[1].key) and torch.equal(pools[0].value, pools[1].value)
    untouched = torch.ones(100, dtype=torch.bool).index_fill_(0, slots, False)
    assert not pools[0].key[:, untouched].any() and pools[0].key[:, slots].any(dim=(-1, -2)).all()


def test_embedding_and_head_are_the_targets_own(
    targets: dict[str, tuple[Path, PreTrainedModel]], tmp_path: Path
) -> None:
    make_drafter(tmp_path)
    target, drafter = load(targets["llama-four-layers"][0], tmp_path, False)
    assert drafter.embed_tokens is target.embed_tokens
    assert drafter.lm_head is target.lm_head


@pytest.mark.parametrize(
    "is_native", [False, pytest.param(True, marks=needs_native)], ids=["eager", "native"]
)
def test_a_reduced_vocabulary_is_a_copy_of_those_rows_of_the_head(
    targets: dict[str, tuple[Path, PreTrainedModel]], tmp_path: Path, is_native: bool
) -> None:
    reference = make_drafter(tmp_path, dflash_config={"draft_vocab_size": 40})
    target, drafter = load(targets["llama-four-layers"][0], tmp_path, is_native)
    assert isinstance(drafter, DFlashDrafter)
    ids = drafter.draft_token_ids
    assert ids is not None and torch.equal(ids, reference.state["draft_token_ids"])
    hidden = torch.randn(5, 64)
    assert torch.equal(drafter.logits(hidden), target.logits(hidden)[:, ids])


@pytest.mark.parametrize("reduced", [{}, {"draft_vocab_size": 40}], ids=["whole", "reduced"])
@pytest.mark.parametrize(
    "is_native", [False, pytest.param(True, marks=needs_native)], ids=["eager", "native"]
)
def test_what_a_token_adds_to_the_next_ones_logits_is_the_references(
    targets: dict[str, tuple[Path, PreTrainedModel]], tmp_path: Path, is_native: bool, reduced: dict[str, int]
) -> None:
    folder, target = targets["llama-four-layers"]
    reference = make_drafter(tmp_path, successor=True, dflash_config=reduced)
    drafter = load(folder, tmp_path, is_native)[1]
    assert isinstance(drafter, DFlashDrafter)
    tokens = [5, 255, 5, 130]
    with torch.inference_mode():
        expected = torch.stack([reference.after(target, token) for token in tokens])
    torch.testing.assert_close(drafter.successor_logits(torch.tensor(tokens)), expected, atol=1e-4, rtol=1e-4)


@needs_native
@pytest.mark.parametrize("reduced", [{}, {"draft_vocab_size": 40}], ids=["whole", "reduced"])
@pytest.mark.parametrize("successor", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
def test_tokens_that_a_native_pass_chooses_are_the_references(
    targets: dict[str, tuple[Path, PreTrainedModel]],
    tmp_path: Path,
    reduced: dict[str, int],
    successor: bool,
    threads: int,
) -> None:
    """18 sequences: more than every thread prepares for itself. The first lengths differ."""
    folder, target = targets["llama-four-layers"]
    rows = 18
    references = [make_drafter(tmp_path, successor=successor, dflash_config=reduced) for _ in range(rows)]
    drafting = Drafting(*load(folder, tmp_path, True), captured=True, rows=rows)
    last = {}
    for row, reference in enumerate(references):
        ids = torch.randint(3, 240, (2 + row % 5,), generator=torch.Generator().manual_seed(row)).tolist()
        drafting.learn(row, ids, len(ids))
        reference.learn(features(target, ids), 0)
        last[row] = 10 + row
    assert drafting.graph is not None
    for wanted in (rows, 1):
        some = dict(list(last.items())[:wanted])
        with team_of(threads):
            found = drafting.graph.choose(drafting.batch(some, first=1), chances=True)
        with torch.inference_mode():
            expected = [references[row].choose(target, token) for row, token in some.items()]
        assert found.token_ids == [token for choices, _ in expected for token in choices]
        torch.testing.assert_close(
            torch.tensor(found.chances),
            torch.tensor([chance for _, own in expected for chance in own]),
            rtol=1e-3,
            atol=1e-5,
        )


@needs_native
def test_the_matrices_of_a_context_pass_are_the_layers_own(
    targets: dict[str, tuple[Path, PreTrainedModel]], tmp_path: Path
) -> None:
    make_drafter(tmp_path)
    drafter = load(targets["llama-four-layers"][0], tmp_path, True)[1]
    of_layers = {
        weight.data.untyped_storage().data_ptr()
        for layer in drafter.layers
        for weight in layer.self_attn.qkv_proj.weights[1:]
    }
    assert {weight.data.untyped_storage().data_ptr() for weight in drafter._context_kv.weights} == of_layers
    assert len(of_layers) == 1, "one product for all layers"


@needs_native
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8, INT8], ids=str)
def test_a_native_context_pass_writes_what_a_narrow_pool_makes_of_it(
    targets: dict[str, tuple[Path, PreTrainedModel]], tmp_path: Path, dtype: torch.dtype
) -> None:
    make_drafter(tmp_path)
    drafter = load(targets["llama-four-layers"][0], tmp_path, True)[1]
    assert isinstance(drafter, DFlashDrafter)
    plain, narrow, expected = (
        KVPool(drafter.kv_layout(kind), 30, CPU) for kind in (torch.float32, dtype, dtype)
    )
    features, places = torch.randn(20, 3 * 64), torch.arange(20)
    for pool in (plain, narrow):
        drafter.write_context(features, places, places, pool)
    for layer in range(plain.layout.num_layers):
        expected.write(layer, places, *plain.gather(layer, places))
    assert torch.equal(narrow.key.view(torch.uint8), expected.key.view(torch.uint8))
    assert torch.equal(narrow.value.view(torch.uint8), expected.value.view(torch.uint8))
    if dtype == INT8:
        assert torch.equal(narrow.key_slot_scales, expected.key_slot_scales)
        assert torch.equal(narrow.value_slot_scales, expected.value_slot_scales)


@needs_native
@pytest.mark.parametrize(("position", "slot"), [(160, 0), (-1, 0), (0, 30), (0, -1)])
def test_a_native_context_pass_writes_nowhere_else(
    targets: dict[str, tuple[Path, PreTrainedModel]], tmp_path: Path, position: int, slot: int
) -> None:
    make_drafter(tmp_path)
    drafter = load(targets["llama-four-layers"][0], tmp_path, True)[1]
    assert isinstance(drafter, DFlashDrafter) and drafter.context_length == 160
    pool = KVPool(drafter.kv_layout(torch.float32), 30, CPU)
    with pytest.raises(NativeError):
        drafter.write_context(torch.randn(1, 3 * 64), torch.tensor([position]), torch.tensor([slot]), pool)
    assert not pool.key.any() and not pool.value.any()


def as_int8(folder: Path) -> None:
    """Store the drafter's matrices as int8 with a float16 scale for every 32 columns."""
    stored = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if tensor.ndim < 2:
            stored[name] = tensor
            continue
        groups = tensor.unflatten(1, (-1, 32))
        scale = (groups.abs().amax(-1) / 127).half()
        stored[name] = (groups / scale.unsqueeze(-1)).round().clamp(-127, 127).to(torch.int8).flatten(1)
        stored[f"{name}_scale"] = scale
    save_file(stored, folder / "model.safetensors")


def test_an_int8_checkpoint_is_what_its_scales_say(
    targets: dict[str, tuple[Path, PreTrainedModel]], tmp_path: Path
) -> None:
    folder, target = targets["llama-four-layers"]
    make_drafter(tmp_path)
    as_int8(tmp_path)
    references = [ReferenceDrafter(tmp_path) for _ in range(2)]
    for reference in references:
        for name, tensor in list(reference.state.items()):
            if tensor.dtype == torch.int8:
                scale = reference.state[f"{name}_scale"].repeat_interleave(32, 1)
                reference.state[name] = tensor * scale
    play(Drafting(*load(folder, tmp_path, False), captured=False), target, references)


@needs_native
@pytest.mark.parametrize(("store", "name"), [("int8", "Q8_0/native"), ("bfloat16", "BF16/native")])
def test_narrow_weights_run_natively_as_they_are(
    targets: dict[str, tuple[Path, PreTrainedModel]], tmp_path: Path, store: str, name: str
) -> None:
    make_drafter(tmp_path)
    if store == "int8":
        as_int8(tmp_path)
    else:
        tensors = load_file(tmp_path / "model.safetensors")
        save_file({key: tensor.bfloat16() for key, tensor in tensors.items()}, tmp_path / "model.safetensors")
    target, drafter = load(targets["llama-four-layers"][0], tmp_path, True)
    exact = load(targets["llama-four-layers"][0], tmp_path, False)
    assert (drafter.weight_format, drafter.kv_dtype) == (name, torch.bfloat16)
    blocks = []
    for drafting in (Drafting(target, drafter, captured=True), Drafting(*exact, captured=False)):
        drafting.learn(0, list(range(10, 30)), 20)
        blocks.append(drafting.draft({0: 7})[0])
    # int8 also rounds activations.
    tolerance = 0.05 if store == "int8" else 1e-4
    assert (blocks[0] - blocks[1]).norm() < tolerance * blocks[1].norm()


PUBLISHED = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def read(**changes: Any) -> DFlashConfig:
    return read_dflash_config({**PUBLISHED, **changes}, "config.json")


def test_a_published_config_is_read_with_its_own_keys() -> None:
    found = read()
    assert (found.block_size, found.mask_token_id, found.num_target_layers) == (16, 151669, 36)
    assert found.target_layer_ids == (1, 9, 17, 25, 33)
    assert found.draft_vocab_size is None and found.input_embedding_scale is None


def test_keys_within_dflash_config_go_before_those_outside() -> None:
    own = {**PUBLISHED["dflash_config"], "block_size": 8}
    assert read(dflash_config=own).block_size == 8
    assert read(dflash_config=own, block_size=None).block_size == 8


def test_sliding_layers_are_causal_unless_the_config_says_so_of_all() -> None:
    slides = {"layer_types": ["sliding_attention", *["full_attention"] * 4], "use_sliding_window": True}
    config = read_config({**PUBLISHED, **slides, "sliding_window": 4096})

    def causal(**changes: Any) -> list[bool]:
        return [read(**changes).is_causal(layer, config) for layer in range(2)]

    assert causal() == [True, False]
    assert causal(is_causal=False) == [False, False]
    assert causal(dflash_config={**PUBLISHED["dflash_config"], "causal": True}) == [True, True]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"dflash_config": None}, "no 'dflash_config'"),
        ({"dflash_config": {"mask_token_id": 3}}, "target_layer_ids"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": []}}, "target_layer_ids"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [-1]}}, "target_layer_ids"),
        ({"dflash_config": {"target_layer_ids": [1]}}, "mask_token_id"),
        (
            {"dflash_config": {**PUBLISHED["dflash_config"], "projector_type": "dspark"}},
            "projector_type 'dspark'",
        ),
        ({"dflash_config": {**PUBLISHED["dflash_config"], "shift_label": True}}, "shift_label is not"),
        ({"dflash_config": {**PUBLISHED["dflash_config"], "use_aux_hidden_state": False}}, "use_aux_hidden"),
        ({"block_size": 1}, "block_size"),
        ({"block_size": "8"}, "block_size"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused_by_its_key(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelError, match=f"config.json: .*{text}"):
        read(**changes)


def test_a_drafter_is_no_model_by_itself(tmp_path: Path) -> None:
    make_drafter(tmp_path)
    with pytest.raises(ModelError, match=r"config\.json: .*--speculative-draft-model-path"):
        inspect_model(ModelOptions(model=str(tmp_path)))


@pytest.mark.parametrize("name", ["DFlash2DraftModel", "Eagle3DraftModel"])
def test_another_kind_of_drafter_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    make_drafter(tmp_path, architectures=[name])
    with pytest.raises(ModelError, match=name):
        inspect_model(ModelOptions(model=str(tmp_path)), drafter=True)


def test_a_checkpoint_that_lacks_a_tensor_is_refused(
    targets: dict[str, tuple[Path, PreTrainedModel]], tmp_path: Path
) -> None:
    make_drafter(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["fc.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"fc\.weight"):
        load(targets["llama-four-layers"][0], tmp_path, False)
