"""A DFlash drafter in plain torch, float32, straight from a config.json and a state dict: the reference.

It knows nothing of pools, slots or batches: one sequence, its keys and values in lists that grow, and the masks
written out as the published implementation defines them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import embedding, linear, silu
from transformers import PreTrainedModel

SHAPE: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 160,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "layer_types": ["full_attention", "full_attention"],
    "dtype": "float32",
    "block_size": 6,
    "num_target_layers": 4,
    "dflash_config": {"mask_token_id": 250, "target_layer_ids": [0, 2, 1]},
}


def make_drafter(folder: Path, successor: bool = False, **changes: Any) -> ReferenceDrafter:
    """Save a random drafter into `folder`; keys of `dflash_config` may be among `changes`' own dict of that name.

    successor: with the head that has each token depend on the one before it.
    """
    own = SHAPE["dflash_config"] | changes.get("dflash_config", {})
    config = {**SHAPE, **changes, "dflash_config": own}
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(own["target_layer_ids"]) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    if successor:
        shapes |= {"successor.weight": (hidden, hidden), "successor_norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        shapes |= {
            f"layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
                "self_attn.q_proj": (queries, hidden),
                "self_attn.k_proj": (keys, hidden),
                "self_attn.v_proj": (keys, hidden),
                "self_attn.o_proj": (hidden, queries),
                "self_attn.q_norm": (head,),
                "self_attn.k_norm": (head,),
                "mlp.gate_proj": (inner, hidden),
                "mlp.up_proj": (inner, hidden),
                "mlp.down_proj": (hidden, inner),
            }.items()
        }
    if config.get("attention_bias"):
        for name in [name for name in shapes if "_proj" in name and "self_attn" in name]:
            shapes[name.replace(".weight", ".bias")] = shapes[name][:1]
    generator = torch.Generator().manual_seed(1)
    state = {
        name: torch.randn(shape, generator=generator) * (0.3 if len(shape) == 1 else shape[-1] ** -0.5)
        + (len(shape) == 1)
        for name, shape in shapes.items()
    }
    if "draft_vocab_size" in own:
        ids = torch.randperm(config["vocab_size"], generator=generator)[: own["draft_vocab_size"]]
        state["draft_token_ids"] = ids
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(state, folder / "model.safetensors")
    return ReferenceDrafter(folder)


class ReferenceDrafter:
    """One sequence. `keys` and `values` of each layer are [known tokens, heads, head_dim]."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.state = {
            name: t.float() if t.is_floating_point() else t
            for name, t in load_file(folder / "model.safetensors").items()
        }
        kv = (0, self.config["num_key_value_heads"], self.config["head_dim"])
        self.keys = [torch.empty(kv) for _ in range(self.config["num_hidden_layers"])]
        self.values = [torch.empty(kv) for _ in range(self.config["num_hidden_layers"])]

    def learn(self, hidden_states: Sequence[torch.Tensor], start: int) -> None:
        """Take in tokens at positions from `start` on, given transformers' `hidden_states` of them ([T, hidden]).

        hidden_states[0] is the embedding's, hidden_states[i + 1] the output of layer i.
        """
        ids = self.config["dflash_config"]["target_layer_ids"]
        features = torch.cat([hidden_states[layer + 1] for layer in ids], dim=-1)
        hidden = self._norm(linear(features, self.state["fc.weight"]), "hidden_norm")
        positions = torch.arange(start, start + len(hidden))
        for layer in range(len(self.keys)):
            key, value = self._key_value(layer, hidden, positions)
            self.keys[layer] = torch.cat([self.keys[layer], key])
            self.values[layer] = torch.cat([self.values[layer], value])

    def draft(self, target: PreTrainedModel, last: int, start: int | None = None) -> torch.Tensor:
        """Logits [block, vocab] of [last, mask, …] at position `start` (default: right behind what was learnt)."""
        own = self.config["dflash_config"]
        size = own.get("block_size", self.config["block_size"])
        start = len(self.keys[0]) if start is None else start
        ids = torch.tensor([last, *[own["mask_token_id"]] * (size - 1)])
        scale = own.get("input_embedding_scale")
        embed = target.get_input_embeddings()
        x = embed(ids) if scale is None else embedding(ids, embed.weight) * scale
        positions = torch.arange(start, start + size)
        for layer in range(len(self.keys)):
            x = x + self._attention(layer, self._norm(x, f"layers.{layer}.input_layernorm"), positions)
            x = x + self._mlp(layer, self._norm(x, f"layers.{layer}.post_attention_layernorm"))
        return self._head(target, self._norm(x, "norm"))

    def after(self, target: PreTrainedModel, token: int) -> torch.Tensor:
        """What `token` adds to the logits of the one behind it, [vocab]."""
        embedded = self._norm(target.get_input_embeddings()(torch.tensor(token)), "successor_norm")
        return self._head(target, linear(embedded, self.state["successor.weight"]))

    def choose(
        self, target: PreTrainedModel, last: int, start: int | None = None
    ) -> tuple[list[int], list[float]]:
        """The best token at each position behind `last`, one after another where the drafter has a successor head, and
        the probability of each."""
        tokens: list[int] = []
        chances: list[float] = []
        for row in self.draft(target, last, start)[1:]:
            if "successor.weight" in self.state:
                row = row + self.after(target, tokens[-1] if tokens else last)
            best = int(row.argmax())
            tokens.append(
                int(self.state["draft_token_ids"][best]) if "draft_token_ids" in self.state else best
            )
            chances.append(float(row.softmax(-1)[best]))
        return tokens, chances

    def _head(self, target: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        logits = linear(hidden, target.get_output_embeddings().weight)
        return logits[..., self.state["draft_token_ids"]] if "draft_token_ids" in self.state else logits

    def _attention(self, layer: int, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        heads, head_dim = self.config["num_attention_heads"], self.config["head_dim"]
        query = self._weight(layer, "self_attn.q_proj", x).view(len(x), heads, head_dim)
        query = _rotate(self._norm(query, f"layers.{layer}.self_attn.q_norm"), positions, self.config)
        key, value = self._key_value(layer, x, positions)
        keys, values = torch.cat([self.keys[layer], key]), torch.cat([self.values[layer], value])
        group = heads // keys.shape[1]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", query, keys) / head_dim**0.5
        scores = scores.masked_fill(~self._seen(layer, positions, len(keys)), -torch.inf)
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        return self._weight(layer, "self_attn.o_proj", attended.flatten(1))

    def _seen(self, layer: int, positions: torch.Tensor, count: int) -> torch.Tensor:
        sliding = self.config["layer_types"][layer] == "sliding_attention"
        causal = self.config.get("is_causal", self.config["dflash_config"].get("causal", sliding))
        query, key = positions[:, None], torch.arange(count)[None]
        seen = torch.ones(len(positions), count, dtype=torch.bool)
        if causal:
            seen &= key <= query
        if sliding:
            seen &= query - key < self.config["sliding_window"]
        return seen

    def _key_value(
        self, layer: int, x: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (len(x), self.config["num_key_value_heads"], self.config["head_dim"])
        key = self._norm(
            self._weight(layer, "self_attn.k_proj", x).view(shape), f"layers.{layer}.self_attn.k_norm"
        )
        return _rotate(key, positions, self.config), self._weight(layer, "self_attn.v_proj", x).view(shape)

    def _mlp(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        inner = silu(self._weight(layer, "mlp.gate_proj", x)) * self._weight(layer, "mlp.up_proj", x)
        return self._weight(layer, "mlp.down_proj", inner)

    def _weight(self, layer: int, name: str, x: torch.Tensor) -> torch.Tensor:
        prefix = f"layers.{layer}.{name}"
        return linear(x, self.state[f"{prefix}.weight"], self.state.get(f"{prefix}.bias"))

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scaled = x / (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt()
        return scaled * self.state[f"{name}.weight"]


def _rotate(x: torch.Tensor, positions: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """x [T, heads, head_dim] turned by complex numbers, element i paired with i + head_dim / 2."""
    half = config["head_dim"] // 2
    frequencies = config["rope_theta"] ** (-torch.arange(half) / half)
    turn = torch.polar(torch.ones(len(x), 1, half), (positions[:, None] * frequencies)[:, None])
    turned = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous()) * turn
    return torch.cat([turned.real, turned.imag], dim=-1)
