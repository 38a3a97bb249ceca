// Rows of linear attention with a decaying state, one after another (kernels/linear_attention.py says which), and the
// short convolution before it.
#pragma once

#include "rows.h"

namespace TANDEM_ISA {

// Calls step.template operator()<odd>(d) for each dimension of a key, even and odd ones in turn: sums of theirs are apart,
// two chains of operations that hide each other's latency.
template <class Step>
static inline void by_pairs(int key_dim, Step step) {
    int d = 0;
    for (; d + 2 <= key_dim; d += 2) step.template operator()<0>(d), step.template operator()<1>(d + 1);
    if (d < key_dim) step.template operator()<0>(d);
}

template <int kVectors>
static void recur_vectors(const StateRow* rows, int count, int key_dim, int lanes, bool delta_rule, float* state) {
    for (int r = 0; r < count; r++) {
        const StateRow& row = rows[r];
        const f32 decay = exp(splat(row.log_decay));
        f32 update[kVectors], sums[2][kVectors];
        for (int v = 0; v < kVectors; v++) {
            const int left = lanes - 16 * v;
            update[v] = load_some(row.value + 16 * v, left < 16 ? left : 16);
            sums[0][v] = sums[1][v] = splat(0.0f);
        }
        if (delta_rule) {
            by_pairs(key_dim, [&]<int odd>(int d) {
                const f32 key = splat(row.key[d]);
                const float* from = state + (size_t)d * kStateColumns;
                for (int v = 0; v < kVectors; v++) sums[odd][v] = fma(load(from + 16 * v), key, sums[odd][v]);
            });
            for (int v = 0; v < kVectors; v++) {
                const f32 known = mul(add(sums[0][v], sums[1][v]), decay);
                update[v] = mul(sub(update[v], known), splat(row.beta));
                sums[0][v] = sums[1][v] = splat(0.0f);
            }
        }
        by_pairs(key_dim, [&]<int odd>(int d) {
            const f32 key = splat(row.key[d]), query = splat(row.query == nullptr ? 0.0f : row.query[d]);
            float* at = state + (size_t)d * kStateColumns;
            for (int v = 0; v < kVectors; v++) {
                const f32 next = fma(key, update[v], mul(load(at + 16 * v), decay));
                store(at + 16 * v, next);
                sums[odd][v] = fma(next, query, sums[odd][v]);
            }
        });
        if (row.query == nullptr) continue;
        for (int v = 0; v < kVectors; v++) {
            const int left = lanes - 16 * v;
            store_some(row.out + 16 * v, add(sums[0][v], sums[1][v]), left < 16 ? left : 16);
        }
    }
}

static void recur(const StateRow* rows, int count, int key_dim, int lanes, bool delta_rule, float* state) {
    static_assert(kStateColumns == 64, "as many vectors as there are cases here");
    if (lanes > 48)
        recur_vectors<4>(rows, count, key_dim, lanes, delta_rule, state);
    else if (lanes > 32)
        recur_vectors<3>(rows, count, key_dim, lanes, delta_rule, state);
    else if (lanes > 16)
        recur_vectors<2>(rows, count, key_dim, lanes, delta_rule, state);
    else
        recur_vectors<1>(rows, count, key_dim, lanes, delta_rule, state);
}

static void convolve(const float* const* taps, const float* weight, const float* bias, int count, int channels, float* out) {
    for_vectors(channels, [&](int i, int lanes) {
        f32 sum = bias == nullptr ? splat(0.0f) : load_some(bias + i, lanes);
        for (int tap = 0; tap < count; tap++)
            sum = fma(load_some(taps[tap] + i, lanes), load_some(weight + (size_t)tap * channels + i, lanes), sum);
        store_some(out + i, sum, lanes);
    });
}

}  // namespace TANDEM_ISA
