"""Choosing the next token, so that neither speculation nor the batch can change the choice.

The token at position p is argmax(filter(adjusted / T) + gumbel(seed, choice, p, token id)): a draw from the
filtered softmax (the Gumbel-max trick) that depends on its own row of logits and its own request only. Who
verifies a drafted token compares it with this one; a drafter that has logits picks by the same rule.

Rows are worked on one at a time in numpy: single-threaded, so in a step of a few milliseconds it neither
wakes nor waits for a thread pool. Logits on another device are fetched row by row, unless argmax is enough.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.noise import above, gumbel, gumbel_at
from engine.penalties import TokenHistory, needs_history
from engine.request import Request, SamplingParams, TokenLogprob

Row = npt.NDArray[np.float32]

_NEAR = 10.0  # below the likeliest token's, scaled logits are far
_SLACK = 1e-3  # more than sums in float32 round by
_MIN_TEMPERATURE, _MAX_TEMPERATURE = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One token to choose, and everything the choice depends on beside the logits.

    `position` is the absolute index in prompt and output of the token to choose, `num_output_tokens` how many
    output tokens are ahead of it. `drafts` are those among them that are not verified yet: d1 … dj for row j
    of a verified block. `history` is of the tokens before them; None where not `needs_history(params)`.
    """

    params: SamplingParams
    seed: int
    choice: int
    position: int
    num_output_tokens: int
    eos_token_ids: Collection[int]
    history: TokenHistory | None = None
    drafts: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        request: Request,
        eos_token_ids: Collection[int],
        history: TokenHistory | None = None,
        drafts: tuple[int, ...] = (),
    ) -> SamplingRow:
        """The row that follows all known tokens of `request` and then `drafts`."""
        return cls(
            params=request.sampling,
            seed=request.seed,
            choice=request.choice,
            position=request.num_tokens + len(drafts),
            num_output_tokens=len(request.output_ids) + len(drafts),
            eos_token_ids=eos_token_ids,
            history=history,
            drafts=drafts,
        )

    @property
    def adjusts_logits(self) -> bool:
        """Whether logits change before temperature and filters."""
        params = self.params
        return bool(params.logit_bias) or self._below_min_tokens or needs_history(params)

    @property
    def _below_min_tokens(self) -> bool:
        return self.num_output_tokens < self.params.min_tokens

    def adjust(self, logits: Row) -> Row:
        """Logits [V] after bias, penalties and min_tokens, in that order; `logits` itself stays as it is."""
        params, vocab_size = self.params, len(logits)
        if params.logit_bias:
            # An id past the vocabulary can never come up, so there is nothing to bias or to mask.
            bias = {token: value for token, value in params.logit_bias.items() if token < vocab_size}
            logits = logits.copy()
            logits[list(bias)] += np.fromiter(bias.values(), dtype=np.float32)
        if needs_history(params):
            assert self.history is not None, "a request with penalties needs its history"
            logits = self.history.penalize(logits, params, self.drafts)
        if self._below_min_tokens:
            ends = [token for token in {*self.eos_token_ids, *params.stop_token_ids} if token < vocab_size]
            if len(ends) < vocab_size:  # one token has to be chosen, and none of these ends the request yet
                logits = logits.copy()
                logits[ends] = -np.inf
        return logits


def takes_the_best(request: Request) -> bool:
    """Whether whatever token comes next is the best by the logits as they are, the lowest id among equals."""
    return request.sampling.temperature == 0 and not SamplingRow.of(request, ()).adjusts_logits


@dataclass(frozen=True, slots=True)
class SampleResult:
    """One entry a row. `errors` names the rows that have no token (theirs is -1) and says why."""

    token_ids: list[int]
    logprobs: list[TokenLogprob | None]  # where `params.logprobs` asks for them
    errors: Mapping[int, str]


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> SampleResult:
    """Choose a token for each row of `logits` [R, V], float32, which are not changed.

    A row's token and log-probabilities are the same, bit for bit, whatever the other rows are. A row with NaN
    or +inf, or with nothing but -inf, gets an error instead of a token.
    """
    best_ids, best_logits = _argmax(logits)
    result = SampleResult([], [], errors := {})
    for index, (row, token, best) in enumerate(zip(rows, best_ids, best_logits, strict=True)):
        params = row.params
        logprob = None
        if not math.isfinite(best):
            errors[index] = unusable(row.position)
            token = -1
        else:
            if params.temperature > 0 or row.adjusts_logits:
                token = _choose(_host(logits[index]), row)
            if params.logprobs is not None:
                logprob = _logprob(_host(logits[index]), token, params.logprobs)
        result.token_ids.append(token)
        result.logprobs.append(logprob)
    return result


def unusable(position: int) -> str:
    """What is said of logits without a best one."""
    return f"the model's logits for position {position} are not finite"


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Raw log-probabilities of given tokens, one for each row of `logits` [R, V], with the `num_top` best."""
    return [_logprob(_host(row), token, num_top) for row, token in zip(logits, token_ids, strict=True)]


def scale(logits: Row, temperature: float) -> Row:
    """logits / temperature, shifted so that the largest is 0: the same probabilities, without overflow."""
    scaled: Row = logits - logits.max()
    with np.errstate(over="ignore"):
        scaled /= np.float32(min(max(temperature, _MIN_TEMPERATURE), _MAX_TEMPERATURE))
    return scaled


def keep(scaled: Row, top_k: int, top_p: float, min_p: float) -> npt.NDArray[np.int64]:
    """Ids that the filters leave, ascending. `scaled` [V] is as `scale` gives it.

    Order the tokens by probability, the lower id first among equals. Each filter in turn keeps a prefix:
    top_k the first k; top_p the shortest one that holds that share of what top_k left; min_p those with at
    least that share of the first one's probability. At least one token is left.
    """
    size = len(scaled)
    values = scaled
    if 0 < top_k < size:
        values = np.partition(scaled, size - top_k)[size - top_k :]
    values = np.sort(values)[::-1]
    if top_p < 1.0:
        mass = np.cumsum(np.exp(values), dtype=np.float64)
        values = values[: np.searchsorted(mass, top_p * mass[-1]) + 1]
    if min_p > 0.0:
        values = values[: max(1, np.count_nonzero(values >= np.float32(math.log(min_p))))]
    last = values[-1]
    above = np.flatnonzero(scaled > last)
    equal = np.flatnonzero(scaled == last)[: len(values) - len(above)]
    return np.sort(np.concatenate((above, equal)))


def _choose(logits: Row, row: SamplingRow) -> int:
    params = row.params
    if row.adjusts_logits:
        logits = row.adjust(logits)
    if params.temperature == 0:
        return int(logits.argmax())
    key = (row.seed, row.choice, row.position)
    scaled = scale(logits, params.temperature)
    if not params.filters_tokens:
        return _draw(scaled, key)
    ids = keep(scaled, params.top_k, params.top_p, params.min_p)
    return int(ids[(scaled[ids] + gumbel_at(*key, ids)).argmax()])


def _draw(scaled: Row, key: tuple[int, int, int]) -> int:
    """The id whose `scaled` [V] and noise are highest together.

    One that is far below the likeliest needs more noise than nearly every token has, so few have to be compared.
    """
    near = np.flatnonzero(scaled >= -_NEAR)
    if 4 * len(near) > len(scaled):
        return int((scaled + gumbel(*key, len(scaled))).argmax())
    best = float((scaled[near] + gumbel_at(*key, near)).max())
    ids = np.union1d(near, above(*key, len(scaled), best + _NEAR - _SLACK))
    return int(ids[(scaled[ids] + gumbel_at(*key, ids)).argmax()])


def _logprob(logits: Row, token_id: int, num_top: int) -> TokenLogprob:
    best = logits.max()
    total = best + math.log(np.exp(logits - best).sum(dtype=np.float64))
    top: list[int] = []
    if num_top > 0:
        ids = keep(logits, num_top, 1.0, 0.0)
        top = ids[np.argsort(-logits[ids], kind="stable")].tolist()
    return TokenLogprob(
        token_id,
        float(logits[token_id] - total),
        tuple((token, float(logits[token] - total)) for token in top),
    )


def _argmax(logits: torch.Tensor) -> tuple[list[int], list[float]]:
    """The lowest id of the largest logit of each row, and that logit; a NaN counts as the largest."""
    on_cpu = logits.device.type == "cpu"  # where numpy is several times faster, and alone
    ids = torch.from_numpy(logits.numpy().argmax(axis=-1)) if on_cpu else logits.argmax(dim=-1)
    return ids.tolist(), logits.gather(1, ids[:, None])[:, 0].tolist()


def _host(row: torch.Tensor) -> Row:
    return row.cpu().numpy()
