"""What earlier tokens do to the next one: repetition, presence and frequency penalties."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.request import SamplingParams

_MAX_PENALTY = 1e30  # far past what tells, and no logit overflows float32


def needs_history(params: SamplingParams) -> bool:
    """Whether the choice of a token depends on how often others have occurred."""
    return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)


class TokenHistory:
    """How often each token occurs in a request, kept up to date in O(new tokens).

    The prompt counts for the repetition penalty only.
    """

    def __init__(self, prompt_ids: Sequence[int], vocab_size: int) -> None:
        self._seen = np.zeros(vocab_size, dtype=np.bool_)
        self._seen[np.asarray(prompt_ids, dtype=np.int64)] = True
        self._counts = np.zeros(vocab_size, dtype=np.float32)  # in the output
        self._num_output = 0

    def update(self, output_ids: Sequence[int]) -> None:
        """Take in what `output_ids`, the whole output so far, has gained since the last call."""
        for token in output_ids[self._num_output :]:
            self._seen[token] = True
            self._counts[token] += 1
        self._num_output = len(output_ids)

    def penalize(
        self, logits: npt.NDArray[np.float32], params: SamplingParams, drafts: Sequence[int] = ()
    ) -> npt.NDArray[np.float32]:
        """New logits [vocab_size] after the penalties, as if `drafts` were part of the output already.

        The repetition penalty divides a positive logit and multiplies a negative one; the others subtract,
        once for a token that occurs (presence) or for every occurrence (frequency).
        """
        seen, counts = self._seen, self._counts
        if drafts:
            seen, counts = seen.copy(), counts.copy()
            seen[list(drafts)] = True
            np.add.at(counts, list(drafts), 1)
        if params.repetition_penalty != 1.0:
            penalty = np.float32(min(max(params.repetition_penalty, 1 / _MAX_PENALTY), _MAX_PENALTY))
            ids = np.flatnonzero(seen)
            theirs = logits[ids]
            logits = logits.copy()
            logits[ids] = np.where(theirs > 0, theirs / penalty, theirs * penalty)
        if params.frequency_penalty != 0.0:
            logits = logits - np.float32(params.frequency_penalty) * counts
        if params.presence_penalty != 0.0:
            logits = logits - np.float32(params.presence_penalty) * (counts > 0).astype(np.float32)
        return logits
