"""Flags of `tandem train-drafter`: what is learned from, and for how long."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter
from cyclopts.validators import Number

from app.settings import SettingsError
from speculative.training.options import TrainingOptions, Weights

_TRAINING = Group.create_ordered("Training")
_DEFAULT = TrainingOptions()
_POSITIVE = Number(gte=1)


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """Of what, how long, and how large. Raises SettingsError for data that is not there."""

    data: Annotated[
        list[str] | None,
        Parameter(
            group=_TRAINING,
            help="What to learn from; may be given several times. self (the default): conversations that the target "
            "makes up. A .jsonl file of prompts or conversations, whose answers the target writes anew. Any other "
            "file: text, whose paragraphs the target continues.",
        ),
    ] = None
    keep_answers: Annotated[
        bool,
        Parameter(
            group=_TRAINING, help="Take the answers of .jsonl files as they are: the target wrote them."
        ),
    ] = False
    tokens: Annotated[
        int,
        Parameter(group=_TRAINING, validator=_POSITIVE, help="Tokens of text to make up, for --data self."),
    ] = 500_000
    answer_tokens: Annotated[
        int,
        Parameter(group=_TRAINING, validator=Number(gte=2), help="Longest answer that the target writes."),
    ] = 256
    minutes: Annotated[
        float,
        Parameter(
            group=_TRAINING,
            validator=Number(gte=0),
            help="Time to train, over all runs; writing text comes on top. 0 writes the text only.",
        ),
    ] = _DEFAULT.minutes
    steps: Annotated[
        int | None,
        Parameter(group=_TRAINING, validator=_POSITIVE, help="Steps to train, in place of minutes."),
    ] = None
    layers: Annotated[int, Parameter(group=_TRAINING, validator=_POSITIVE, help="Layers of the drafter.")] = (
        _DEFAULT.layers
    )
    block_size: Annotated[
        int,
        Parameter(
            group=_TRAINING,
            validator=Number(gte=2, lte=64),
            help="Tokens of a block, the last known one included.",
        ),
    ] = _DEFAULT.block_size
    target_layers: Annotated[
        list[int] | None,
        Parameter(
            group=_TRAINING, help="Layers of the target that the drafter sees (default: three of them)."
        ),
    ] = None
    draft_vocab_size: Annotated[
        int,
        Parameter(
            group=_TRAINING,
            validator=_POSITIVE,
            help="Tokens that can be drafted: the most frequent ones of the data.",
        ),
    ] = _DEFAULT.draft_vocab_size
    mask_token: Annotated[
        int | None,
        Parameter(
            group=_TRAINING, help="Id of the mask token (default: a special token that the data lacks)."
        ),
    ] = None
    learning_rate: Annotated[
        float, Parameter(group=_TRAINING, validator=Number(gt=0), help="The highest of the cosine.")
    ] = _DEFAULT.learning_rate
    blocks_per_step: Annotated[
        int, Parameter(group=_TRAINING, validator=_POSITIVE, help="Blocks in a step of the optimiser.")
    ] = _DEFAULT.anchors_per_step
    decay: Annotated[
        float,
        Parameter(
            group=_TRAINING,
            validator=Number(gt=0),
            help="Offsets over which the weight of a block's tokens falls by e: few for a drafter of short drafts.",
        ),
    ] = _DEFAULT.decay
    weights: Annotated[
        Weights,
        Parameter(
            group=_TRAINING,
            help="What the drafter is stored in. int8 is half the size and the faster one on a CPU; bfloat16 keeps "
            "more of what was trained.",
        ),
    ] = _DEFAULT.weights
    cache_gb: Annotated[
        float,
        Parameter(
            group=_TRAINING,
            validator=Number(gte=0, lt=math.inf),
            help="Disk space for hidden states, which are then computed once.",
        ),
    ] = _DEFAULT.cache_bytes / 1e9
    training_seed: Annotated[int, Parameter(group=_TRAINING, help="Of texts, blocks and first weights.")] = 0

    def __post_init__(self) -> None:
        for source in self.sources:
            if source != "self" and not Path(source).is_file():
                raise SettingsError(f"--data {source}: neither self nor a file")

    @property
    def sources(self) -> list[str]:
        return self.data or ["self"]

    def options(self) -> TrainingOptions:
        return TrainingOptions(
            layers=self.layers,
            block_size=self.block_size,
            target_layer_ids=tuple(self.target_layers or ()),
            draft_vocab_size=self.draft_vocab_size,
            mask_token_id=self.mask_token,
            minutes=self.minutes,
            steps=self.steps,
            learning_rate=self.learning_rate,
            anchors_per_step=self.blocks_per_step,
            decay=self.decay,
            weights=self.weights,
            cache_bytes=int(self.cache_gb * 1e9),
            seed=self.training_seed,
        )
