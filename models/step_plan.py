"""The native step plan of a model: which of its tensors the one-call forward pass reads, and when it has one."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch

from kernels.cpu.linear import is_packed
from kernels.cpu.step_plan import LayerWeights, StepPlan, StepSpec, unsupported
from models.base import CausalLM
from models.decoder import Decoder
from models.dflash import DFlashDrafter, DFlashLayer
from models.gemma3 import Gemma3DecoderLayer, GemmaRMSNorm
from models.layers import Attention, DecoderLayer, GatedMLP, Linear, RMSNorm
from models.rotary import RotaryEmbedding

PlainLayer = DecoderLayer | Gemma3DecoderLayer
# The pass that a plan stands in for, and the classes whose arithmetic it knows. What derives from them may compute
# anything.
_PASS = ("forward", "run", "rope_of", "logits", "finish_logits")
_LAYERS = {DecoderLayer, DFlashLayer, Gemma3DecoderLayer}
_PARTS = {Attention, GatedMLP, Linear, RMSNorm, GemmaRMSNorm}


def is_plain(layer: torch.nn.Module) -> TypeGuard[PlainLayer]:
    """Whether a layer is attention and a gated MLP, just as the native kernels compute them."""
    parts = {type(part) for part in layer.modules() if part is not layer}
    return type(layer) in _LAYERS and parts <= _PARTS


def step_plan(model: CausalLM) -> StepPlan | str:
    """The plan of `model`, or why it has none."""
    if not isinstance(model, Decoder):
        return f"{type(model).__name__} is not of the shape that plans are for"
    config = model.config
    if any(getattr(type(model), name) is not getattr(Decoder, name) for name in _PASS):
        return f"{type(model).__name__} has a pass of its own"
    if config.attn_logit_softcap is not None or config.final_logit_softcap is not None:
        return "logits are soft-capped"
    if config.logits_divisor != 1.0:
        return "logits are divided"
    layers = [layer for layer in model.layers if is_plain(layer)]
    if len(layers) < config.num_layers:
        return f"a layer of {type(model).__name__} is not plain attention and gated MLP"
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    if not all(is_packed(weight) for linear in linears for weight in linear.weights):
        return "its weights are not packed for the native kernels"
    spec = StepSpec(
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate_size,
        eps=config.rms_norm_eps,
        attention_scale=config.attention_scale,
        embedding_scale=model.embed_tokens.scale,
        activation=config.activation,
    )
    why_not = unsupported(spec)
    if why_not is not None:
        return why_not
    (head,) = model.lm_head.weights
    token_ids, successor = None, None
    if isinstance(model, DFlashDrafter):
        token_ids = model.draft_token_ids
        if model.successor is not None:
            (matrix,) = model.successor.proj.weights
            successor = _norm(model.successor.norm), matrix
    return StepPlan(
        spec,
        [_layer(layer, model.rope_of(layer_id)) for layer_id, layer in enumerate(layers)],
        model.embed_tokens.weight,
        _norm(model.norm),
        head,
        token_ids,
        successor,
    )


def _layer(layer: PlainLayer, rope: RotaryEmbedding) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    assert isinstance(mlp, GatedMLP)
    fields = (
        _named(attention.qkv_proj, "q", "k", "v")
        | _named(attention.o_proj, "o")
        | _named(mlp.gate_up_proj, "gate", "up")
        | _named(mlp.down_proj, "down")
    )
    fields["input_norm"] = _norm(layer.input_layernorm)
    if isinstance(layer, Gemma3DecoderLayer):
        fields["attention_out_norm"] = _norm(layer.post_attention_layernorm)
        fields["mlp_norm"] = _norm(layer.pre_feedforward_layernorm)
        fields["mlp_out_norm"] = _norm(layer.post_feedforward_layernorm)
    else:
        fields["mlp_norm"] = _norm(layer.post_attention_layernorm)
    if attention.q_norm is not None and attention.k_norm is not None:
        fields["q_norm"], fields["k_norm"] = _norm(attention.q_norm), _norm(attention.k_norm)
    return LayerWeights(
        **fields,
        cos=rope.cos,
        sin=rope.sin,
        window=attention.sliding_window,
        causal=isinstance(layer, DFlashLayer) and layer.causal,
    )


def _named(linear: Linear, *names: str) -> dict[str, Any]:
    """Matrices and biases of a stacked product under the plan's names."""
    fields: dict[str, Any] = dict(zip(names, linear.weights, strict=True))
    if linear.bias is not None:
        biases = linear.bias.split([weight.rows for weight in linear.weights])
        fields |= {f"{name}_bias": bias for name, bias in zip(names, biases, strict=True)}
    return fields


def _norm(norm: RMSNorm) -> torch.Tensor:
    """The vector that a norm multiplies by, float32."""
    weight = norm.weight.float()
    return 1.0 + weight if isinstance(norm, GemmaRMSNorm) else weight
