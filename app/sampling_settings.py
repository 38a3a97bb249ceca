"""Flags of the terminal commands that say how tokens are chosen: the API's fields, spelled as flags."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Group, Parameter
from cyclopts.validators import Number

from app.settings import SettingsError
from engine.request import SamplingParams

_SAMPLING = Group.create_ordered("Sampling")


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How the next token is chosen, and when to stop. Raises SettingsError for settings that say nothing."""

    max_tokens: Annotated[
        int | None,
        Parameter(
            group=_SAMPLING, validator=Number(gte=1), help="Most tokens of an answer (default: what fits)."
        ),
    ] = None
    temperature: Annotated[
        float, Parameter(group=_SAMPLING, validator=Number(gte=0), help="0 always takes the likeliest token.")
    ] = 1.0
    top_p: Annotated[
        float,
        Parameter(
            group=_SAMPLING,
            validator=Number(gte=0, lte=1),
            help="Only the likeliest tokens that sum to this.",
        ),
    ] = 1.0
    top_k: Annotated[int, Parameter(group=_SAMPLING, help="Only so many of the likeliest; 0 takes all.")] = 0
    min_p: Annotated[
        float,
        Parameter(
            group=_SAMPLING,
            validator=Number(gte=0, lte=1),
            help="Only tokens at least so likely as the likeliest.",
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        Parameter(group=_SAMPLING, validator=Number(gt=0), help="Above 1: what was said is less likely."),
    ] = 1.0
    presence_penalty: Annotated[
        float,
        Parameter(
            group=_SAMPLING, validator=Number(gte=-2, lte=2), help="Taken off tokens that were generated."
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Parameter(
            group=_SAMPLING,
            validator=Number(gte=-2, lte=2),
            help="The same, as often as they were generated.",
        ),
    ] = 0.0
    seed: Annotated[int | None, Parameter(group=_SAMPLING, help="The same seed gives the same text.")] = None
    min_tokens: Annotated[
        int, Parameter(group=_SAMPLING, validator=Number(gte=0), help="Fewest tokens of an answer.")
    ] = 0
    stop: Annotated[
        tuple[str, ...],
        Parameter(group=_SAMPLING, help="Text that ends the answer; may be given several times."),
    ] = ()
    ignore_eos: Annotated[bool, Parameter(group=_SAMPLING, help="Go on where the model would end.")] = False

    def __post_init__(self) -> None:
        if "" in self.stop:
            raise SettingsError("--stop is empty: give it a text, or leave it out")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise SettingsError(
                f"--min-tokens {self.min_tokens} exceeds --max-tokens {self.max_tokens}: raise one or lower the other"
            )

    def params(self, room: int) -> SamplingParams:
        """As the engine takes them, for a prompt that leaves `room` tokens of its context."""
        return SamplingParams(
            max_tokens=min(self.max_tokens or room, room),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=self.seed,
            min_tokens=self.min_tokens,
            stop=self.stop,
            ignore_eos=self.ignore_eos,
        )


@dataclass(frozen=True, kw_only=True)
class ChatSettings(SamplingSettings):
    """The same for a chat, where a small model that repeats itself is to come to an end."""

    max_tokens: Annotated[
        int, Parameter(group=_SAMPLING, validator=Number(gte=1), help="Most tokens of an answer.")
    ] = 1024
