"""A drafter's runner: a pool over the target's slots, weights that may borrow, memory that is counted for both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from backends.kv_pool import KVLayout
from backends.options import AttentionOptions
from engine.options import CacheOptions
from engine.runner import ModelRunner, Role
from models.loader import inspect_model, load_drafter
from models.options import ModelOptions
from speculative.pairing import inspect_drafter
from tests.models.checkpoints import make_checkpoint
from tests.models.dflash_reference import make_drafter


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    target, drafter = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafter")
    make_checkpoint("llama-four-layers", target)
    make_drafter(drafter)
    return target, drafter


def make_runner(role: Role, options: ModelOptions, cache: CacheOptions, **changes: Any) -> ModelRunner:
    files = inspect_model(options) if role == "target" else changes.pop("files")
    return ModelRunner(role, files, options, cache, AttentionOptions(), max_running_requests=3, **changes)


def make_target(folder: Path, **changes: Any) -> ModelRunner:
    cache = CacheOptions(max_total_tokens=changes.pop("max_total_tokens", 100))
    return make_runner("target", ModelOptions(model=str(folder), device="cpu"), cache, **changes)


def test_a_drafter_is_brought_up_beside_its_target(folders: tuple[Path, Path]) -> None:
    target = make_target(folders[0])
    options = ModelOptions(model=str(folders[1]), device="cpu")
    draft = make_runner(
        "draft",
        options,
        CacheOptions(max_total_tokens=100),
        files=inspect_drafter(options, target.files),
        target=target,
        scratch_slots=18,
        load_weights=load_drafter,
    )
    for hook in ("load", "init_attention_backends", "init_graphs"):
        for runner in (target, draft):
            getattr(runner, hook)()
    assert target.model is not None and draft.model is not None
    assert target.kv_pool is not None and draft.kv_pool is not None
    assert draft.model.lm_head is target.model.lm_head
    assert (target.kv_pool.num_slots, draft.kv_pool.num_slots) == (100, 118)
    assert draft.kv_pool.layout == draft.kv_layout
    assert draft.slot_table is not None and draft.slot_table.tensor.shape[0] == 3
    assert draft.describe()["stage"] == "ready"


def test_a_pool_by_memory_or_by_number_leaves_room_for_what_the_drafter_holds_for_each_slot(
    folders: tuple[Path, Path],
) -> None:
    nobody_has_so_much = KVLayout(1, 1 << 50, 64, 64, torch.float32)
    target = make_target(folders[0], draft_layouts=lambda: [nobody_has_so_much])
    target.load()
    with pytest.raises(ValueError, match="--max-total-tokens"):
        target.init_attention_backends()
    for layouts, fits in (([], True), ([nobody_has_so_much], False)):
        target = make_target(folders[0], max_total_tokens=None, draft_layouts=lambda found=layouts: found)
        target.load()
        if fits:
            target.init_attention_backends()
            continue
        with pytest.raises(ValueError, match="--mem-fraction-static"):
            target.init_attention_backends()
