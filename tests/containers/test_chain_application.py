"""EAGLE-3 drafters and MTP heads, wired: each starts beside its target by its flags, and changes no token."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from app.settings import EngineSettings, SettingsError
from models.base import ModelError
from tests.containers.test_application import complete, make_container, start_both, with_drafter
from tests.models.chain_reference import make_eagle3, make_mtp
from tests.tiny_model import save_tiny_model

SAMPLED = {"max_tokens": 24, "temperature": 0.8, "seed": 5, "ignore_eos": True}
DRAFTER = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return save_tiny_model(tmp_path_factory.mktemp("model"), **shape)


@pytest.fixture(scope="module")
def drafter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafter")
    make_eagle3(folder, LlamaForCausalLM.from_pretrained(model), **DRAFTER)
    return folder


@pytest.mark.parametrize(
    "settings",
    [
        {"speculative_algorithm": "eagle3"},
        {"speculative_algorithm": "auto"},
        {"speculative_algorithm": "eagle3", "speculative_draft_kv_cache_dtype": "fp8"},
        {"speculative_algorithm": "eagle3", "dtype": "auto", "speculative_draft_kv_cache_dtype": "int8"},
    ],
)
def test_an_eagle3_drafter_changes_no_token(model: Path, drafter: Path, settings: dict[str, Any]) -> None:
    plain_settings = {"dtype": settings.get("dtype", "float32"), "speculative_algorithm": "none"}
    plain = complete(make_container(model, **plain_settings), "abcabcabc", **SAMPLED)
    container = make_container(model, speculative_draft_model_path=str(drafter), **settings)
    assert complete(container, "abcabcabc", **SAMPLED).token_ids == plain.token_ids
    assert "eagle3" in container.algorithms()


@pytest.fixture(scope="module")
def with_head(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with an MTP head in its checkpoint."""
    folder = tmp_path_factory.mktemp("with-head")
    make_mtp("qwen3-next", folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / file, folder)
    return folder


def test_an_mtp_head_needs_no_path_and_changes_no_token(with_head: Path) -> None:
    plain = complete(make_container(with_head, speculative_algorithm="none"), "abcabcabc", **SAMPLED)
    container = make_container(with_head, speculative_algorithm="mtp")
    assert complete(container, "abcabcabc", **SAMPLED).token_ids == plain.token_ids
    assert container.algorithms() == ("none", "mtp")


def test_the_targets_weights_are_not_loaded_twice(with_head: Path) -> None:
    target, draft = start_both(make_container(with_head, speculative_algorithm="mtp"))
    assert target.kv_pool is not None and draft.kv_pool is not None
    assert draft.kv_pool.num_slots > target.kv_pool.num_slots
    assert draft.kv_layout.num_layers == 1 and draft.state_pool is None
    assert draft.model is not None and target.model is not None
    assert draft.model.lm_head is target.model.lm_head


def test_the_head_may_have_a_backend_and_a_cache_of_its_own(with_head: Path) -> None:
    settings = EngineSettings(
        model=str(with_head),
        speculative_algorithm="mtp",
        speculative_draft_attention_backend="torch_native",
        speculative_draft_kv_cache_dtype="int8",
    )
    assert settings.attention_options().speculative_draft_attention_backend == "torch_native"
    assert settings.draft_model_options() == settings.model_options()


def test_what_does_not_belong_together_is_refused_by_name(
    model: Path, drafter: Path, with_head: Path
) -> None:
    with pytest.raises(ModelError, match="LlamaForCausalLM has no MTP head"):
        make_container(model, speculative_algorithm="mtp").worker()
    with pytest.raises(SettingsError, match="--speculative-draft-model-path has no meaning with .* mtp"):
        with_drafter(with_head, drafter, "mtp")
    with pytest.raises(SettingsError, match="--speculative-draft-window-size"):
        make_container(with_head, speculative_algorithm="mtp", speculative_draft_window_size=8)
    with pytest.raises(SettingsError, match="eagle3 needs a drafter"):
        make_container(model, speculative_algorithm="eagle3").worker()
    with pytest.raises(ModelError, match="is an EAGLE-3 drafter: --speculative-algorithm eagle3"):
        with_drafter(model, drafter, "dflash").worker()
    with pytest.raises(ModelError, match="is a model of its own: --speculative-algorithm standalone"):
        with_drafter(model, model, "eagle3").worker()
