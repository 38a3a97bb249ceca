// What happens to one row between the matrix products: norm, quantisation, rotary embedding, activation.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace TANDEM_ISA {

static inline void quantise_group(const float* x, Record& record, int row) {
    f32 a = load(x), b = load(x + 16);
    float amax = largest(max(abs(a), abs(b)));
    f32 inverse = splat(amax > 0.0f ? 127.0f / amax : 0.0f);
    int32_t half, other_half;
    store_i8(record.values[row], to_int(mul(a, inverse)), to_int(mul(b, inverse)), half, other_half);
    record.scale[row] = amax / 127.0f;
    record.scaled_sum[row] = record.scale[row] * (float)(half + other_half);
    record.sum[row] = -(half + other_half);
    record.half_sum[0][row] = -half;
    record.half_sum[1][row] = -other_half;
}

// A row's x [32 * groups] to row `row` of as many records.
static void quantise(const float* x, int groups, Record* records, int row) {
    for (int g = 0; g < groups; g++) quantise_group(x + g * kGroup, records[g], row);
}

// The lanes beyond n of the last vector of a row, as zeros.
static inline f32 load_tail(const float* p, int count) {
    alignas(64) float lanes[16] = {};
    std::memcpy(lanes, p, sizeof(float) * count);
    return load(lanes);
}
static inline void store_tail(float* p, f32 a, int count) {
    alignas(64) float lanes[16];
    store(lanes, a);
    std::memcpy(p, lanes, sizeof(float) * count);
}

template <class Step>
static inline void for_vectors(int n, Step step) {  // step(offset, lanes)
    int i = 0;
    for (; i + 16 <= n; i += 16) step(i, 16);
    if (i < n) step(i, n - i);
}
static inline f32 load_some(const float* p, int count) { return count == 16 ? load(p) : load_tail(p, count); }
static inline void store_some(float* p, f32 a, int count) {
    if (count == 16)
        store(p, a);
    else
        store_tail(p, a, count);
}

static void rms_norm(const float* x, const float* weight, float eps, int n, float* out) {
    f32 squares = splat(0.0f);
    for_vectors(n, [&](int i, int count) {
        f32 v = load_some(x + i, count);
        squares = fma(v, v, squares);
    });
    f32 scale = splat(1.0f / __builtin_sqrtf(sum(squares) / (float)n + eps));
    for_vectors(n, [&](int i, int count) {
        store_some(out + i, mul(mul(load_some(x + i, count), scale), load_some(weight + i, count)), count);
    });
}

// Element i is paired with i + head_dim / 2 (Hugging Face's layout); cos and sin [head_dim / 2].
static void rotate(float* x, const float* cos, const float* sin, int head_dim) {
    const int half = head_dim / 2;
    for_vectors(half, [&](int i, int count) {
        f32 a = load_some(x + i, count), b = load_some(x + half + i, count);
        f32 c = load_some(cos + i, count), s = load_some(sin + i, count);
        store_some(x + i, fma(a, c, sub(splat(0.0f), mul(b, s))), count);
        store_some(x + half + i, fma(b, c, mul(a, s)), count);
    });
}

static inline f32 sigmoid(f32 x) {  // exp() takes arguments under 88
    return div(splat(1.0f), add(splat(1.0f), exp(sub(splat(0.0f), max(x, splat(-87.0f))))));
}

static void gate(const float* g, const float* up, int rows, int32_t activation, float* out, size_t stride) {
    for (int r = 0; r < rows; r++, g += 16, up += 16, out += stride) {
        f32 x = load(g), argument = x;
        if (activation == 1) {  // GELU by tanh: 0.5 x (1 + tanh u) = x sigmoid(2u)
            f32 inner = fma(mul(mul(x, x), x), splat(0.044715f), x);
            argument = mul(inner, splat(1.5957691216057308f));
        }
        store(out, mul(mul(x, sigmoid(argument)), load(up)));
    }
}

static void add_row(float* x, const float* y, int n) {
    for_vectors(n, [&](int i, int count) {
        store_some(x + i, add(load_some(x + i, count), load_some(y + i, count)), count);
    });
}

static void observe(const float* tile, int rows, int lanes, int column, bool wants_total, Best* best) {
    const f32 least = splat(-3e38f);  // of what a head gives; what is no number stays that
    for (int r = 0; r < rows; r++, tile += 16, best++) {
        f32 row = load(tile);
        if (lanes < 16) {
            alignas(64) float there[16];
            for (int i = 0; i < 16; i++) there[i] = i < lanes ? tile[i] : -INFINITY;
            row = load(there);
        }
        row = max(least, row);
        store(best->poison, fma(row, splat(0.0f), load(best->poison)));
        const float highest = largest(row);
        if (highest > best->value) {
            if (wants_total) {
                alignas(64) float before[16] = {best->value - highest};
                store(before, exp(load(before)));
                best->total *= before[0];
            }
            best->value = highest;
            int first = 0;
            while (first < lanes - 1 && tile[first] != highest) first++;
            best->column = column + first;
        }
        if (wants_total) best->total += sum(exp(sub(row, splat(best->value))));
    }
}

static void add_tile(const float* tile, int rows, int lanes, float* to, size_t stride) {
    for (int r = 0; r < rows; r++, tile += 16, to += stride)
        store_some(to, add(load_some(to, lanes), load(tile)), lanes);
}

}  // namespace TANDEM_ISA
