"""The DFlash drafter: what it drafts is what an eager implementation drafts, over rounds of draft and verify."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from backends.forward import ForwardBatch, ForwardMode, forward_context
from backends.kv_pool import KVPool
from backends.torch_native import TorchNativeBackend
from engine.graphs import capture
from kernels.cpu.library import available, reason
from models.base import CausalLM
from models.dflash import DFlashDrafter
from models.loader import inspect_model, load_drafter, load_model
from models.options import ModelOptions
from models.weights import Precision
from tests.models.checkpoints import make_checkpoint
from tests.models.dflash_reference import ReferenceDrafter, make_drafter
from tests.models.harness import Sequences

CPU = torch.device("cpu")
FLOAT32 = Precision(torch.float32)
native = pytest.mark.skipif(not available(), reason=f"no native kernels: {reason()}")
# The eager path on plain float32 weights, and both paths of the native kernels.
PATHS = [
    pytest.param(False, False, id="eager"),
    pytest.param(True, False, id="native, layer by layer", marks=native),
    pytest.param(True, True, id="step plan", marks=native),
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
        batch = ForwardBatch(
            mode=ForwardMode.EXTEND,
            input_ids=torch.tensor(block).flatten(),
            positions=torch.cat(positions),
            out_slots=torch.cat(out_slots),
            query_lens=(size,) * len(last),
            context_lens=tuple(lengths[row] + size for row in last),
            slot_table=self.table,
            table_rows=tuple(last),
            logits_rows=torch.arange(size * len(last)),
            kv_pool=self.pool,
            causal=False,
        )
        with torch.inference_mode():
            if self.graph is not None:
                logits, _ = self.graph.run(batch)
            else:
                with forward_context(batch, self.backend):
                    logits = self.drafter.logits(self.drafter(batch).last)
        return dict(zip(last, logits.split(size), strict=True))


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
