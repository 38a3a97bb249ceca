"""A drafter to begin with: the target's last layers, joined so that attention starts close to the target's own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.linear import embedding
from models.base import CausalLM, ModelError
from models.decoder import Decoder
from models.gemma3 import GemmaRMSNorm
from models.layers import DecoderLayer, GatedMLP
from models.layers import Linear as TargetLinear
from models.layers import RMSNorm as TargetNorm
from speculative.training.data import Example
from speculative.training.model import Drafter, DrafterShape, Layer
from speculative.training.options import TrainingOptions

_SIDE_SCALE = 0.1  # how loud the other captured layers are at first, beside the last


def decoder(target: CausalLM) -> Decoder:
    """`target`, whose embedding and head a drafter can borrow. ModelError for one of another shape."""
    if not isinstance(target, Decoder):
        raise ModelError(f"{type(target).__name__} cannot have a DFlash drafter: it is no plain decoder")
    return target


def shape_for(target: Decoder, options: TrainingOptions, mask_token_id: int) -> DrafterShape:
    """A drafter of the target's own sizes. ModelError for a layer, or a mask token, that it does not have."""
    config = target.config
    layer_ids = options.target_layer_ids or default_layer_ids(config.num_layers)
    if beyond := [layer for layer in layer_ids if layer not in target.capturable_layers]:
        raise ModelError(
            f"--target-layers has {beyond}, but the target's layers are {target.capturable_layers}"
        )
    if not 0 <= mask_token_id < config.vocab_size:
        raise ModelError(f"--mask-token {mask_token_id} is not in the vocabulary of {config.vocab_size}")
    return DrafterShape(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=options.layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        block_size=options.block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=layer_ids,
        num_target_layers=config.num_layers,
        rope_theta=config.rope.theta,
    )


def default_layer_ids(num_layers: int) -> tuple[int, ...]:
    """Three layers of a target: the middle, three quarters, and the input of the last."""
    return tuple(sorted({max(0, num_layers * share // 4 - 1) for share in (2, 3)} | {max(0, num_layers - 2)}))


def state_layer_ids(shape: DrafterShape) -> tuple[int, ...]:
    """Whose outputs training reads: those that the drafter sees, then the last layer's, for the target's own logits."""
    return (*shape.target_layer_ids, shape.num_target_layers - 1)


def unused_token(special_token_ids: Iterable[int], examples: Iterable[Example], vocab_size: int) -> int:
    """A token for the mask: the last special one that no example has, else the last of the vocabulary."""
    seen = {int(token) for example in examples for token in np.unique(example.ids)}
    free = [token for token in special_token_ids if token not in seen and token < vocab_size]
    return max(free, default=vocab_size - 1)


def dense(linear: object) -> Tensor:
    """The matrix of one of the target's products, float32 [rows, columns]."""
    assert isinstance(linear, TargetLinear)
    parts = [
        embedding(torch.arange(weight.rows, device=weight.data.device), weight, torch.float32)
        for weight in linear.weights
    ]
    return torch.cat(parts)


def empty_drafter(target: Decoder, shape: DrafterShape) -> Drafter:
    """A drafter beside `target`, to be filled in."""
    return Drafter(shape).to(target.norm.weight.device)


@torch.no_grad()
def initial_drafter(target: Decoder, shape: DrafterShape, states: Tensor, seed: int) -> Drafter:
    """Layers of the target's last ones where they have the shape for it, else random.

    states: [T, layers * H], the target's states over some text; they set the scale of `fc`.
    """
    drafter = empty_drafter(target, shape)
    random = torch.Generator().manual_seed(seed)
    for parameter in drafter.parameters():
        if parameter.ndim == 2:
            values = torch.randn(parameter.shape, generator=random)
            parameter.copy_(values * parameter.shape[1] ** -0.5)
    width = shape.hidden_size
    states = states.to(drafter.fc.weight.device)
    scales = states.float().unflatten(-1, (-1, width)).square().mean((0, 2)).sqrt()
    drafter.fc.weight.mul_(_SIDE_SCALE / scales.repeat_interleave(width))
    drafter.fc.weight[:, -width:] = torch.eye(width, device=states.device) / scales[-1]
    drafter.successor.weight.zero_()
    norms = []
    for layer, source in zip(drafter.layers, target.layers[-shape.num_layers :], strict=False):
        assert isinstance(layer, Layer)
        if type(source) is not DecoderLayer or not isinstance(source.mlp, GatedMLP):
            continue
        _copy_layer(layer, source, shape, states[:, -width:].float())
        norms.append(layer.input_layernorm.weight)
    if norms:
        drafter.hidden_norm.weight.copy_(norms[-1])
    drafter.norm.weight.copy_(norm_weight(target.norm))
    return drafter


def norm_weight(norm: TargetNorm) -> Tensor:
    """What a target's norm multiplies by, float32."""
    weight = norm.weight.float()
    return 1.0 + weight if isinstance(norm, GemmaRMSNorm) else weight


def _copy_layer(layer: Layer, source: DecoderLayer, shape: DrafterShape, states: Tensor) -> None:
    attention, mlp = layer.self_attn, layer.mlp
    layer.input_layernorm.weight.copy_(norm_weight(source.input_layernorm))
    layer.post_attention_layernorm.weight.copy_(norm_weight(source.post_attention_layernorm))
    kv_width = shape.num_kv_heads * shape.head_dim
    query, key, value = dense(source.self_attn.qkv_proj).split(
        (shape.num_heads * shape.head_dim, kv_width, kv_width)
    )
    attention.q_proj.weight.copy_(query)
    attention.k_proj.weight.copy_(key)
    attention.v_proj.weight.copy_(value)
    attention.o_proj.weight.copy_(dense(source.self_attn.o_proj))
    mlp.gate_proj.weight.copy_(dense(source.mlp.gate_up_proj)[: shape.intermediate_size])
    mlp.up_proj.weight.copy_(dense(source.mlp.gate_up_proj)[shape.intermediate_size :])
    mlp.down_proj.weight.copy_(dense(source.mlp.down_proj))
    normed = layer.input_layernorm(states)
    for norm, own, matrix in (
        (attention.q_norm, source.self_attn.q_norm, query),
        (attention.k_norm, source.self_attn.k_norm, key),
    ):
        if own is not None:
            norm.weight.copy_(norm_weight(own))
        else:  # heads of unit size would be softer or harder in attention than the target's are
            heads = (normed @ matrix.T).unflatten(-1, (-1, shape.head_dim))
            norm.weight.fill_(heads.square().mean().sqrt())


def spread(members: Sequence[int], count: int) -> list[int]:
    """`count` of `members`, evenly."""
    return [members[i * len(members) // count] for i in range(min(count, len(members)))]
