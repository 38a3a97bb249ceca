"""EAGLE-3 drafter (Li et al., 2025, arXiv 2503.01840): one Llama layer that reads three layers of its target.

Config keys and weight names are those of `yuhuili/EAGLE3-*` checkpoints and of SpecForge, which trains such drafters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import torch

from backends.forward import ForwardBatch
from kernels.linear import select_rows
from models.base import HiddenStates, ModelError
from models.chain import FEATURES, ChainDrafter
from models.config import ModelConfig
from models.decoder import Decoder
from models.layers import Attention, Embedding, GatedMLP, Linear, RMSNorm
from models.rotary import Rotation
from models.weights import Weights

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
# Variants of the layer that change what it computes.
_UNSUPPORTED = (
    "eh_proj_before_attn",
    "fc_norm",
    "norm_before_fc",
    "norm_before_residual",
    "norm_output",
    "parallel_drafting",
    "return_hidden_post_norm",
)

_Id = Annotated[int, msgspec.Meta(ge=0)]


class Eagle3Config(msgspec.Struct, frozen=True, kw_only=True):
    """What a drafter's config.json says beyond its layer.

    target_layer_ids: the target's layers whose outputs the drafter reads, in the order of the columns of `fc`. Empty
        in a file without `eagle_config.eagle_aux_hidden_state_layer_ids`: then they follow from the target's depth.
    draft_vocab_size: tokens of the drafter's own vocabulary, listed in the tensor `d2t`.
    """

    target_layer_ids: tuple[_Id, ...] = ()
    draft_vocab_size: Annotated[int, msgspec.Meta(ge=1)]
    target_hidden_size: Annotated[int, msgspec.Meta(ge=1)]

    def of_target(self, num_layers: int) -> Eagle3Config:
        """The same, where layers were left open those of the reference: what goes into layers 2, n / 2 and n - 3."""
        if self.target_layer_ids:
            return self
        return msgspec.structs.replace(self, target_layer_ids=(1, num_layers // 2 - 1, num_layers - 4))


def is_eagle3(config: Mapping[str, Any]) -> bool:
    """Whether the dict of a config.json is of an EAGLE-3 drafter, which may call itself a Llama."""
    names = config.get("architectures") or [""]
    return names[0] in ARCHITECTURES or (names[0] == "LlamaForCausalLM" and "draft_vocab_size" in config)


def read_eagle3_config(config: Mapping[str, Any], where: str) -> Eagle3Config:
    """Read the dict of a drafter's config.json. Raises ModelError, which starts with `where`."""
    own = {**config, **(config.get("eagle_config") or {})}  # keys stand in either place
    changed = [key for key in _UNSUPPORTED if own.get(key)]
    if changed:
        raise ModelError(f"{where}: an EAGLE-3 drafter with {', '.join(changed)} is not supported")
    try:
        return msgspec.convert(
            {
                "target_layer_ids": own.get("eagle_aux_hidden_state_layer_ids") or (),
                "draft_vocab_size": config.get("draft_vocab_size") or config.get("vocab_size"),
                "target_hidden_size": config.get("target_hidden_size") or config.get("hidden_size"),
            },
            Eagle3Config,
        )
    except msgspec.ValidationError as error:
        raise ModelError(f"{where}: {error}") from error


def weight_name(name: str) -> str | None:
    """A published name as that of a whole model; None for `t2d`, which says the same as `d2t`."""
    name = name.removeprefix("model.")
    if name == "t2d" or name.startswith("lm_head."):
        return None if name == "t2d" else name
    return "model." + name.replace("midlayer.", "layers.0.")


class Eagle3Attention(Attention):
    """Reads a token's embedding and features side by side."""

    input_parts = 2


class Eagle3Layer(torch.nn.Module):
    """Llama's layer, whose residual stream are the features."""

    def __init__(self, config: ModelConfig, layer_id: int, source: Weights) -> None:
        super().__init__()
        prefix = f"model.layers.{layer_id}"

        def norm(name: str) -> RMSNorm:
            weight = source.vector(f"{prefix}.{name}.weight", config.hidden_size)
            return RMSNorm(weight, config.rms_norm_eps)

        self.input_layernorm = norm("input_layernorm")
        self.hidden_norm = norm("hidden_norm")
        self.self_attn = Eagle3Attention(config, layer_id, source, RMSNorm)
        self.post_attention_layernorm = norm("post_attention_layernorm")
        self.mlp = GatedMLP(config, f"{prefix}.mlp", config.intermediate_size, source)

    def attended(self, embedded: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """[T, 2 * hidden_size]"""
        return torch.cat((self.input_layernorm(embedded), self.hidden_norm(features)), dim=-1)

    def forward(self, embedded: torch.Tensor, features: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """[T, hidden_size] each, to the same."""
        hidden = features + self.self_attn(self.attended(embedded, features), rotation)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Drafter(ChainDrafter):
    """Borrows the target's embedding and head where it has none. What it leaves to the next row is not normed."""

    layer_class = Eagle3Layer

    def __init__(self, config: ModelConfig, eagle3: Eagle3Config, source: Weights, target: Decoder) -> None:
        hidden = config.hidden_size
        if source.has("model.layers.1.self_attn.q_proj.weight"):
            raise ModelError(f"{source.where}: an EAGLE-3 drafter of several layers (1 is supported)")
        token_ids = None
        if source.has("model.d2t"):  # how far each token is from its place in the drafter's vocabulary
            distances = source.vector("model.d2t", eagle3.draft_vocab_size, torch.int64)
            token_ids = distances + torch.arange(len(distances), device=distances.device)
            source.check_token_ids("model.d2t", token_ids, target.config.vocab_size)
        embedding, head = target.embed_tokens, target.lm_head
        borrows = not source.has("model.embed_tokens.weight") or not source.has("lm_head.weight")
        if borrows and hidden != target.config.hidden_size:
            raise ModelError(
                f"{source.where}: hidden_size is {hidden}, that of the target {target.config.hidden_size}, "
                "whose embedding or head it has to borrow"
            )
        if source.has("model.embed_tokens.weight"):
            (weight,) = source.matrices(["model.embed_tokens.weight"], (config.vocab_size,), hidden)
            embedding = Embedding(weight, source.dtype)
        if source.has("lm_head.weight"):
            head = Linear(source.matrices(["lm_head.weight"], (eagle3.draft_vocab_size,), hidden))
        elif token_ids is not None:
            (weight,) = head.weights
            head = Linear((select_rows(weight, token_ids),))
        super().__init__(config, source, (embedding, head))
        self.draft_token_ids = token_ids
        self.target_layer_ids = eagle3.of_target(target.config.num_layers).target_layer_ids
        width = len(self.target_layer_ids) * eagle3.target_hidden_size
        self.fc = Linear.load(source, "model", ("fc",), (hidden,), width, bias=False)

    def fuse(self, captured: torch.Tensor) -> torch.Tensor:
        return self.fc(captured)

    def attended(self, embedded: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        (layer,) = self.layers
        assert isinstance(layer, Eagle3Layer)
        return layer.attended(embedded, features)

    def forward(self, batch: ForwardBatch) -> HiddenStates:
        (layer,) = self.layers
        embedded = self.embed_tokens(batch.input_ids)
        features = embedded if batch.features is None else batch.features
        hidden = layer(embedded, features, self.ropes[0](batch.positions))
        return HiddenStates(self.norm(hidden), {FEATURES: hidden})
