"""Drafters on disk: the published DFlash format for serving, and all of a run's state for going on with it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from kernels.quantize import quantize
from speculative.training.model import Drafter, DrafterShape
from speculative.training.options import Weights

STATE_NAME = "training.pt"


def export(
    folder: Path, drafter: Drafter, draft_token_ids: Tensor, weights: Weights, extra: Mapping[str, Any]
) -> None:
    """Write `config.json` and `model.safetensors`. `extra` goes into `dflash_config`.

    int8: matrices as `name` int8 [rows, columns] and `name_scale` float16 [rows, columns / 32], as Q8_0 has them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, weight in drafter.state_dict().items():
        if weights == "int8" and weight.ndim == 2:
            tensors[name], tensors[f"{name}_scale"] = _int8(weight.detach().float().cpu())
        else:
            tensors[name] = weight.detach().to(torch.bfloat16).cpu().contiguous()
    tensors["draft_token_ids"] = draft_token_ids.to(torch.int64).cpu()
    partial = folder / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    os.replace(partial, folder / "model.safetensors")
    config = published_config(drafter.shape, {"draft_vocab_size": len(draft_token_ids), **extra})
    write_atomically(folder / "config.json", json.dumps(config, indent=2) + "\n")


def _int8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    blocks = quantize(matrix, "Q8_0").data.unflatten(1, (-1, 34))
    scales, values = blocks.split((2, 32), dim=-1)
    return values.contiguous().view(torch.int8).flatten(1), scales.contiguous().view(torch.float16).squeeze(
        -1
    )


def published_config(shape: DrafterShape, extra: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of published DFlash checkpoints."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": shape.block_size,
        "dflash_config": {
            "short_block_size": shape.short_block_size,
            "mask_token_id": shape.mask_token_id,
            "target_layer_ids": list(shape.target_layer_ids),
            **extra,
        },
        "num_target_layers": shape.num_target_layers,
        "num_hidden_layers": shape.num_layers,
        "layer_types": ["full_attention"] * shape.num_layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": shape.rms_norm_eps,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def write_atomically(path: Path, text: str) -> None:
    """Replace the file at once, or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def save_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write a run's state. Killed meanwhile, the one before stays."""
    partial = folder / (STATE_NAME + ".partial")
    with partial.open("wb") as file:
        torch.save(dict(state), file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, folder / STATE_NAME)


def load_state(folder: Path) -> dict[str, Any] | None:
    """The state that `save_state` wrote last, or None where there is none."""
    path = folder / STATE_NAME
    return torch.load(path, map_location="cpu", weights_only=True) if path.is_file() else None
