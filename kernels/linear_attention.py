"""Linear attention with a decaying state, with and without the delta rule, in chunks at fixed positions.

A head's state S [K, V] follows S_t = a_t S_{t-1} + k_t u_t^T, and a query reads o_t = S_t^T q_t. Mamba-2 has u_t = v_t
(Dao and Gu, 2024); a gated delta net has u_t = b_t (v_t - a_t S_{t-1}^T k_t) (Yang et al., 2024). Both are computed
here in their chunked form, from the state at the last multiple of CHUNK positions and the rows since then, and the
system of equations of a delta net's chunk is solved as there (the WY form).

Every product has the shape of one chunk, whether one of its rows is asked for or all, and a row depends on earlier ones
only. So a row has the same bits in a prompt, in a chunk of it, in a decode step and in a block to verify.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from kernels.rowwise import rowwise

CHUNK = 16


@dataclass(frozen=True, slots=True)
class Chunks:
    """What N chunks of rows need beside the state at their start. H heads, of which each H / J share one of J keys.

    reads: [N, J, R, K], keys (delta rule only) above queries. keys: [N, J, CHUNK, K]. values: [N, H, CHUNK, V].
    scores: [N, H, CHUNK, CHUNK], how much of u_j row i reads.
    from_start, to_end: [N, H, CHUNK, 1], decay up to a row, and from there to the end of its chunk.
    beta: [N, H, CHUNK, 1]; inverse: [N, H, CHUNK, CHUNK], which solves the chunk's system. Delta rule only.
    """

    reads: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scores: torch.Tensor
    from_start: torch.Tensor
    to_end: torch.Tensor
    beta: torch.Tensor | None = None
    inverse: torch.Tensor | None = None

    def part(self, start: int, stop: int) -> Chunks:
        """Chunks [start, stop)."""
        if start == 0 and stop == len(self.keys):
            return self
        return Chunks(
            self.reads[start:stop],
            self.keys[start:stop],
            self.values[start:stop],
            self.scores[start:stop],
            self.from_start[start:stop],
            self.to_end[start:stop],
            None if self.beta is None else self.beta[start:stop],
            None if self.inverse is None else self.inverse[start:stop],
        )


def chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor | None = None,
) -> Chunks:
    """Prepare N chunks, all at once. With `beta`, by the delta rule.

    query, key: [N, CHUNK, J, K]; value: [N, CHUNK, H, V]; log_decay, beta: [N, CHUNK, H]. All float32. Rows that a
    chunk does not have yet are zeros. Head h uses key h // (H / J).
    """
    query, key, value = query.transpose(1, 2), key.transpose(1, 2).contiguous(), value.transpose(1, 2)
    num_keys = key.shape[1]
    total = log_decay.transpose(1, 2).cumsum(-1)
    later, one = _constants(key.device)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill_(later, -torch.inf)
    decay = _exp(between).unflatten(1, (num_keys, -1))
    from_start, to_end = _exp(torch.stack((total, total[..., -1:] - total), 2)).unsqueeze(-1).unbind(2)
    scores = ((query @ key.transpose(-1, -2)).unsqueeze(2) * decay).flatten(1, 2)
    if beta is None:
        return Chunks(query, key, value.contiguous(), scores, from_start, to_end)
    beta = beta.transpose(1, 2).unsqueeze(-1)
    system = ((key @ key.transpose(-1, -2)).unsqueeze(2) * decay).flatten(1, 2) * beta
    inverse = torch.linalg.solve_triangular(system, one.expand_as(system), upper=False, unitriangular=True)
    reads = torch.cat((key, query), 2)
    return Chunks(reads, key, value, scores, from_start, to_end, beta, inverse.contiguous())


def read(chunks: Chunks, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the rows of N chunks read, [N, H, CHUNK, V], and their u, the same, given `state` [N, J, K, H / J * V]."""
    heads, _, width = chunks.values.shape[1:]
    seen = (chunks.reads @ state).unflatten(-1, (-1, width)).transpose(2, 3)
    seen = seen.reshape(len(state), heads, -1, width)
    if chunks.beta is None or chunks.inverse is None:
        update = chunks.values
    else:
        known = seen[:, :, :CHUNK] * chunks.from_start
        update = chunks.inverse @ ((chunks.values - known) * chunks.beta)
    out = (seen[:, :, -CHUNK:] * chunks.from_start).contiguous()
    out.flatten(0, 1).baddbmm_(chunks.scores.flatten(0, 1), update.flatten(0, 1))
    return out, update


def advance(
    chunks: Chunks, update: torch.Tensor, state: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The state at the end of N complete chunks, from that at their start, [N, J, K, H / J * V], and their u.

    It is in `out`, if that is given: contiguous, of the same shape.
    """
    num_keys, key_dim = state.shape[1:3]
    added = (update * chunks.to_end).unflatten(1, (num_keys, -1)).transpose(2, 3).flatten(3)
    kept = state.view(len(state), num_keys, key_dim, -1, update.shape[-1])
    decay = chunks.from_start[:, :, -1].view(len(state), num_keys, 1, -1, 1)
    advanced = torch.mul(kept, decay, out=None if out is None else out.view(kept.shape)).flatten(3)
    advanced.flatten(0, 1).baddbmm_(chunks.keys.transpose(-1, -2).flatten(0, 1), added.flatten(0, 1))
    return advanced


@cache
def _constants(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Which rows of a chunk come after a row, and the identity."""
    return torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=device).triu(1), torch.eye(CHUNK, device=device)


def _exp(x: torch.Tensor) -> torch.Tensor:
    """exp of [N, H, …], in rows of a chunk's or a head's numbers, the last two dimensions."""
    return rowwise(torch.exp, x.reshape(-1, x.shape[-2] * x.shape[-1])).view(x.shape)
