"""Chunked linear attention equals the recurrence that it is defined by, and its rows do not depend on their company."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import normalize

from kernels.linear_attention import CHUNK, advance, chunks, read

Rows = dict[str, torch.Tensor | None]

# Heads, keys that they share, width of a key, of a value.
SHAPES = [(4, 2, 8, 12), (3, 3, 16, 8), (8, 1, 32, 16)]


def make_rows(count: int, shape: tuple[int, int, int, int], delta_rule: bool) -> Rows:
    heads, keys, key_dim, value_dim = shape
    generator = torch.Generator().manual_seed(0)
    return {
        "query": normalize(torch.randn(count, keys, key_dim, generator=generator), dim=-1),
        "key": normalize(torch.randn(count, keys, key_dim, generator=generator), dim=-1),
        "value": torch.randn(count, heads, value_dim, generator=generator),
        "log_decay": -torch.rand(count, heads, generator=generator) / 2,
        "beta": torch.rand(count, heads, generator=generator) if delta_rule else None,
    }


def recurrence(rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Row by row in float64: what each row reads, [T, H, V], and the state at the end, [H, K, V]."""
    query, key, value, log_decay = (
        rows[name].double()
        for name in ("query", "key", "value", "log_decay")  # type: ignore[union-attr]
    )
    beta = rows["beta"]
    heads, shared = value.shape[1], value.shape[1] // key.shape[1]
    state = torch.zeros(heads, key.shape[2], value.shape[2], dtype=torch.float64)
    outs = []
    for t in range(len(value)):
        k, q = (x[t].repeat_interleave(shared, 0) for x in (key, query))
        state = state * log_decay[t].exp()[:, None, None]
        update = value[t]
        if beta is not None:
            update = (update - torch.einsum("hk,hkv->hv", k, state)) * beta[t].double()[:, None]
        state = state + torch.einsum("hk,hv->hkv", k, update)
        outs.append(torch.einsum("hk,hkv->hv", q, state))
    return torch.stack(outs), state


def run(rows: Rows, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `count` rows through the kernels, with zeros where the last chunk is not complete."""
    padded = -(-count // CHUNK) * CHUNK
    tiles = {
        name: None
        if x is None
        else torch.cat([x[:count], x.new_zeros(padded - count, *x.shape[1:])]).unflatten(0, (-1, CHUNK))
        for name, x in rows.items()
    }
    prepared = chunks(**tiles)  # type: ignore[arg-type]
    heads, value_dim = tiles["value"].shape[2:]  # type: ignore[union-attr]
    keys, key_dim = tiles["key"].shape[2:]  # type: ignore[union-attr]
    state = torch.zeros(1, keys, key_dim, heads // keys * value_dim)
    outs = []
    for number in range(padded // CHUNK):
        part = prepared.part(number, number + 1)
        out, update = read(part, state)
        outs.append(out[0].transpose(0, 1))
        if (number + 1) * CHUNK <= count:
            state = advance(part, update, state)
    return torch.cat(outs)[:count], state


@pytest.mark.parametrize("delta_rule", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_equal_the_recurrence(shape: tuple[int, int, int, int], delta_rule: bool) -> None:
    rows = make_rows(5 * CHUNK, shape, delta_rule)
    expected, expected_state = recurrence(rows)
    out, state = run(rows, 5 * CHUNK)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=0)
    keys = shape[1]
    by_head = state[0].unflatten(-1, (-1, shape[3])).transpose(1, 2).reshape(expected_state.shape)
    assert by_head.shape[0] == shape[0] and keys * (shape[0] // keys) == shape[0]
    torch.testing.assert_close(by_head.double(), expected_state, atol=1e-5, rtol=0)


@pytest.mark.parametrize("delta_rule", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_does_not_depend_on_later_ones(shape: tuple[int, int, int, int], delta_rule: bool) -> None:
    rows = make_rows(2 * CHUNK, shape, delta_rule)
    expected, _ = run(rows, 2 * CHUNK)
    for count in range(1, 2 * CHUNK):
        assert torch.equal(run(rows, count)[0], expected[:count])


@pytest.mark.parametrize("delta_rule", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_do_not_depend_on_others(shape: tuple[int, int, int, int], delta_rule: bool) -> None:
    count = 40
    rows = make_rows(count * CHUNK, shape, delta_rule)
    tiles = {name: None if x is None else x.unflatten(0, (-1, CHUNK)) for name, x in rows.items()}
    heads, keys, key_dim, value_dim = shape
    state = torch.randn(count, keys, key_dim, heads // keys * value_dim)

    def both(start: int, stop: int) -> list[torch.Tensor]:
        part = chunks(**{name: None if x is None else x[start:stop] for name, x in tiles.items()})  # type: ignore[arg-type]
        out, update = read(part, state[start:stop])
        return [out, advance(part, update, state[start:stop])]

    together = both(0, count)
    for number in (0, 1, 17, count - 1):
        alone = both(number, number + 1)
        assert all(torch.equal(a[0], t[number]) for a, t in zip(alone, together, strict=True))


def test_decay_to_nothing_is_no_nan() -> None:
    rows = make_rows(CHUNK, SHAPES[0], True)
    rows["log_decay"] = torch.full_like(rows["log_decay"], -1e4)  # type: ignore[arg-type]
    expected, _ = recurrence(rows)
    torch.testing.assert_close(run(rows, CHUNK)[0].double(), expected, atol=1e-5, rtol=0)
