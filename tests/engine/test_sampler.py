"""Choosing a token: the law of the draw, filters and penalties against references, no effect of a batch."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.noise import gumbel
from engine.penalties import TokenHistory
from engine.request import Request, SamplingParams
from engine.sampler import SamplingRow, keep, sample, scale, token_logprobs

VOCAB = 300
EOS = frozenset({2})


def row(position: int = 0, *, history: tuple[list[int], list[int]] = ([], []), **fields: Any) -> SamplingRow:
    """A row with its history already taken in. Fields of SamplingRow, or of its params."""
    own = {
        name: fields.pop(name) for name in ("seed", "choice", "num_output_tokens", "drafts") if name in fields
    }
    prompt, output = history
    tokens = TokenHistory(prompt, VOCAB)
    tokens.update(output)
    defaults: dict[str, Any] = {"seed": 1, "choice": 0, "num_output_tokens": len(output)}
    return SamplingRow(
        params=SamplingParams(**fields),
        position=position,
        eos_token_ids=EOS,
        history=tokens,
        **defaults | own,
    )


def random_logits(seed: int, rows: int = 1, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def chosen(logits: torch.Tensor, *rows: SamplingRow) -> list[int]:
    return sample(logits, rows).token_ids


# -- the draw


def test_temperature_zero_is_argmax() -> None:
    logits = random_logits(0, 16)
    assert chosen(logits, *[row(temperature=0.0)] * 16) == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    "params", [{}, {"logit_bias": {9: -1.0}}, {"min_tokens": 1}, {"presence_penalty": 0.5}]
)
def test_the_lowest_id_wins_a_tie(params: dict[str, Any]) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [200, 41, 77]] = 5.0
    assert chosen(logits, row(temperature=0.0, **params)) == [41]


@pytest.mark.parametrize("temperature", [1e-30, 1e-40, 1e-320])
def test_a_vanishing_temperature_is_argmax_too(temperature: float) -> None:
    logits = random_logits(3) * 100
    assert chosen(logits, row(temperature=temperature)) == [int(logits.argmax())]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
    ],
    ids=str,
)
def test_tokens_come_up_as_often_as_the_softmax_says(params: dict[str, Any]) -> None:
    draws = 4000
    logits = torch.tensor(np.linspace(-2, 2, 20, dtype=np.float32))[None].expand(draws, -1)
    rows = [row(position, seed=5, **params) for position in range(draws)]
    counts = Counter(sample(logits, rows).token_ids)
    scores = transformers_scores(logits[:1], SamplingParams(**params))[0]
    expected = scores.double().softmax(-1).numpy() * draws
    support = np.flatnonzero(expected)
    assert set(counts) <= set(support.tolist())
    chi_square = sum((counts[token] - expected[token]) ** 2 / expected[token] for token in support)
    freedom = len(support) - 1
    assert chi_square < freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3  # 0.1 %


@pytest.mark.parametrize("spread", [0.5, 3.0, 8.0])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_a_draw_is_the_highest_of_scaled_logits_and_noise(spread: float, temperature: float) -> None:
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=temperature)
    for position in range(150):
        logits = (rng.standard_normal(3000) * spread).astype(np.float32)
        logits[rng.integers(3000, size=3)] += 4 * spread  # most of all there is, and a long tail
        result = sample(torch.from_numpy(logits[None]), [SamplingRow(params, 5, 1, position, 0, ())])
        sums = scale(logits, temperature) + gumbel(5, 1, position, 3000)
        assert result.token_ids == [int(sums.argmax())]


def test_seed_choice_and_position_key_the_draw() -> None:
    flat = torch.zeros(64, VOCAB)
    same = chosen(flat, *[row(9, seed=4)] * 64)
    assert len(set(same)) == 1
    for varied in (
        [row(9, seed=seed) for seed in range(64)],
        [row(9, seed=4, choice=choice) for choice in range(64)],
        [row(position, seed=4) for position in range(64)],
    ):
        assert len(set(chosen(flat, *varied))) > 40


# -- company

params_strategy = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 1.5]),
        "top_k": st.sampled_from([0, 1, 5, 250, 400]),
        "top_p": st.sampled_from([1.0, 0.3, 0.95]),
        "min_p": st.sampled_from([0.0, 0.05]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "presence_penalty": st.sampled_from([0.0, 0.7]),
        "logit_bias": st.sampled_from([{}, {3: 4.0, 5: -100.0}]),
        "min_tokens": st.sampled_from([0, 8]),
        "logprobs": st.sampled_from([None, 0, 4]),
    }
)


@settings(max_examples=40, deadline=None)
@given(
    several=st.lists(params_strategy, min_size=2, max_size=6),
    logits_seed=st.integers(0, 10**6),
    order=st.randoms(use_true_random=False),
)
def test_a_row_does_not_depend_on_its_company(
    several: list[dict[str, Any]], logits_seed: int, order: Any
) -> None:
    logits = random_logits(logits_seed, len(several))
    rows = [row(i, seed=i, history=([1, 2, 3], [7, 7, i]), **params) for i, params in enumerate(several)]
    together = sample(logits, rows)
    shuffled = list(range(len(rows)))
    order.shuffle(shuffled)
    mixed = sample(logits[shuffled], [rows[i] for i in shuffled])
    for place, index in enumerate(shuffled):
        alone = sample(logits[index : index + 1], [rows[index]])
        assert alone.token_ids[0] == together.token_ids[index] == mixed.token_ids[place]
        assert alone.logprobs[0] == together.logprobs[index] == mixed.logprobs[place]


@settings(max_examples=40, deadline=None)
@given(params=params_strategy, logits_seed=st.integers(0, 10**6), output=st.lists(st.integers(0, VOCAB - 1)))
def test_a_row_of_a_verified_block_is_the_row_of_plain_decoding(
    params: dict[str, Any], logits_seed: int, output: list[int]
) -> None:
    def request(known: list[int]) -> Request:
        sampling = SamplingParams(**params | {"frequency_penalty": 0.4})
        return Request("r", [1, 5, 9], sampling, lambda event: None, seed=8, output_ids=known)

    def at(request: Request, drafts: tuple[int, ...]) -> SamplingRow:
        history = TokenHistory(request.prompt_ids, VOCAB)
        history.update(request.output_ids)
        return SamplingRow.of(request, EOS, history, drafts)

    logits = random_logits(logits_seed)
    verified = sample(logits, [at(request([]), tuple(output))])
    assert verified == sample(logits, [at(request(output), ())])


def test_the_caller_keeps_its_logits() -> None:
    logits = random_logits(1)
    before = logits.clone()
    busy = row(
        history=([1], [3]),
        temperature=0.5,
        top_p=0.5,
        logit_bias={4: 9.0},
        repetition_penalty=2.0,
        min_tokens=9,
        logprobs=2,
    )
    sample(logits, [busy])
    assert torch.equal(logits, before)


# -- filters


def transformers_scores(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Scores [R, V] of transformers' processors in the order temperature, top_k, top_p, min_p."""
    ids = torch.zeros(len(logits), 1, dtype=torch.int64)
    scores = TemperatureLogitsWarper(params.temperature)(ids, logits)
    if params.top_k > 0:
        scores = TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p > 0:
        scores = MinPLogitsWarper(params.min_p)(ids, scores)
    return scores


FILTERS: dict[str, st.SearchStrategy[Any]] = {
    "top_k": st.sampled_from([0, 1, 2, 17, VOCAB - 1, VOCAB, VOCAB + 5]),
    # Not where a sum of equal probabilities may fall, so that rounding has no say.
    "top_p": st.sampled_from([1.0, 0.01713, 0.50317, 0.90171, 0.99931]),
    "min_p": st.sampled_from([0.0, 0.00317, 0.10713, 0.90317, 1.0]),
}


@settings(max_examples=150, deadline=None)
@given(
    logits_seed=st.integers(0, 10**6),
    spread=st.sampled_from([0.01, 1.0, 4.0]),
    temperature=st.sampled_from([0.2, 1.0, 2.5]),
    filters=st.fixed_dictionaries(FILTERS),
)
def test_filters_leave_what_transformers_leaves(
    logits_seed: int, spread: float, temperature: float, filters: dict[str, Any]
) -> None:
    logits = random_logits(logits_seed, spread=spread)
    scores = transformers_scores(logits, SamplingParams(temperature=temperature, **filters))[0]
    scaled = scale(logits[0].numpy(), temperature)
    kept = keep(scaled, **filters)
    assert kept.tolist() == torch.isfinite(scores).nonzero()[:, 0].tolist()
    theirs, ours = scores.softmax(-1), torch.from_numpy(scaled)[kept].softmax(-1)
    torch.testing.assert_close(ours, theirs[kept])


def plain_filter(scaled: list[float], top_k: int, top_p: float, min_p: float) -> list[int]:
    """The docstring of `keep`, word for word, on lists."""
    order = sorted(range(len(scaled)), key=lambda token: (-scaled[token], token))
    if top_k > 0:
        order = order[:top_k]
    weights = [math.exp(scaled[token]) for token in order]
    if top_p < 1:
        held, size = 0.0, 0
        while held < top_p * math.fsum(weights):
            held += weights[size]
            size += 1
        order = order[:size]
    return sorted(
        token for token in order if min_p == 0 or scaled[token] >= scaled[order[0]] + math.log(min_p)
    )


@settings(max_examples=150, deadline=None)
@given(levels=st.lists(st.integers(-4, 4), min_size=1, max_size=60), filters=st.fixed_dictionaries(FILTERS))
def test_among_equals_the_filters_keep_the_lowest_ids(levels: list[int], filters: dict[str, Any]) -> None:
    scaled = np.array(levels, dtype=np.float32) - max(levels)
    assert keep(scaled, **filters).tolist() == plain_filter(scaled.tolist(), **filters)


# -- bias, penalties, min_tokens

tokens = st.lists(st.integers(0, VOCAB - 1), max_size=30)


@given(prompt=tokens, output=tokens, penalty=st.floats(0.3, 3.0), logits_seed=st.integers(0, 10**6))
def test_repetition_penalty_is_that_of_transformers(
    prompt: list[int], output: list[int], penalty: float, logits_seed: int
) -> None:
    logits = random_logits(logits_seed)
    adjusted = row(history=(prompt, output), repetition_penalty=penalty).adjust(logits[0].numpy())
    ids = torch.tensor([prompt + output], dtype=torch.int64)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, logits.clone())[0]
    torch.testing.assert_close(torch.from_numpy(adjusted), expected)


@given(prompt=tokens, output=tokens, presence=st.floats(-2, 2), frequency=st.floats(-2, 2))
def test_presence_and_frequency_count_the_output_only(
    prompt: list[int], output: list[int], presence: float, frequency: float
) -> None:
    logits = random_logits(4)[0].numpy()
    adjusted = row(history=(prompt, output), presence_penalty=presence, frequency_penalty=frequency).adjust(
        logits
    )
    counts = Counter(output)
    expected = [logits[t] - frequency * counts[t] - presence * (counts[t] > 0) for t in range(VOCAB)]
    np.testing.assert_allclose(adjusted, expected, rtol=1e-5, atol=1e-5)


def test_history_may_grow_in_any_steps() -> None:
    output = [4, 4, 9, 4, 2, 9]
    at_once, in_steps = TokenHistory([1], VOCAB), TokenHistory([1], VOCAB)
    at_once.update(output)
    for size in (1, 1, 3, 6):
        in_steps.update(output[:size])
    params = SamplingParams(repetition_penalty=1.5, frequency_penalty=0.5)
    logits = random_logits(6)[0].numpy()
    np.testing.assert_array_equal(at_once.penalize(logits, params), in_steps.penalize(logits, params))


def test_bias_comes_before_penalties() -> None:
    logits = torch.full((1, VOCAB), -1.0)
    biased = row(history=([7], []), logit_bias={7: 5.0}, repetition_penalty=2.0).adjust(logits[0].numpy())
    assert biased[7] == 2.0  # (-1 + 5) / 2; the other order gives -2 + 5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bias_bans_and_forces(temperature: float) -> None:
    logits = random_logits(8)
    best = int(logits.argmax())
    assert chosen(logits, row(temperature=temperature, logit_bias={11: 100.0})) == [11]
    second = int(logits[0].topk(2).indices[1])
    assert chosen(logits, row(temperature=0.0, logit_bias={best: -100.0})) == [second]


@pytest.mark.parametrize("temperature", [1.0, 1e38, 1e39, 1e300])
def test_nothing_that_is_masked_comes_up_however_hot_it_is(temperature: float) -> None:
    rows = [row(position, min_tokens=1, temperature=temperature) for position in range(50)]
    with np.errstate(all="raise", under="ignore"):
        tokens = chosen(torch.zeros(1, 4).expand(50, -1), *rows)
    assert set(tokens) == {0, 1, 3}


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_nothing_may_end_a_text_before_min_tokens(ignore_eos: bool) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [2, 30, 5]] = torch.tensor([9.0, 8.0, 7.0])
    stops: dict[str, Any] = {"min_tokens": 3, "stop_token_ids": (30,), "ignore_eos": ignore_eos}
    rows = [row(temperature=0.0, num_output_tokens=n, **stops) for n in range(5)]
    assert chosen(logits.expand(5, -1), *rows) == [5, 5, 5, 2, 2]


@pytest.mark.parametrize("filters", [{"temperature": 0.0}, {}, {"top_p": 0.5}], ids=str)
def test_where_every_token_would_end_it_one_is_chosen_all_the_same(filters: dict[str, Any]) -> None:
    logits = random_logits(5)
    masked = row(min_tokens=3, stop_token_ids=tuple(range(VOCAB)), **filters)
    assert chosen(logits, masked) == chosen(logits, row(**filters))


@pytest.mark.parametrize("penalty", [1e-300, 1e-46, 1e39, 1e300])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e300])
def test_no_repetition_penalty_overflows(penalty: float, temperature: float) -> None:
    seen = list(range(0, VOCAB, 2))
    logits = random_logits(6)
    logits[0, 0], logits[0, 1] = 0.0, -1.0
    extreme = row(repetition_penalty=penalty, temperature=temperature, top_p=0.9, history=(seen, []))
    with np.errstate(all="raise", under="ignore"):
        result = sample(logits, [extreme])
    assert not result.errors and 0 <= result.token_ids[0] < VOCAB


def test_ids_past_the_vocabulary_are_harmless() -> None:
    logits = random_logits(9)
    odd = row(temperature=0.0, logit_bias={VOCAB: 50.0}, min_tokens=4, stop_token_ids=(VOCAB + 7,))
    assert chosen(logits, odd) == [int(logits.argmax())]


# -- log-probabilities


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_logprobs_are_of_the_raw_logits(num_top: int) -> None:
    logits = random_logits(10)
    asked = row(temperature=0.7, top_k=3, logit_bias={8: 60.0}, logprobs=num_top)
    result = sample(logits, [asked])
    (logprob,) = result.logprobs
    reference = logits[0].log_softmax(-1)
    assert logprob is not None and logprob.token_id == result.token_ids[0] == 8
    assert logprob.logprob == pytest.approx(float(reference[8]), abs=1e-5)
    best = reference.topk(num_top)
    assert [token for token, _ in logprob.top] == best.indices.tolist()
    assert [value for _, value in logprob.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_logprobs_only_where_asked() -> None:
    assert sample(random_logits(11, 2), [row(), row(logprobs=0)]).logprobs[0] is None


def test_equally_likely_alternatives_come_by_id() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 250] = 1.0
    (logprob,) = token_logprobs(logits, [17], 4)
    assert logprob.token_id == 17
    assert [token for token, _ in logprob.top] == [250, 0, 1, 2]


def test_logprobs_of_given_tokens_go_row_by_row() -> None:
    logits = random_logits(12, 5)
    given_tokens = [3, 1, 4, 1, 5]
    reference = logits.log_softmax(-1)
    for index, logprob in enumerate(token_logprobs(logits, given_tokens, 0)):
        assert logprob.logprob == pytest.approx(float(reference[index, given_tokens[index]]), abs=1e-5)


# -- broken logits


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", ["nan", "inf", "-inf everywhere"])
def test_a_broken_row_is_an_error_of_its_own(broken: str, temperature: float) -> None:
    logits = random_logits(13, 3)
    good = chosen(logits, *[row(temperature=temperature)] * 3)
    if broken == "-inf everywhere":
        logits[1] = -math.inf
    else:
        logits[1, 100] = float(broken)
    result = sample(logits, [row(temperature=temperature, logprobs=1)] * 3)
    assert list(result.errors) == [1] and "not finite" in result.errors[1]
    assert result.token_ids == [good[0], -1, good[2]]
    assert result.logprobs[1] is None


def test_a_masked_token_is_not_an_error() -> None:
    logits = random_logits(14)
    best = int(logits.argmax())
    logits[0, best] = -math.inf
    assert chosen(logits, row(top_p=0.9)) != [best]
