"""What a drafting model proposes, and how its tokens are chosen from its logits."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from engine.noise import gumbel_at
from engine.request import Request
from engine.sampler import SamplingRow, keep, sample, scale

# Levels of confidence are where a drafter's own probability of its token lies between these.
BOUNDS = (0.03, 0.06, 0.1, 0.15, 0.2, 0.27, 0.35, 0.43, 0.52, 0.61, 0.7, 0.78, 0.86, 0.92, 0.97)
# What each level is worth before anything is known: the middle of its range, as if the drafter were calibrated.
LEVEL_GUESSES = tuple((low + high) / 2 for low, high in pairwise((0.0, *BOUNDS, 1.0)))
# A draft ends behind a token that is less likely than this to be reached and accepted: no row is as cheap.
HOPELESS = 0.02
# Of a row that is sampled only tokens get noise that are likelier than exp(-this) times the best: the others are next
# to never drawn.
_REACH = 10.0

Row = npt.NDArray[np.float32]
MakeSamplingRow = Callable[[Request, int, tuple[int, ...]], SamplingRow]


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens to follow a request's last one, and the confidence in each, a level that its accept rate is kept by."""

    token_ids: tuple[int, ...] = ()
    levels: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """How columns of a drafter's logits map to the target's tokens.

    `token_ids` [V'] of each column, None where they are the tokens; `size` is the target's vocabulary.
    """

    size: int
    token_ids: npt.NDArray[np.int64] | None = None

    def tokens(self, columns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The target's ids of `columns` [N]."""
        return columns if self.token_ids is None else self.token_ids[columns]


def choose(
    logits: torch.Tensor,
    request: Request,
    vocabulary: DraftVocabulary,
    sampling_row: MakeSamplingRow,
    before: Proposal = Proposal(),
) -> Proposal:
    """`before`, and tokens for the rows of `logits` [n, V'] float32, those that follow it: all n, or as many of the
    first as there is any hope for. A row that is no numbers ends it, as there is nothing to choose by.

    A greedy request gets the best of each row. A sampled one gets what the target would draw from these logits: with
    its temperature, filters and noise at that position. Penalties, bias and min_tokens apply as they will to the
    target's.
    """
    drafted = hopeful(_each(logits.cpu().numpy(), request, vocabulary, sampling_row, before.token_ids))
    return Proposal(before.token_ids + drafted.token_ids, before.levels + drafted.levels)


def hopeful(choices: Iterable[tuple[int, float]]) -> Proposal:
    """Of tokens and their probabilities, one behind another, as many of the first as there is any hope for."""
    tokens: list[int] = []
    levels: list[int] = []
    hope = 1.0
    for token, chance in choices:
        if math.isnan(chance):
            break
        tokens.append(token)
        levels.append(bisect_left(BOUNDS, chance))
        hope *= chance
        if hope < HOPELESS:
            break
    return Proposal(tuple(tokens), tuple(levels))


def _each(
    rows: npt.NDArray[np.float32],
    request: Request,
    vocabulary: DraftVocabulary,
    sampling_row: MakeSamplingRow,
    before: tuple[int, ...],
) -> Iterator[tuple[int, float]]:
    """The token of each row, and its probability there, up to the first row without usable logits."""
    if sampling_row(request, vocabulary.size, before).adjusts_logits:
        yield from _adjusted(rows, request, vocabulary, sampling_row, before)
        return
    first = request.num_tokens + len(before)
    for position, row in enumerate(rows, start=first):
        column = int(row.argmax())  # of a NaN where there is one
        if not math.isfinite(row[column]):
            return
        if request.sampling.temperature == 0:
            yield int(vocabulary.tokens(np.array(column))), float(1.0 / np.exp(row - row[column]).sum())
        else:
            yield _draw(row, row[column], request, position, vocabulary)


def _draw(
    row: Row, best: np.float32, request: Request, position: int, vocabulary: DraftVocabulary
) -> tuple[int, float]:
    """The token at `position`, and its probability. `best` is the highest logit of the row."""
    params = request.sampling
    with np.errstate(over="ignore"):
        columns = np.flatnonzero(row >= best - _REACH * params.temperature)
    scaled = scale(row[columns], params.temperature)
    if params.filters_tokens:
        kept = keep(scaled, params.top_k, params.top_p, params.min_p)
        columns, scaled = columns[kept], scaled[kept]
    ids = vocabulary.tokens(columns)
    drawn = int((scaled + gumbel_at(request.seed, request.choice, position, ids)).argmax())
    weights = np.exp(scaled)
    return int(ids[drawn]), float(weights[drawn] / weights.sum())


def _adjusted(
    rows: Row,
    request: Request,
    vocabulary: DraftVocabulary,
    sampling_row: MakeSamplingRow,
    before: tuple[int, ...],
) -> Iterator[tuple[int, float]]:
    """By the target's own sampler, token after token, over all of its vocabulary."""
    for row in rows:
        full = row
        if vocabulary.token_ids is not None:
            full = np.full(vocabulary.size, -np.inf, dtype=np.float32)
            full[vocabulary.token_ids] = row
        after = sampling_row(request, vocabulary.size, before)
        result = sample(torch.from_numpy(full[None]), [after])
        if result.errors:
            return
        (token,) = result.token_ids
        weights = np.exp(full - full.max())
        before += (token,)
        yield token, float(weights[token] / weights.sum())
