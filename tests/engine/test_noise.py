"""The sampling noise: a pure function of (seed, choice, position, token), distributed as Gumbel's law."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.noise import above, gumbel, gumbel_at

VOCAB = 49_152
ANY_INT = st.integers(-(2**70), 2**70)
MASK = 2**64 - 1


def splitmix64(state: int) -> int:
    """The output function of the published generator, on Python integers."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def reference(seed: int, choice: int, position: int, token: int) -> float:
    gamma, key = 0x9E3779B97F4A7C15, 0
    for part in (seed, choice, position):
        key = splitmix64(((key + gamma) ^ part) & MASK)
    bits = splitmix64((key + (token + 1) * gamma) & MASK)
    return -math.log(-math.log(((bits >> 12) + 0.5) / 2**52))


@given(seed=ANY_INT, choice=st.integers(0, 127), position=st.integers(0, 2**31), token=st.integers(0, 2**20))
def test_it_is_the_documented_hash(seed: int, choice: int, position: int, token: int) -> None:
    (noise,) = gumbel_at(seed, choice, position, np.array([token]))
    assert noise == pytest.approx(reference(seed, choice, position, token), rel=1e-6, abs=1e-6)


@given(seed=ANY_INT, position=st.integers(0, 2**40), data=st.data())
def test_some_tokens_have_the_bits_they_have_among_all(seed: int, position: int, data: st.DataObject) -> None:
    tokens = np.array(data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40)))
    full = gumbel(seed, 0, position, VOCAB)
    assert full.dtype == np.float32 and np.isfinite(full).all()
    np.testing.assert_array_equal(gumbel_at(seed, 0, position, tokens), full[tokens])


@given(size=st.integers(1, 20_000))
def test_a_token_has_the_same_noise_in_any_vocabulary(size: int) -> None:
    np.testing.assert_array_equal(gumbel(7, 1, 3, size), gumbel(7, 1, 3, VOCAB)[:size])


@pytest.mark.parametrize("level", [-4.0, 0.0, 5.5, 11.0, 40.0])
def test_tokens_above_a_level_are_found_by_their_bits(level: float) -> None:
    noise = gumbel(3, 1, 4, VOCAB)
    found = above(3, 1, 4, VOCAB, level)
    missed = np.delete(noise, found)
    assert not (missed > level).any()
    assert (noise[found] > level - 1e-3).all()


def test_the_law_is_gumbel() -> None:
    values = np.sort(
        np.concatenate([gumbel(11, 0, position, VOCAB) for position in range(4)]).astype(np.float64)
    )
    empirical = np.arange(1, len(values) + 1) / len(values)
    distance = np.abs(empirical - np.exp(-np.exp(-values))).max()
    assert distance < 1.63 / math.sqrt(len(values))  # Kolmogorov-Smirnov at 1 %


@pytest.mark.parametrize(
    "neighbour", [(6, 0, 9), (5, 1, 9), (5, 0, 10), (5, 9, 0), (9, 0, 5), (5 + 2**32, 0, 9), (-5, 0, 9)]
)
def test_neighbouring_keys_are_uncorrelated(neighbour: tuple[int, int, int]) -> None:
    here, there = gumbel(5, 0, 9, VOCAB), gumbel(*neighbour, VOCAB)
    assert abs(np.corrcoef(here, there)[0, 1]) < 4 / math.sqrt(VOCAB)


def test_one_token_along_positions_is_uncorrelated() -> None:
    series = np.array([gumbel_at(5, 0, position, np.array([17]))[0] for position in range(4000)])
    assert abs(np.corrcoef(series[:-1], series[1:])[0, 1]) < 4 / math.sqrt(len(series))
