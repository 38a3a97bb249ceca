"""What the config.json of a DFlash drafter says beyond its layers, which are Qwen3's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from models.base import ModelError
from models.config import ModelConfig

ARCHITECTURE = "DFlashDraftModel"

_Id = Annotated[int, msgspec.Meta(ge=0)]


class DFlashConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`dflash_config` as published `z-lab/*-DFlash` checkpoints have it; the last four keys are Tandem's own.

    block_size: rows of a block pass, the last token included.
    target_layer_ids: the target's layers whose outputs the drafter reads, in the order of the columns of `fc`.
    causal: None: sliding layers see no later token of the block, the others see all of it. Else so for all layers.
    input_embedding_scale: of the target's embedding; None: as the target scales it.
    draft_vocab_size: tokens of the drafter's own vocabulary, listed in the tensor `draft_token_ids`. None: all.
    short_block_size: rows of a shorter pass that it was trained for as well. None: of none.
    target_digest: of the target it was trained on (`speculative.pairing.target_digest`).
    accept_length: that its card promises.
    """

    target_layer_ids: Annotated[tuple[_Id, ...], msgspec.Meta(min_length=1)]
    mask_token_id: _Id
    block_size: Annotated[int, msgspec.Meta(ge=2)] = 16
    num_target_layers: int | None = None
    causal: bool | None = None
    input_embedding_scale: float | None = None
    draft_vocab_size: Annotated[int, msgspec.Meta(ge=1)] | None = None
    short_block_size: Annotated[int, msgspec.Meta(ge=2)] | None = None
    target_digest: str | None = None
    accept_length: float | None = None

    def is_causal(self, layer_id: int, config: ModelConfig) -> bool:
        """Whether the rows of a block see no later row in this layer."""
        return config.is_sliding(layer_id) if self.causal is None else self.causal


# What other heads under the same name compute differently.
_UNSUPPORTED = ("markov_head_type", "markov_rank", "sample_from_anchor", "shift_label")


def read_dflash_config(config: Mapping[str, Any], where: str) -> DFlashConfig:
    """Read the dict of a drafter's config.json, where keys may also stand outside `dflash_config`.

    Raises ModelError, which starts with `where`, for one that cannot be used.
    """
    own = config.get("dflash_config")
    if not isinstance(own, Mapping):
        raise ModelError(f"{where}: no 'dflash_config'")
    merged = {key: value for key, value in {**config, **own}.items() if value is not None}
    changed = [key for key in _UNSUPPORTED if merged.get(key)]
    if merged.get("projector_type") not in (None, "dflash"):
        changed.append(f"projector_type {merged['projector_type']!r}")
    if merged.get("use_aux_hidden_state") is False:
        changed.append("use_aux_hidden_state false")
    if merged.get("swa_window_size") not in (None, 0, config.get("sliding_window")):
        changed.append("a swa_window_size other than its sliding_window")
    if changed:
        raise ModelError(f"{where}: a DFlash drafter with {', '.join(changed)} is not supported")
    if "is_causal" in merged:  # its newer name
        merged["causal"] = merged["is_causal"]
    try:
        return msgspec.convert(merged, DFlashConfig)
    except msgspec.ValidationError as error:
        raise ModelError(f"{where}: {error}") from error
