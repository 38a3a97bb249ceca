"""How large a KV pool may be: what is asked for, else what memory and the process's cgroups leave."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from backends.kv_pool import DTYPES, KVLayout
from engine.memory import MAX_CONTEXTS, NO_LIMIT, cgroup_headroom, num_checkpoints, num_slots
from engine.options import CacheOptions
from tests.lossless import load_runner
from tests.tiny_model import CONTEXT_LEN, save_tiny_model

MIB = 1 << 20
CPU = torch.device("cpu")


def make_group(path: Path, limit: str, used: int = 0, **stat: int) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "memory.max").write_text(f"{limit}\n")
    (path / "memory.current").write_text(f"{used}\n")
    (path / "memory.stat").write_text("".join(f"{name} {value}\n" for name, value in stat.items()))


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Says that the process is in a group two levels below the root."""
    path = tmp_path / "cgroup"
    path.write_text("4:memory:/legacy\n0::/pod/server\n")
    return path


def test_below_the_limit_is_what_is_not_used(tmp_path: Path, own: Path) -> None:
    make_group(tmp_path / "root/pod/server", str(100 * MIB), 30 * MIB)
    assert cgroup_headroom(tmp_path / "root", own) == 70 * MIB


def test_cached_files_that_nobody_maps_are_not_used(tmp_path: Path, own: Path) -> None:
    stat = dict(anon=30 * MIB, inactive_file=40 * MIB, active_file=20 * MIB, file_mapped=15 * MIB)
    make_group(tmp_path / "root/pod/server", str(100 * MIB), 90 * MIB, **stat)
    assert cgroup_headroom(tmp_path / "root", own) == (10 + 45) * MIB


def test_mapped_shared_memory_makes_nothing_less_than_used(tmp_path: Path, own: Path) -> None:
    stat = dict(inactive_file=MIB, active_file=MIB, file_mapped=50 * MIB)
    make_group(tmp_path / "root/pod/server", str(100 * MIB), 90 * MIB, **stat)
    assert cgroup_headroom(tmp_path / "root", own) == 10 * MIB


def test_a_group_over_its_limit_has_nothing_left(tmp_path: Path, own: Path) -> None:
    make_group(tmp_path / "root/pod/server", str(100 * MIB), 120 * MIB)
    assert cgroup_headroom(tmp_path / "root", own) == 0


def test_the_tightest_group_above_counts(tmp_path: Path, own: Path) -> None:
    make_group(tmp_path / "root/pod/server", "max", 30 * MIB)
    make_group(tmp_path / "root/pod", str(50 * MIB), 30 * MIB)
    make_group(tmp_path / "root", str(500 * MIB), 30 * MIB)
    make_group(tmp_path, "0", 0)  # no group: above the root
    assert cgroup_headroom(tmp_path / "root", own) == 20 * MIB


def test_in_a_container_the_process_is_in_the_root(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("0::/\n")
    make_group(tmp_path / "root", str(50 * MIB), 10 * MIB)
    assert cgroup_headroom(tmp_path / "root", own) == 40 * MIB


@pytest.mark.parametrize("membership", [None, "4:memory:/legacy\n", "0::/pod/server\n"])
def test_without_a_limit_there_is_none(tmp_path: Path, membership: str | None) -> None:
    own = tmp_path / "cgroup"
    if membership is not None:
        own.write_text(membership)
    assert cgroup_headroom(tmp_path / "root", own) == NO_LIMIT


def layout(name: str) -> KVLayout:
    return KVLayout(num_layers=4, num_kv_heads=2, head_dim=64, v_head_dim=64, dtype=DTYPES[name])


def test_a_pool_holds_what_is_asked_for_in_whole_pages() -> None:
    options = CacheOptions(max_total_tokens=1000, page_size=16)
    assert num_slots([layout("float32")], options, 10, CPU) == 992


def test_a_small_models_pool_stops_at_a_few_contexts() -> None:
    assert num_slots([layout("int8")], CacheOptions(page_size=16), 100, CPU) == MAX_CONTEXTS * 100


def test_a_device_of_its_own_is_filled() -> None:
    assert num_slots([layout("int8")], CacheOptions(), 100, torch.device("meta")) > MAX_CONTEXTS * 100


def test_narrower_entries_make_room_for_more() -> None:
    """By the bytes of a slot, those of its scales among them."""
    slots = {
        name: num_slots([layout(name)], CacheOptions(mem_fraction_static=0.001), 1 << 40, CPU)
        for name in ("float32", "bfloat16", "fp8", "int8")
    }
    assert slots["bfloat16"] / slots["float32"] == pytest.approx(2, rel=0.2)
    assert slots["fp8"] / slots["float32"] == pytest.approx(4, rel=0.2)
    assert slots["int8"] / slots["float32"] == pytest.approx(64 * 4 / (64 + 4), rel=0.2)


def test_what_requests_hold_beside_their_slots_comes_out_of_the_same_memory() -> None:
    entry, options = layout("float32"), CacheOptions(mem_fraction_static=0.001)
    all_of_it = num_slots([entry], options, 1 << 40, CPU)
    half = all_of_it // 2 * entry.bytes_per_slot
    assert num_slots([entry], options, 1 << 40, CPU, half) == pytest.approx(all_of_it / 2, rel=0.3)
    with pytest.raises(ValueError, match="--max-running-requests"):
        num_slots([entry], options, 1 << 40, CPU, 4 * half)


def test_without_attention_a_slot_costs_nothing() -> None:
    none = KVLayout(0, 1, 1, 1, torch.float32)
    assert num_slots([none], CacheOptions(), 1000, CPU) == MAX_CONTEXTS * 1000


def test_a_pool_without_room_for_a_page_names_the_settings() -> None:
    with pytest.raises(ValueError, match="--mem-fraction-static or --max-total-tokens, or lower --page-size"):
        num_slots([layout("float32")], CacheOptions(max_total_tokens=8, page_size=16), 100, CPU)


def test_every_boundary_of_a_full_pool_has_a_checkpoint_if_there_is_memory() -> None:
    asked = CacheOptions(max_total_tokens=1000, mamba_track_interval=32)
    assert num_checkpoints(100, [layout("int8")], asked, 1 << 40, CPU, 0) == 1000 // 32
    assert num_checkpoints(100, [layout("int8")], CacheOptions(), 1024, CPU, 0) == MAX_CONTEXTS * 1024 // 256


def test_checkpoints_and_slots_share_the_memory_that_there_is() -> None:
    entry, options = layout("float32"), CacheOptions(mem_fraction_static=0.001, mamba_track_interval=16)
    size = 1 << 16
    memory = num_slots([entry], options, 1 << 40, CPU) * entry.bytes_per_slot
    checkpoints = num_checkpoints(size, [entry], options, 1 << 40, CPU, 0)
    assert checkpoints * size == pytest.approx(memory / 2, rel=0.2)
    slots = num_slots([entry], options, 1 << 40, CPU, checkpoints * size)
    assert slots * entry.bytes_per_slot == pytest.approx(memory / 2, rel=0.3)


def test_a_pool_of_a_size_that_was_asked_for_leaves_checkpoints_the_rest() -> None:
    entry = layout("float32")
    memory = num_slots([entry], CacheOptions(mem_fraction_static=0.001), 1 << 40, CPU)
    asked = CacheOptions(mem_fraction_static=0.001, max_total_tokens=2 * memory)
    assert num_checkpoints(100, [entry], asked, 1 << 40, CPU, 0) == 0


def test_without_a_prefix_cache_there_are_no_checkpoints() -> None:
    options = CacheOptions(max_total_tokens=1000, enable_prefix_caching=False)
    assert num_checkpoints(100, [layout("int8")], options, 1000, CPU, 0) == 0


def test_a_pool_that_shortens_contexts_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = save_tiny_model(tmp_path)
    with caplog.at_level(logging.WARNING, "engine.runner"):
        assert load_runner(str(model), "float32", slots=CONTEXT_LEN).max_context_len == CONTEXT_LEN
        assert not caplog.text
        assert load_runner(str(model), "float32", slots=20).max_context_len == 20
    assert f"contexts end at 20 tokens, not at {CONTEXT_LEN}" in caplog.text
    assert "--max-total-tokens" in caplog.text
