"""Paged attention: one kernel that goes through a tile's keys, one that takes a split of them, one that merges splits.

A row's keys are cut at fixed absolute positions: products are over `blocks.keys` positions, a partial result over
`blocks.split`, and partial results are folded in order of position. Whether a program folds them as it goes or another
does afterwards, and whatever rows share its tile, a row's result is the same. What a row does not see has weight 0.
(Online softmax: Milakov and Gimelshein, 2018; splits over keys: flash decoding, Dao et al., 2023.)
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _rescale(peak, other_peak):
    """The higher of two peaks, and what to multiply by to go to it from each. A peak of -inf has seen nothing."""
    high = tl.maximum(peak, other_peak)
    base = tl.where(high == float("-inf"), 0.0, high)
    return high, tl.exp2(peak - base), tl.exp2(other_peak - base)


@triton.jit
def _tile_rows(
    tiles, sequences, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr
):
    """Where program 0's tile is: sequence, query token and head in the group of each row, range of positions it sees.

    A row that stands for no token sees nothing.
    """
    tile = tl.program_id(0)
    sequence = sequences + tl.load(tiles + tile * 2) * 5
    first_token = tl.load(sequence)
    query_len = tl.load(sequence + 1)
    context_len = tl.load(sequence + 2)
    row = tl.load(tiles + tile * 2 + 1) + tl.arange(0, ROWS)
    token = row // GROUP
    valid = token < query_len
    position = context_len - query_len + token
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
    last = first * 0 + context_len - 1
    if CAUSAL:
        last = position
    first = tl.where(valid, first, context_len)
    last = tl.where(valid, last, -1)
    return sequence, token, (first_token + token).to(tl.int64), row % GROUP, valid, first, last


@triton.jit
def _load_query(
    query, MAIN: tl.constexpr, REST: tl.constexpr, MAIN_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, valid
):
    """Query rows [ROWS, MAIN_BLOCK] and [ROWS, REST_BLOCK]; `query` points to each row."""
    main = tl.arange(0, MAIN_BLOCK)
    q_main = tl.load(query[:, None] + main[None, :], mask=valid[:, None] & (main < MAIN)[None, :], other=0.0)
    q_rest = q_main
    if REST > 0:
        rest = tl.arange(0, REST_BLOCK)
        q_rest = tl.load(
            query[:, None] + MAIN + rest[None, :], mask=valid[:, None] & (rest < REST)[None, :], other=0.0
        )
    return q_main, q_rest


@triton.jit
def _attend(
    q_main,
    q_rest,
    first,
    last,
    begin,
    end,
    slots,
    key,
    value,
    key_scales,
    value_scales,
    key_slot_stride,
    value_slot_stride,
    scale_slot_stride,
    scale,
    SOFTCAP: tl.constexpr,
    LATENT: tl.constexpr,
    SLOT_SCALES: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    V_DIM: tl.constexpr,
    MAIN_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DOT: tl.constexpr,
):
    """Attention of a tile over positions `begin` to `end`: sum [ROWS, V_BLOCK], peak [ROWS] and weight [ROWS].

    `key_scales` and `value_scales` point to this head's scale of slot 0; they are read if SLOT_SCALES.
    Scores are in units of log 2. `begin` is a multiple of KEYS; `first` and `last` bound what each row sees.
    """
    total = tl.full([ROWS, V_BLOCK], 0.0, dtype=tl.float32)
    peak = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    weight = tl.full([ROWS], 0.0, dtype=tl.float32)
    main = tl.arange(0, MAIN_BLOCK)
    v_dim = tl.arange(0, V_BLOCK)
    for start in range(begin, end, KEYS):
        position = start + tl.arange(0, KEYS)
        inside = position < end
        slot = tl.load(slots + position, mask=inside, other=0).to(tl.int64)
        k_main = tl.load(
            key + slot[:, None] * key_slot_stride + main[None, :],
            mask=inside[:, None] & (main < MAIN)[None, :],
            other=0.0,
        ).to(DOT)
        scores = tl.dot(q_main, tl.trans(k_main), input_precision="ieee")
        if REST > 0:
            rest = tl.arange(0, REST_BLOCK)
            k_rest = tl.load(
                key + slot[:, None] * key_slot_stride + MAIN + rest[None, :],
                mask=inside[:, None] & (rest < REST)[None, :],
                other=0.0,
            ).to(DOT)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
        scores = scores * scale
        if SLOT_SCALES:
            k_scale = tl.load(key_scales + slot * scale_slot_stride, mask=inside, other=0.0)
            scores = scores * k_scale[None, :]
        if SOFTCAP > 0:  # tanh(x) = 1 - 2 / (e^2x + 1)
            scores = SOFTCAP * LOG2_E * (1.0 - 2.0 / (tl.exp2(scores * (2.0 / SOFTCAP)) + 1.0))
        seen = (position[None, :] >= first[:, None]) & (position[None, :] <= last[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        high = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(high == float("-inf"), 0.0, high)
        keep = tl.exp2(peak - base)
        p = tl.exp2(scores - base[:, None])
        weight = weight * keep + tl.sum(p, 1)
        if LATENT:
            v = k_main
            if SLOT_SCALES:
                v = (v.to(tl.float32) * k_scale[:, None]).to(DOT)
        else:
            v = tl.load(
                value + slot[:, None] * value_slot_stride + v_dim[None, :],
                mask=inside[:, None] & (v_dim < V_DIM)[None, :],
                other=0.0,
            ).to(DOT)
            if SLOT_SCALES:
                v_scale = tl.load(value_scales + slot * scale_slot_stride, mask=inside, other=0.0)
                v = (v.to(tl.float32) * v_scale[:, None]).to(DOT)
        total = tl.dot(p.to(DOT), v, total * keep[:, None], input_precision="ieee")
        peak = high
    return total, peak, weight


@triton.jit
def extend_kernel(
    query,
    key,
    value,
    key_scales,
    value_scales,
    out,
    slot_table,
    sequences,
    tiles,
    query_token_stride,
    query_head_stride,
    key_slot_stride,
    key_head_stride,
    value_slot_stride,
    value_head_stride,
    scale_slot_stride,
    out_token_stride,
    out_head_stride,
    table_stride,
    scale,
    v_scale,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    LATENT: tl.constexpr,
    SLOT_SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    V_DIM: tl.constexpr,
    MAIN_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    DOT: tl.constexpr,
):
    """Program (tile, key head): all splits of a tile, folded in order, to `out`."""
    sequence, _, token, head, valid, first, last = _tile_rows(tiles, sequences, CAUSAL, WINDOW, GROUP, ROWS)
    kv_head = tl.program_id(1)
    head = kv_head * GROUP + head
    q_main, q_rest = _load_query(
        query + token * query_token_stride + head * query_head_stride,
        MAIN,
        REST,
        MAIN_BLOCK,
        REST_BLOCK,
        valid,
    )
    slots = slot_table + tl.load(sequence + 3).to(tl.int64) * table_stride
    begin = tl.min(first, 0) // KEYS * KEYS
    end = tl.max(last, 0) + 1
    total = tl.full([ROWS, V_BLOCK], 0.0, dtype=tl.float32)
    peak = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    weight = tl.full([ROWS], 0.0, dtype=tl.float32)
    for split in range(begin // SPLIT * SPLIT, end, SPLIT):
        part, part_peak, part_weight = _attend(
            q_main.to(DOT),
            q_rest.to(DOT),
            first,
            last,
            tl.maximum(begin, split),
            tl.minimum(end, split + SPLIT),
            slots,
            key + kv_head * key_head_stride,
            value + kv_head * value_head_stride,
            key_scales + kv_head,
            value_scales + kv_head,
            key_slot_stride,
            value_slot_stride,
            scale_slot_stride,
            scale,
            SOFTCAP,
            LATENT,
            SLOT_SCALES,
            MAIN,
            REST,
            V_DIM,
            MAIN_BLOCK,
            REST_BLOCK,
            V_BLOCK,
            ROWS,
            KEYS,
            DOT,
        )
        peak, keep, gain = _rescale(peak, part_peak)
        total = total * keep[:, None] + part * gain[:, None]
        weight = weight * keep + part_weight * gain
    total = total / tl.where(weight == 0.0, 1.0, weight)[:, None] * v_scale
    v_dim = tl.arange(0, V_BLOCK)
    tl.store(
        out + (token * out_token_stride + head * out_head_stride)[:, None] + v_dim[None, :],
        total.to(out.dtype.element_ty),
        mask=valid[:, None] & (v_dim < V_DIM)[None, :],
    )


@triton.jit
def split_kernel(
    query,
    key,
    value,
    key_scales,
    value_scales,
    totals,
    peaks,
    slot_table,
    sequences,
    tiles,
    query_token_stride,
    query_head_stride,
    key_slot_stride,
    key_head_stride,
    value_slot_stride,
    value_head_stride,
    scale_slot_stride,
    table_stride,
    scale,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    LATENT: tl.constexpr,
    SLOT_SCALES: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    V_DIM: tl.constexpr,
    MAIN_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    DOT: tl.constexpr,
):
    """Program (tile, key head, split): one split of a tile, to `totals` [partials, V_DIM], `peaks` [partials, 2].

    A partial's peak stands beside its weight. A sequence's partials are in order of token, head, split.
    """
    sequence, row_token, token, head, valid, first, last = _tile_rows(
        tiles, sequences, CAUSAL, WINDOW, GROUP, ROWS
    )
    split = tl.program_id(2)
    begin = tl.maximum(tl.min(first, 0) // KEYS * KEYS, split * SPLIT)
    end = tl.minimum(tl.max(last, 0) + 1, (split + 1) * SPLIT)
    if begin >= end:
        return
    kv_head = tl.program_id(1)
    head = kv_head * GROUP + head
    q_main, q_rest = _load_query(
        query + token * query_token_stride + head * query_head_stride,
        MAIN,
        REST,
        MAIN_BLOCK,
        REST_BLOCK,
        valid,
    )
    total, peak, weight = _attend(
        q_main.to(DOT),
        q_rest.to(DOT),
        first,
        last,
        begin,
        end,
        slot_table + tl.load(sequence + 3).to(tl.int64) * table_stride,
        key + kv_head * key_head_stride,
        value + kv_head * value_head_stride,
        key_scales + kv_head,
        value_scales + kv_head,
        key_slot_stride,
        value_slot_stride,
        scale_slot_stride,
        scale,
        SOFTCAP,
        LATENT,
        SLOT_SCALES,
        MAIN,
        REST,
        V_DIM,
        MAIN_BLOCK,
        REST_BLOCK,
        V_BLOCK,
        ROWS,
        KEYS,
        DOT,
    )
    num_splits = (tl.load(sequence + 2) + SPLIT - 1) // SPLIT
    partial = tl.load(sequence + 4).to(tl.int64) + (row_token * NUM_HEADS + head) * num_splits + split
    tl.store(peaks + partial * 2, peak, mask=valid)
    tl.store(peaks + partial * 2 + 1, weight, mask=valid)
    v_dim = tl.arange(0, V_BLOCK)
    tl.store(
        totals + partial[:, None] * V_DIM + v_dim[None, :],
        total,
        mask=valid[:, None] & (v_dim < V_DIM)[None, :],
    )


@triton.jit
def merge_kernel(
    totals,
    peaks,
    out,
    sequences,
    tokens,
    out_token_stride,
    out_head_stride,
    v_scale,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    V_DIM: tl.constexpr,
    V_BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Program (token of `tokens`, head): the splits that it sees, folded in order, to `out`."""
    token = tl.load(tokens + tl.program_id(0) * 2)
    sequence = sequences + tl.load(tokens + tl.program_id(0) * 2 + 1) * 5
    head = tl.program_id(1)
    row_token = token - tl.load(sequence)
    context_len = tl.load(sequence + 2)
    position = context_len - tl.load(sequence + 1) + row_token
    first = 0
    if WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
    last = context_len - 1
    if CAUSAL:
        last = position
    num_splits = (context_len + SPLIT - 1) // SPLIT
    partial = tl.load(sequence + 4).to(tl.int64) + (row_token * NUM_HEADS + head) * num_splits
    v_dim = tl.arange(0, V_BLOCK)
    total = tl.full([V_BLOCK], 0.0, dtype=tl.float32)
    peak = float("-inf")
    weight = 0.0
    for split in range(first // SPLIT, last // SPLIT + 1):
        part = tl.load(totals + (partial + split) * V_DIM + v_dim, mask=v_dim < V_DIM, other=0.0)
        part_weight = tl.load(peaks + (partial + split) * 2 + 1)
        peak, keep, gain = _rescale(peak, tl.load(peaks + (partial + split) * 2))
        total = total * keep + part * gain
        weight = weight * keep + part_weight * gain
    total = total / weight * v_scale
    place = out + token.to(tl.int64) * out_token_stride + head * out_head_stride + v_dim
    tl.store(place, total.to(out.dtype.element_ty), mask=v_dim < V_DIM)
