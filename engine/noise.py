"""Sampling noise that belongs to a place in a text, not to a generator.

The noise of a token is a pure function of (seed, choice, position, token id): there is no state to carry
through batches, preemption or speculation, and a few tokens' noise can be had without the others'.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: the step of splitmix64
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_BITS = 52  # that noise is made of
_BLOCK = 8192  # tokens whose intermediate results stay in the core's own cache


def gumbel(seed: int, choice: int, position: int, vocab_size: int) -> npt.NDArray[np.float32]:
    """Standard Gumbel noise of every token id, float32 [vocab_size].

    Each of the three numbers is taken modulo 2**64.
    """
    key, steps = _key(seed, choice, position), _steps(vocab_size)
    noise = np.empty(vocab_size, dtype=np.float32)
    for start in range(0, vocab_size, _BLOCK):
        noise[start : start + _BLOCK] = _gumbel(key + steps[start : start + _BLOCK])
    return noise


def gumbel_at(
    seed: int, choice: int, position: int, token_ids: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32]:
    """The same noise of `token_ids` [N] only, bit for bit: float32 [N]."""
    return _gumbel(_key(seed, choice, position) + _stream(token_ids))


def above(seed: int, choice: int, position: int, vocab_size: int, level: float) -> npt.NDArray[np.int64]:
    """Ids of all tokens whose noise is above `level`, ascending, and perhaps of some that have hardly less.

    Told by the bits that noise is made of, so that most tokens' logarithms are never taken.
    """
    key, steps = _key(seed, choice, position), _steps(vocab_size)
    # The noise is above the level where the bits, as a share of all, are above exp(-exp(-level)): four steps of them
    # are more than float64 rounds by.
    least = max(int(math.exp(-math.exp(-level)) * 2**_BITS) - 4, 0) << (64 - _BITS)
    found = [
        start + np.flatnonzero(_bits(key + steps[start : start + _BLOCK])[0] >= np.uint64(least))
        for start in range(0, vocab_size, _BLOCK)
    ]
    return np.concatenate(found)


def _bits(state: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Finalise `state`, which is overwritten, as splitmix64 does. Returns it and an array of its size for scratch."""
    scratch = np.empty_like(state)
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        state ^= np.right_shift(state, np.uint64(shift), out=scratch)
        state *= np.uint64(multiplier)
    state ^= np.right_shift(state, np.uint64(31), out=scratch)
    return state, scratch


def _gumbel(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.float32]:
    """-log(-log(u)) of the bits of `state`, which is overwritten."""
    state, scratch = _bits(state)
    # 52 bits and a half: exact in float64, and never 0 or 1, whose logarithms would not do.
    uniform = np.right_shift(state, np.uint64(64 - _BITS), out=scratch).astype(np.float64)
    uniform += 0.5
    uniform *= 2.0**-_BITS
    np.negative(np.log(uniform, out=uniform), out=uniform)
    np.negative(np.log(uniform, out=uniform), out=uniform)
    return uniform.astype(np.float32)


@lru_cache(maxsize=4)
def _steps(vocab_size: int) -> npt.NDArray[np.uint64]:
    return _stream(np.arange(vocab_size, dtype=np.int64))


def _stream(token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    return (token_ids.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)


def _key(seed: int, choice: int, position: int) -> np.uint64:
    key = 0
    for part in (seed, choice, position):
        key = _mix(key + _GOLDEN ^ part)
    return np.uint64(key)


def _mix(z: int) -> int:
    z &= _MASK
    z = (z ^ z >> 30) * _MULTIPLIERS[0] & _MASK
    z = (z ^ z >> 27) * _MULTIPLIERS[1] & _MASK
    return z ^ z >> 31
