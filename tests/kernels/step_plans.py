"""Step plans of transformers models with random weights, and pools for them to run over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from backends.kv_pool import KVLayout, KVPool
from kernels.cpu.linear import pack, slice_rows
from kernels.cpu.step_plan import LayerWeights, StepBatch, StepPlan, StepSpec
from kernels.packed import PackedWeight, pack_float
from tests.backends.streams import CPU

VOCAB, SLOTS, WIDTH = 97, 2048, 640  # contexts may be longer than several KV splits of 128
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 192,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": WIDTH,
    "tie_word_embeddings": False,
}


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True))


def mistral() -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=21))


def qwen2() -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**{**SIZES, "tie_word_embeddings": True}))


def qwen3() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "head_dim": 48}))


def gemma3() -> PreTrainedModel:
    layers = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(
        Gemma3TextConfig(**SIZES, sliding_window=21, layer_types=layers, query_pre_attn_scalar=20)
    )


def randomised(make: object) -> PreTrainedModel:
    """A model whose norms and biases, too, are random."""
    torch.manual_seed(0)
    model = make().eval()  # type: ignore[operator]
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            centre = 1.0 if "norm" in name and not isinstance(model, Gemma3ForCausalLM) else 0.0
            parameter.data = centre + 0.1 * torch.randn_like(parameter)
        elif "embed" not in name:
            parameter.data *= 3
    return model


def q8_0(matrix: torch.Tensor) -> PackedWeight:
    """A matrix in Q8_0 blocks, as files have them."""
    groups = matrix.unflatten(-1, (-1, 32))
    scale = (groups.abs().amax(-1, keepdim=True) / 127).half()
    values = (groups / scale.float()).round().clamp(-127, 127).to(torch.int8)
    blocks = torch.cat([scale.view(torch.uint8), values.view(torch.uint8)], dim=-1)
    return PackedWeight("Q8_0", blocks.flatten(1), *matrix.shape)


def plan_of(model: PreTrainedModel, hold: object = pack_float, causal: bool = False) -> StepPlan:
    """The plan of a transformers model, its matrices as `hold` makes them. Gate and up are slices of one."""
    config, decoder = model.config, model.model
    is_gemma = isinstance(model, Gemma3ForCausalLM)

    def packed(matrix: torch.Tensor) -> PackedWeight:
        return pack(hold(matrix.detach()))  # type: ignore[operator]

    def norm(module: torch.nn.Module | None) -> torch.Tensor | None:
        if module is None:
            return None
        return module.weight.detach() + 1 if is_gemma else module.weight.detach()

    def tables(kind: str) -> dict[str, torch.Tensor]:
        positions, x = torch.arange(WIDTH)[None], torch.zeros(1)
        rotary = decoder.rotary_emb
        cos, sin = rotary(x, positions, kind) if is_gemma else rotary(x, positions)
        half = config.head_dim // 2
        return {"cos": cos[0, :, :half], "sin": sin[0, :, :half]}

    layers = []
    for index, layer in enumerate(decoder.layers):
        attention, mlp = layer.self_attn, layer.mlp
        kind = config.layer_types[index] if is_gemma else ""
        window = getattr(config, "sliding_window", None)
        if isinstance(model, Qwen2ForCausalLM | Qwen3ForCausalLM) or kind == "full_attention":
            window = None
        gate_up = packed(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
        biases = {
            f"{name}_bias": None if module.bias is None else module.bias.detach()
            for name, module in (
                ("q", attention.q_proj),
                ("k", attention.k_proj),
                ("v", attention.v_proj),
                ("o", attention.o_proj),
                ("gate", mlp.gate_proj),
                ("up", mlp.up_proj),
                ("down", mlp.down_proj),
            )
        }
        layers.append(
            LayerWeights(
                q=packed(attention.q_proj.weight),
                k=packed(attention.k_proj.weight),
                v=packed(attention.v_proj.weight),
                o=packed(attention.o_proj.weight),
                gate=slice_rows(gate_up, 0, config.intermediate_size),
                up=slice_rows(gate_up, config.intermediate_size, config.intermediate_size),
                down=packed(mlp.down_proj.weight),
                input_norm=norm(layer.input_layernorm),
                mlp_norm=norm(
                    layer.pre_feedforward_layernorm if is_gemma else layer.post_attention_layernorm
                ),
                attention_out_norm=norm(layer.post_attention_layernorm) if is_gemma else None,
                mlp_out_norm=norm(layer.post_feedforward_layernorm) if is_gemma else None,
                q_norm=norm(getattr(attention, "q_norm", None)),
                k_norm=norm(getattr(attention, "k_norm", None)),
                window=window,
                causal=causal,
                **tables(kind),
                **biases,
            )
        )
    spec = StepSpec(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate_size,
        eps=config.rms_norm_eps,
        attention_scale=decoder.layers[0].self_attn.scaling,
        embedding_scale=config.hidden_size**0.5 if is_gemma else 1.0,
        activation="gelu_tanh" if is_gemma else "silu",
    )
    embedding = packed(decoder.embed_tokens.weight)
    head = embedding if model.lm_head.weight is decoder.embed_tokens.weight else packed(model.lm_head.weight)
    return StepPlan(spec, layers, embedding, norm(decoder.norm), head)


@dataclass
class Pool:
    """Keys, values and a slot table whose rows are slots in order (seed 0) or shuffled."""

    plan: StepPlan
    dtype: torch.dtype = torch.float32
    seed: int = 0
    kv: KVPool = field(init=False)
    table: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        spec = self.plan.spec
        self.kv = KVPool(KVLayout(2, spec.kv_heads, spec.head_dim, spec.head_dim, self.dtype), SLOTS, CPU)
        slots = torch.arange(SLOTS)
        if self.seed:
            slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(self.seed))
        self.table = slots[: 3 * WIDTH].to(torch.int32).view(3, WIDTH)

    def batch(self, parts: Sequence[tuple[int, torch.Tensor, int]], **changes: object) -> StepBatch:
        """For each (table row, all ids so far, how many of them are queries) a sequence; logits of every token."""
        ids = torch.cat([tokens[len(tokens) - count :] for _, tokens, count in parts])
        places = [torch.arange(len(tokens) - count, len(tokens)) for _, tokens, count in parts]
        slots = [self.table[row, at] for (row, _, _), at in zip(parts, places, strict=True)]
        batch = {
            "input_ids": ids,
            "positions": torch.cat(places),
            "out_slots": torch.cat(slots).long(),
            "query_lens": [count for _, _, count in parts],
            "context_lens": [len(tokens) for _, tokens, _ in parts],
            "slot_table": self.table,
            "table_rows": [row for row, _, _ in parts],
            "logits_rows": torch.arange(len(ids)),
            "kv": self.kv.tensors(),
        }
        return StepBatch(**{**batch, **changes})  # type: ignore[arg-type]

    def logits(self, *parts: tuple[int, torch.Tensor, int]) -> torch.Tensor:
        return self.plan.run(self.batch(parts))[0]


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed))
