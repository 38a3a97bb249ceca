"""MTP heads: the layer for one more token that checkpoints of DeepSeek-V3, Qwen3-Next and Qwen3.5 have of their own.

It reads the target's last hidden states as its head does, after the final norm, and what it leaves to the next row is
normed as well (DeepSeek-V3 technical report, section 2.2; one layer that follows itself, as servers run it).
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch

from backends.forward import ForwardBatch
from models.base import HiddenStates, ModelError
from models.chain import FEATURES, ChainDrafter
from models.config import ModelConfig
from models.decoder import Decoder
from models.deepseek_v2 import DeepseekDecoderLayer, DeepseekV2ForCausalLM
from models.layers import Linear
from models.qwen3_next import Qwen3NextDecoderLayer, Qwen3NextForCausalLM
from models.weights import Weights

_DEEPSEEK = {"shared_head.norm.": "norm.", "enorm.": "enorm.", "hnorm.": "hnorm.", "eh_proj.": "eh_proj."}
_QWEN = {
    "pre_fc_norm_embedding.": "enorm.",
    "pre_fc_norm_hidden.": "hnorm.",
    "fc.": "eh_proj.",
    "norm.": "norm.",
    "layers.0.": "layers.0.",
}
PROJECTION = "model.eh_proj.weight"  # every head has it


class MTPHead(ChainDrafter):
    """Borrows the target's embedding, final norm and head."""

    def __init__(self, config: ModelConfig, source: Weights, target: Decoder) -> None:
        super().__init__(config, source, (target.embed_tokens, target.lm_head))
        size, eps = config.hidden_size, config.rms_norm_eps
        self.target_norm = target.norm
        self.target_layer_ids = (target.config.num_layers - 1,)
        self.enorm = self.norm_class(source.vector("model.enorm.weight", size), eps)
        self.hnorm = self.norm_class(source.vector("model.hnorm.weight", size), eps)
        self.eh_proj = Linear.load(source, "model", ("eh_proj",), (size,), 2 * size, bias=False)

    def fuse(self, captured: torch.Tensor) -> torch.Tensor:
        return self.target_norm(captured)

    def attended(self, embedded: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        (layer,) = self.layers
        assert isinstance(layer, DeepseekDecoderLayer | Qwen3NextDecoderLayer)
        return layer.input_layernorm(self._joined(embedded, features))

    def forward(self, batch: ForwardBatch) -> HiddenStates:
        embedded = self.embed_tokens(batch.input_ids)
        features = embedded if batch.features is None else batch.features
        last = self.run(self._joined(embedded, features), batch).last
        return HiddenStates(last, {FEATURES: last})

    def _joined(self, embedded: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        return self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(features)), dim=-1))


class DeepseekMTP(MTPHead, DeepseekV2ForCausalLM):
    """Latent attention and experts, as in the layers before it."""


class Qwen3NextMTP(MTPHead, Qwen3NextForCausalLM):
    """Gated attention and, where its target has them, experts; norms that multiply by 1 + weight."""


def mtp_head(config: ModelConfig, where: str) -> type[MTPHead]:
    """The class for a target's head. Raises ModelError, which starts with `where`, for a family without."""
    if config.model_type.startswith("deepseek"):
        return DeepseekMTP
    if config.model_type.startswith(("qwen3_next", "qwen3_5")):
        return Qwen3NextMTP
    raise ModelError(
        f"{where}: {config.architecture} has no MTP head (DeepSeek-V3, Qwen3-Next and Qwen3.5 have)"
    )


def mtp_config(target: ModelConfig) -> ModelConfig:
    """That of a model which is the target's head alone: one layer that attends."""
    return msgspec.structs.replace(
        target,
        num_layers=1,
        layer_types=(),
        sparse_layers=(0,) if target.num_experts else (),
        has_mamba_layers=False,
        state=None,
    )


def mtp_prefix(target: ModelConfig) -> str:
    """How names of a head begin in its target's checkpoint. DeepSeek's is among the layers, behind the last one."""
    return f"model.layers.{target.num_layers}." if target.model_type.startswith("deepseek") else "mtp."


def mtp_weight_name(target: ModelConfig) -> Callable[[str], str | None]:
    """From names in the target's checkpoint to those that the head alone would have; None: not of the head."""
    prefix = mtp_prefix(target)
    if not target.model_type.startswith("deepseek"):
        return lambda name: _renamed(name, prefix, _QWEN)
    borrowed = (f"{prefix}embed_tokens.", f"{prefix}shared_head.head.")

    def rename(name: str) -> str | None:
        if not name.startswith(prefix) or name.startswith(borrowed):
            return None
        return _renamed(name, prefix, _DEEPSEEK) or f"model.layers.0.{name.removeprefix(prefix)}"

    return rename


def _renamed(name: str, prefix: str, names: dict[str, str]) -> str | None:
    for own, canonical in names.items():
        if name.startswith(prefix + own):
            return f"model.{canonical}{name.removeprefix(prefix + own)}"
    return None
