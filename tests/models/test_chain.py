"""EAGLE-3 drafters and MTP heads give the logits of their eager references, over a context in shuffled slots."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, PreTrainedModel

from backends.forward import ForwardBatch, ForwardMode, forward_context
from backends.kv_pool import KVPool
from backends.torch_native import TorchNativeBackend
from engine.graphs import capture
from models.base import ModelError
from models.chain import FEATURES, ChainDrafter
from models.loader import ModelFiles, inspect_model, load_drafter, load_model
from models.options import ModelOptions
from models.weights import Precision
from speculative.pairing import inspect_drafter, target_layer_ids
from tests.models.chain_reference import ReferenceChain, make_eagle3, make_mtp
from tests.models.harness import Sequences
from tests.native import needs_native
from tests.tiny_model import save_tiny_model

CPU = torch.device("cpu")
FLOAT32 = Precision(torch.float32)
TEXT: list[int] = torch.randint(0, 256, (23,), generator=torch.Generator().manual_seed(5)).tolist()
MTP = ["deepseek", "qwen3-next", "qwen3-5", "qwen3-5-experts"]


@dataclass
class Loaded:
    target: Sequences
    drafter: ChainDrafter

    @classmethod
    def of(cls, target: Path, drafter: Path | None, precision: Precision = FLOAT32) -> Loaded:
        files = inspect_model(ModelOptions(model=str(target)))
        model = load_model(files, CPU, precision)
        chain = load_drafter(inspect(files, drafter), CPU, precision, model)
        assert isinstance(chain, ChainDrafter)
        return cls(Sequences(model), chain)

    @torch.inference_mode()
    def draft(self, ids: Sequence[int], count: int) -> tuple[list[int], torch.Tensor]:
        """As `ReferenceChain.draft`, with the context in pool and table, and a pass for each token."""
        target, model = self.target, self.drafter
        known = len(ids) - 1  # tokens that the target has computed
        captured = target.forward({0: ids[:-1]}, tuple(sorted(model.target_layer_ids))).captured
        fused = model.fuse(torch.cat([captured[layer] for layer in model.target_layer_ids], dim=-1))
        slots = target.slot_table[0].long()
        pool = KVPool(model.kv_layout(torch.float32), target.pool.num_slots, CPU)
        assert capture(model, pool, TorchNativeBackend()) is None, "a step plan would not see the features"
        positions = torch.arange(known - 1)
        model.write_context(torch.tensor(ids[1:known]), fused[:-1], positions, slots[1:known], pool)
        table = target.slot_table[:, 1:]
        features, drafted, logits = fused[-1:], [ids[-1]], []
        for position in range(known - 1, known - 1 + count):
            batch = ForwardBatch(
                mode=ForwardMode.DECODE,
                input_ids=torch.tensor(drafted[-1:]),
                positions=torch.tensor([position]),
                out_slots=table[0, position : position + 1].long(),
                query_lens=(1,),
                context_lens=(position + 1,),
                slot_table=table,
                table_rows=(0,),
                logits_rows=torch.tensor([0]),
                kv_pool=pool,
                features=features,
            )
            with forward_context(batch, TorchNativeBackend()):
                states = model(batch)
                logits.append(model.logits(states.last)[0])
            features = states.captured[FEATURES]
            column = int(logits[-1].argmax())
            drafted.append(column if model.draft_token_ids is None else int(model.draft_token_ids[column]))
        return drafted[1:], torch.stack(logits)


def inspect(target: ModelFiles, drafter: Path | None) -> ModelFiles:
    options = ModelOptions(model=str(drafter or target.path))
    return inspect_drafter(options, target, "mtp" if drafter is None else "eagle3")


def hold_to_reference(loaded: Loaded, reference: ReferenceChain, atol: float = 1e-4) -> None:
    tokens, logits = loaded.draft(TEXT, 5)
    expected_tokens, expected = reference.draft(TEXT, 5)
    torch.testing.assert_close(logits, expected, atol=atol, rtol=atol)
    assert tokens == expected_tokens
    assert (logits.diff(dim=0).abs().amax(dim=-1) > 0.1).all(), (
        "a chain that goes nowhere shows no wrong feedback"
    )


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """Eight layers, so that the three that are read by default differ."""
    folder = save_tiny_model(
        tmp_path_factory.mktemp("llama"),
        hidden_size=64,
        num_hidden_layers=8,
        num_attention_heads=4,
        initializer_range=0.2,
        max_position_embeddings=512,
    )
    return folder, LlamaForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, (1, 3, 4)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 5, 6]}}, (0, 5, 6)),
        ({"draft_vocab_size": 257}, (1, 3, 4)),
        ({"architectures": ["LlamaForCausalLM"], "own_embedding": True, "num_hidden_layers": 40}, (1, 3, 4)),
        (
            {"hidden_size": 48, "target_hidden_size": 64, "own_embedding": True},
            (1, 3, 4),
        ),
        ({"head_dim": 24, "rms_norm_eps": 0.02, "rope_theta": 500.0, "num_key_value_heads": 1}, (1, 3, 4)),
    ],
)
def test_eagle3_drafts_as_its_reference(
    llama: tuple[Path, PreTrainedModel], tmp_path: Path, changes: dict[str, Any], layers: tuple[int, ...]
) -> None:
    reference = make_eagle3(tmp_path, llama[1], **changes)
    loaded = Loaded.of(llama[0], tmp_path)
    assert loaded.drafter.target_layer_ids == layers
    hold_to_reference(loaded, reference)


@pytest.mark.parametrize("kind", MTP)
def test_an_mtp_head_drafts_as_its_reference(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    reference = make_mtp(kind, tmp_path)
    loaded = Loaded.of(tmp_path, None)
    assert not caplog.messages, "neither the target nor the head leaves weights unread that it knows of"
    hold_to_reference(loaded, reference)
    assert loaded.drafter.embed_tokens is loaded.target.model.embed_tokens
    assert loaded.drafter.lm_head is loaded.target.model.lm_head


def test_the_head_of_a_multimodal_checkpoint_is_found_beside_its_text_model(tmp_path: Path) -> None:
    reference = make_mtp("qwen3-5", tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    nested = {re.sub(r"^model\.", "model.language_model.", name): t for name, t in load_file(weights).items()}
    save_file(nested | {"model.visual.blocks.0.attn.proj.weight": torch.zeros(4, 4)}, weights)
    text = json.loads(config.read_text())
    config.write_text(json.dumps({"model_type": "qwen3_5", "text_config": text, "vision_config": {}}))
    hold_to_reference(Loaded.of(tmp_path, None), reference)


@needs_native
@pytest.mark.parametrize("kind", ["eagle3", "deepseek"])
def test_they_run_over_packed_weights(llama: tuple[Path, PreTrainedModel], tmp_path: Path, kind: str) -> None:
    native = Precision(torch.float32, native=True)
    reference = make_eagle3(tmp_path, llama[1]) if kind == "eagle3" else make_mtp(kind, tmp_path)
    target, drafter = (llama[0], tmp_path) if kind == "eagle3" else (tmp_path, None)
    hold_to_reference(Loaded.of(target, drafter, native), reference)


def test_a_model_without_a_head_is_refused(llama: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="LlamaForCausalLM has no MTP head"):
        inspect(inspect_model(ModelOptions(model=str(llama[0]))), None)
    make_mtp("deepseek", tmp_path)
    weights = tmp_path / "model.safetensors"
    save_file(
        {name: t for name, t in load_file(weights).items() if not name.startswith("model.layers.2")}, weights
    )
    with pytest.raises(ModelError, match="the checkpoint has no MTP head") as caught:
        inspect(inspect_model(ModelOptions(model=str(tmp_path))), None)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"norm_before_residual": True}, "norm_before_residual is not supported"),
        ({"norm_before_fc": True}, "norm_before_fc is not supported"),
        ({"eagle_config": {"return_hidden_post_norm": True}}, "return_hidden_post_norm is not supported"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 9]}, r"eagle_aux_hidden_state_layer_ids has \[9\]"),
        ({"draft_vocab_size": 300}, "draft_vocab_size 300 is more than its 257 tokens"),
        ({"target_hidden_size": 96}, "target_hidden_size is 96, that of the target 64"),
        ({"vocab_size": 300}, "vocab_size is 300, that of the target 257"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 8]}},
            r"eagle_aux_hidden_state_layer_ids has \[8\]",
        ),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "all"}}, "target_layer_ids"),
    ],
)
def test_an_eagle3_drafter_that_does_not_fit_is_refused_by_the_field(
    llama: tuple[Path, PreTrainedModel], tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    make_eagle3(tmp_path, llama[1])
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(ModelError, match=text) as caught:
        inspect(inspect_model(ModelOptions(model=str(llama[0]))), tmp_path)
    assert str(config) in str(caught.value)


def test_a_drafter_that_has_no_embedding_and_another_width_is_refused(
    llama: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    make_eagle3(tmp_path, llama[1], hidden_size=48, target_hidden_size=64)
    with pytest.raises(ModelError, match="hidden_size is 48, that of the target 64"):
        Loaded.of(llama[0], tmp_path)


def test_a_target_too_shallow_for_the_default_layers_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, num_hidden_layers=3, hidden_size=64)
    make_eagle3(tmp_path / "drafter", LlamaForCausalLM.from_pretrained(folder))
    with pytest.raises(ModelError, match=r"has \[-1\], but the target's 3 layers"):
        inspect(inspect_model(ModelOptions(model=str(folder))), tmp_path / "drafter")


def test_an_eagle3_drafter_goes_as_far_as_its_target_and_is_no_model_by_itself(
    llama: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    make_eagle3(tmp_path, llama[1])  # whose configuration names 64 positions
    files = inspect(inspect_model(ModelOptions(model=str(llama[0]))), tmp_path)
    assert files.config.context_length == 512
    assert target_layer_ids(files) == (1, 3, 4)
    with pytest.raises(ModelError, match="--speculative-draft-model-path"):
        inspect_model(ModelOptions(model=str(tmp_path)))


def test_pytorchs_own_file_is_read_where_there_is_no_other(
    llama: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    reference = make_eagle3(tmp_path, llama[1])
    weights = tmp_path / "model.safetensors"
    torch.save(load_file(weights), tmp_path / "pytorch_model.bin")
    weights.unlink()
    hold_to_reference(Loaded.of(llama[0], tmp_path), reference)
    (tmp_path / "pytorch_model.bin").write_bytes(b"nothing of the kind")
    with pytest.raises(ModelError, match="pytorch_model.bin: not a PyTorch file of tensors"):
        inspect(inspect_model(ModelOptions(model=str(llama[0]))), tmp_path)


def test_a_file_that_holds_more_than_tensors_is_not_run(
    llama: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    make_eagle3(tmp_path, llama[1])
    (tmp_path / "model.safetensors").unlink()
    torch.save({"fc.weight": Path("no tensor")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pytorch_model.bin: not a PyTorch file of tensors"):
        inspect(inspect_model(ModelOptions(model=str(llama[0]))), tmp_path)


def test_a_drafter_of_several_layers_is_refused(llama: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    make_eagle3(tmp_path, llama[1])
    weights = tmp_path / "model.safetensors"
    save_file(load_file(weights) | {"layers.1.self_attn.q_proj.weight": torch.zeros(64, 64)}, weights)
    with pytest.raises(ModelError, match="of several layers"):
        Loaded.of(llama[0], tmp_path)
