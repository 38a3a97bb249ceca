"""EAGLE-3 drafters and MTP heads in plain torch, float32, without caches: a text's rows are computed anew each time.

As the published implementations define them: row i is token i + 1 beside the features of position i, at position i.
A drafted token's row takes what the drafter's own row before it had to say. Decoder layers of the heads are those of
transformers, which has the layers but not the heads.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear, silu
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer

State = dict[str, torch.Tensor]

SURE = 5.0  # factor of the heads' weights: drafters that are sure of themselves draft long chains


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def fill(state: State, seed: int) -> State:
    """Random values, large enough that each one moves the logits."""
    generator = torch.Generator().manual_seed(seed)

    def random(tensor: torch.Tensor) -> torch.Tensor:
        drawn = torch.randn(tensor.shape, generator=generator)
        return 1 + 0.3 * drawn if tensor.ndim == 1 else drawn * tensor.shape[-1] ** -0.5

    return {name: random(tensor) for name, tensor in state.items()}


class ReferenceChain(ABC):
    """Drafts for one text, of which `target`, a transformers model, has computed all but the last token."""

    def __init__(self, target: PreTrainedModel, state: State) -> None:
        self.target = target
        self.state = state

    @abstractmethod
    def features(self, hidden_states: Sequence[torch.Tensor]) -> torch.Tensor:
        """[T, hidden_size] of transformers' `hidden_states` ([T, hidden_size] each, the embedding's first)."""

    @abstractmethod
    def layer(self, embedded: torch.Tensor, features: torch.Tensor, start: int) -> torch.Tensor:
        """All rows, [T, hidden_size] each, from position `start` on, to what they leave to the rows behind them."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, L] of what the layer gave."""

    def token(self, column: int) -> int:
        return column

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.target.get_input_embeddings()(ids)

    @torch.inference_mode()
    def read(self, ids: Sequence[int]) -> torch.Tensor:
        """Features [T, hidden_size] of a text, which those of its beginnings are the beginnings of."""
        states = self.target(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
        return self.features([state[0] for state in states])

    @torch.inference_mode()
    def draft(
        self,
        ids: Sequence[int],
        count: int,
        features: torch.Tensor | None = None,
        known_from: int = 0,
        noise: Callable[[int], torch.Tensor] | None = None,
    ) -> tuple[list[int], torch.Tensor]:
        """`count` tokens to follow `ids`, each the likeliest, and the logits that they are chosen by, [count, L].

        noise: [L] to be added to the logits of the token at a position.

        features: of a text that begins so; None: they are computed. known_from: the first position that the drafter
            knows them of.
        """
        features = (self.read(ids) if features is None else features)[: len(ids) - 1]
        ids, logits = list(ids), []
        for _ in range(count):
            embedded = self.embed(torch.tensor(ids[1:]))
            hidden = self.layer(embedded[known_from:], features[known_from:], known_from)
            logits.append(self.logits(hidden[-1:])[0] + (0.0 if noise is None else noise(len(ids))))
            ids.append(self.token(int(logits[-1].argmax())))
            features = torch.cat([features, hidden[-1:]])
        return ids[-count:], torch.stack(logits)


EAGLE3_SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "draft_vocab_size": 100,
}


def make_eagle3(
    folder: Path, target: PreTrainedModel, own_embedding: bool = False, **changes: Any
) -> ReferenceEagle3:
    """Save a random drafter for `target` into `folder`, as it is published: one with a vocabulary of its own."""
    config = {key: value for key, value in {**EAGLE3_SHAPE, **changes}.items() if value is not None}
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim", hidden // config["num_attention_heads"])
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    size = config.get("draft_vocab_size", config["vocab_size"])
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 3 * config.get("target_hidden_size", hidden)),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, queries),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
        "lm_head.weight": (size, hidden),
    }
    if own_embedding:
        shapes["embed_tokens.weight"] = config["vocab_size"], hidden
    state = fill({name: torch.empty(shape) for name, shape in shapes.items()}, 1)
    state["lm_head.weight"] *= SURE
    state["midlayer.self_attn.q_proj.weight"] *= SURE  # so that it shows whom each row attends to
    if size < config["vocab_size"]:
        generator = torch.Generator().manual_seed(2)
        ids = torch.randperm(config["vocab_size"], generator=generator)[:size].sort().values
        state["d2t"] = ids - torch.arange(size)
        state["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill_(0, ids, True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(state, folder / "model.safetensors")
    return ReferenceEagle3(target, state, config)


class ReferenceEagle3(ReferenceChain):
    """Reads what goes into layers 2, n / 2 and n - 3 of n, counted from 0, unless its configuration says otherwise."""

    def __init__(self, target: PreTrainedModel, state: State, config: dict[str, Any]) -> None:
        super().__init__(target, state)
        self.config = config

    def features(self, hidden_states: Sequence[torch.Tensor]) -> torch.Tensor:
        depth = len(hidden_states) - 1
        inputs = 2, depth // 2, depth - 3  # hidden_states[i] is what goes into layer i
        if "eagle_config" in self.config:
            inputs = [layer + 1 for layer in self.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
        return linear(torch.cat([hidden_states[i] for i in inputs], dim=-1), self.state["fc.weight"])

    def layer(self, embedded: torch.Tensor, features: torch.Tensor, start: int) -> torch.Tensor:
        weights = {name.removeprefix("midlayer."): tensor for name, tensor in self.state.items()}
        eps = self.config["rms_norm_eps"]
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        both = torch.cat(
            [
                norm(embedded, weights["input_layernorm.weight"], eps),
                norm(features, weights["hidden_norm.weight"], eps),
            ],
            -1,
        )
        query, key, value = (
            linear(both, weights[f"self_attn.{name}_proj.weight"]).view(len(both), count, -1)
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        query, key = self._rotate(query, start), self._rotate(key, start)
        key, value = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
        later = torch.ones(len(both), len(both), dtype=torch.bool).triu(1)
        read = torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), value)
        hidden = features + linear(read.flatten(1), weights["self_attn.o_proj.weight"])
        normed = norm(hidden, weights["post_attention_layernorm.weight"], eps)
        gate, up = (linear(normed, weights[f"mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        return hidden + linear(silu(gate) * up, weights["mlp.down_proj.weight"])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = norm(hidden, self.state["norm.weight"], self.config["rms_norm_eps"])
        return linear(normed, self.state["lm_head.weight"])

    def token(self, column: int) -> int:
        return column + int(self.state["d2t"][column]) if "d2t" in self.state else column

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        own = self.state.get("embed_tokens.weight")
        return super().embed(ids) if own is None else own[ids]

    def _rotate(self, x: torch.Tensor, start: int) -> torch.Tensor:
        """x [T, heads, head_dim] turned by complex numbers, element i paired with i + head_dim / 2."""
        half = x.shape[-1] // 2
        frequencies = self.config["rope_theta"] ** (-torch.arange(half) / half)
        angles = torch.arange(start, start + len(x))[:, None] * frequencies
        turn = torch.polar(torch.ones(len(x), 1, half), angles[:, None])
        turned = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous()) * turn
        return torch.cat([turned.real, turned.imag], dim=-1)


_MTP_SHAPE: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": None,
    "attn_implementation": "eager",
}
_DEEPSEEK = {
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
_QWEN = {
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_QWEN_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 40}


def make_mtp(kind: str, folder: Path) -> ReferenceMTP:
    """Save a random target with its head into `folder`: `deepseek`, `qwen3-next`, `qwen3-5` or `qwen3-5-experts`."""
    torch.manual_seed(0)
    if kind == "deepseek":
        config = DeepseekV3Config(**_MTP_SHAPE, **_DEEPSEEK)
        target = DeepseekV3ForCausalLM(config)
        layer, prefix = DeepseekV3DecoderLayer(config, 1), f"model.layers.{config.num_hidden_layers}."
        own = {"enorm": "enorm", "hnorm": "hnorm", "proj": "eh_proj", "norm": "shared_head.norm", "layer": ""}
    elif kind == "qwen3-next":
        config = Qwen3NextConfig(**_MTP_SHAPE, **_QWEN, **_QWEN_EXPERTS)
        target = Qwen3NextForCausalLM(config)
        layer, prefix = Qwen3NextDecoderLayer(config, 3), "mtp."
        own = _QWEN_NAMES
    elif kind == "qwen3-5-experts":
        shape = {key: value for key, value in _MTP_SHAPE.items() if key != "intermediate_size"}
        config = Qwen3_5MoeTextConfig(**shape, **_QWEN, **_QWEN_EXPERTS)
        target = Qwen3_5MoeForCausalLM(config)
        layer, prefix = Qwen3_5MoeDecoderLayer(config, 3), "mtp."
        own = _QWEN_NAMES
    else:
        shape = {key: value for key, value in _MTP_SHAPE.items() if key != "moe_intermediate_size"}
        config = Qwen3_5TextConfig(**shape, **_QWEN)
        target = Qwen3_5ForCausalLM(config)
        layer, prefix = Qwen3_5DecoderLayer(config, 3), "mtp."
        own = _QWEN_NAMES
    for module in (target, layer):
        randomise(module, zero_centred=kind != "deepseek")
    with torch.no_grad():
        target.get_output_embeddings().weight *= SURE
    hidden = config.hidden_size
    head = {"enorm": (hidden,), "hnorm": (hidden,), "proj": (hidden, 2 * hidden), "norm": (hidden,)}
    state = fill({name: torch.empty(shape) for name, shape in head.items()}, 3)
    target.eval().save_pretrained(folder)
    published = {f"{prefix}{own[name]}.weight": tensor for name, tensor in state.items()}
    state_of_layer = layer.state_dict()
    if kind != "qwen3-5-experts":  # whose experts are published fused
        state_of_layer = _by_expert(state_of_layer)
    published |= {f"{prefix}{own['layer']}{name}": tensor for name, tensor in state_of_layer.items()}
    if kind == "deepseek":  # as published: copies of what the head shares with its target
        published[f"{prefix}embed_tokens.weight"] = target.get_input_embeddings().weight.detach().clone()
        published[f"{prefix}shared_head.head.weight"] = target.get_output_embeddings().weight.detach().clone()
    whole = load_file(folder / "model.safetensors") | published
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
    return ReferenceMTP(target, state, layer.eval(), kind != "deepseek")


_QWEN_NAMES = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "proj": "fc",
    "norm": "norm",
    "layer": "layers.0.",
}


def randomise(module: torch.nn.Module, zero_centred: bool) -> None:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim == 1 and "norm" in name:
                centre = 0.0 if zero_centred and "linear_attn" not in name else 1.0
                parameter.normal_(centre, 0.3)
            elif "A_log" not in name:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.5)
        for name, buffer in module.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.3)


def _by_expert(state: State) -> State:
    """Fused experts as most are published: a matrix each."""
    split: State = {}
    for name, tensor in state.items():
        if not name.startswith("mlp.experts."):
            split[name] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            parts = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True))
            if name.endswith("down_proj"):
                parts = {"down_proj": matrix}
            split |= {f"mlp.experts.{expert}.{part}.weight": own.contiguous() for part, own in parts.items()}
    return split


class ReferenceMTP(ReferenceChain):
    """eh_proj of the normed embedding and the normed features, one decoder layer, a norm, and the target's head."""

    def __init__(
        self, target: PreTrainedModel, state: State, decoder_layer: torch.nn.Module, zero_centred: bool
    ) -> None:
        super().__init__(target, state)
        self.decoder_layer = decoder_layer
        self.one = 1.0 if zero_centred else 0.0

    def features(self, hidden_states: Sequence[torch.Tensor]) -> torch.Tensor:
        return hidden_states[-1]  # which is behind the final norm

    def layer(self, embedded: torch.Tensor, features: torch.Tensor, start: int) -> torch.Tensor:
        both = torch.cat([self._norm(embedded, "enorm"), self._norm(features, "hnorm")], dim=-1)
        hidden = linear(both, self.state["proj"]).unsqueeze(0)
        positions = torch.arange(start, start + hidden.shape[1]).unsqueeze(0)
        mask = torch.full((hidden.shape[1],) * 2, -torch.inf).triu(1)[None, None]
        rotations = self.target.model.rotary_emb(hidden, positions)
        out = self.decoder_layer(
            hidden, attention_mask=mask, position_ids=positions, position_embeddings=rotations
        )
        return self._norm(out[0], "norm")

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.target.get_output_embeddings()(hidden)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return norm(x, self.one + self.state[name])
