"""How a drafter's logits become tokens: as the target would choose from them, over a vocabulary that may be reduced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from engine.penalties import TokenHistory, needs_history
from engine.request import Request, SamplingParams
from engine.sampler import SamplingRow, sample
from speculative.chain import draft_chains
from speculative.proposal import BOUNDS, DraftVocabulary, Proposal, choose

VOCAB = 400
SOME = np.sort(np.random.default_rng(0).permutation(VOCAB)[:150])


def make_request(**sampling: Any) -> Request:
    request = Request("r", [5, 6, 7], SamplingParams(**sampling), sink=lambda event: None, choice=1)
    request.seed = 11
    request.output_ids = [8, 9]
    return request


def sampling_row(request: Request, vocab_size: int, drafts: tuple[int, ...]) -> SamplingRow:
    history = None
    if needs_history(request.sampling):
        history = TokenHistory(request.prompt_ids, vocab_size)
        history.update(request.output_ids)
    return SamplingRow.of(request, (0,), history, drafts)


def chosen_by_the_target(logits: torch.Tensor, request: Request) -> tuple[int, ...]:
    """Row by row from logits [n, VOCAB], each knowing the ones before it."""
    tokens: tuple[int, ...] = ()
    for row in logits:
        tokens += tuple(sample(row[None], [sampling_row(request, VOCAB, tokens)]).token_ids)
    return tokens


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 0.5},
        {"temperature": 0.9, "presence_penalty": 1.0, "logit_bias": {17: 4.0}},
        {"temperature": 0.5, "min_tokens": 8, "stop_token_ids": (3,)},
    ],
    ids=str,
)
@pytest.mark.parametrize("token_ids", [None, SOME], ids=["whole", "reduced"])
def test_a_draft_is_what_the_target_would_choose_from_these_logits(
    sampling: dict[str, Any], token_ids: Any
) -> None:
    request = make_request(**sampling)
    # Peaked, as a trained model's are: of the flat tail only the best are looked at.
    logits = 4 * torch.randn(12, VOCAB, generator=torch.Generator().manual_seed(1))
    expected = logits
    if token_ids is not None:
        expected = torch.full_like(logits, -torch.inf)
        expected[:, token_ids] = logits[:, token_ids]
        logits = logits[:, token_ids]
    vocabulary = DraftVocabulary(VOCAB, token_ids)
    chain = Proposal()
    for row in logits:
        chain = choose(row[None], request, vocabulary, sampling_row, chain)
    assert chain.token_ids == chosen_by_the_target(expected, request)
    # A block is as much of that as there is hope for.
    block = choose(logits, request, vocabulary, sampling_row)
    assert block.token_ids == chain.token_ids[: len(block.token_ids)]
    assert block.levels == chain.levels[: len(block.levels)]
    assert len(block.levels) == len(block.token_ids) > 0


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"temperature": 0.0, "frequency_penalty": 1e-9}], ids=str
)
def test_a_draft_ends_behind_the_first_token_that_is_next_to_never_reached(sampling: dict[str, Any]) -> None:
    probabilities = torch.tensor([[0.5, 0.3, 0.2], [0.05, 0.9, 0.05], [0.34, 0.33, 0.33]])
    rows = probabilities[[0, 0, 1, 0, 0, 0, 0, 2, 0]].log()  # 0.5^6 * 0.9 = 0.014
    vocabulary = DraftVocabulary(VOCAB, np.arange(3))
    proposal = choose(rows, make_request(**sampling), vocabulary, sampling_row)
    assert proposal.token_ids == (0, 0, 1, 0, 0, 0, 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_confidence_is_the_probability_of_the_token(temperature: float) -> None:
    request = make_request(temperature=temperature)
    probabilities = torch.tensor([[0.05, 0.95 - 1e-9, 1e-9], [0.25, 0.25, 0.5]])
    proposal = choose(probabilities.log(), request, DraftVocabulary(3), sampling_row)
    own = [probabilities[j, token].item() for j, token in enumerate(proposal.token_ids)]
    assert list(proposal.levels) == [sum(p > bound for bound in BOUNDS) for p in own]


@pytest.mark.parametrize("temperature", [1e-300, 1e38, 1e300])
def test_any_temperature_can_be_drafted_at(temperature: float) -> None:
    logits = 4 * torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2))
    request = make_request(temperature=temperature)
    with np.errstate(all="raise", under="ignore"):
        proposal = choose(logits, request, DraftVocabulary(VOCAB), sampling_row)
    assert proposal.token_ids == chosen_by_the_target(logits, request)[: len(proposal.token_ids)] != ()


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0}, {"min_tokens": 9}], ids=str)
@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_draft_ends_before_logits_that_are_no_numbers(broken: float, sampling: dict[str, Any]) -> None:
    logits = 40 * torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(3))
    request, vocabulary = make_request(**sampling), DraftVocabulary(VOCAB)
    whole = choose(logits, request, vocabulary, sampling_row)
    logits[1, 5:] = broken
    logits[1, :5] = min(broken, 0.0)
    assert choose(logits, request, vocabulary, sampling_row).token_ids == whole.token_ids[:1] != ()

    def next_logits(active: Sequence[int], drafted: Sequence[Proposal]) -> torch.Tensor:
        return torch.stack([logits[len(draft.token_ids)] for draft in drafted])

    (chain,) = draft_chains(next_logits, [request], [3], vocabulary, sampling_row)
    assert chain.token_ids == whole.token_ids[:1]


def test_nothing_is_asked_for_no_rows() -> None:
    assert (
        choose(torch.empty(0, 3), make_request(temperature=0.0), DraftVocabulary(3), sampling_row)
        == Proposal()
    )
