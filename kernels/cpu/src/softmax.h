// Running softmaxes of queries, as kernels.h has them, and which queries go together.
#pragma once

#include "rows.h"

namespace TANDEM_ISA {

// What two softmaxes beside one another are multiplied by, for up to 16 queries.
struct Factors {
    alignas(64) float mine[16], theirs[16];
};

// maxima [count] become the larger ones. A maximum of -infinity has nothing behind it.
static Factors merge_maxima(int count, float* maxima, const float* other_maxima) {
    const f32 a = load_some(maxima, count), b = load_some(other_maxima, count), larger = max(a, b);
    const f32 least = splat(-3e38f), shift = select_less(larger, least, splat(0.0f), larger);
    Factors factors;
    store(factors.mine, select_less(b, least, splat(1.0f), exp(sub(a, shift))));
    store(factors.theirs, exp(sub(b, shift)));
    store_some(maxima, larger, count);
    return factors;
}

// Takes the running softmax `other` of `count` queries into theirs; rows are as in kernels.h.
static void merge(int count, float* maxima, float* rows, const float* other_maxima, const float* other_rows,
                  int head_dim) {
    const int row = attention_row(head_dim);
    for (int first = 0; first < count; first += 16) {
        const int lanes = count - first < 16 ? count - first : 16;
        const Factors factors = merge_maxima(lanes, maxima + first, other_maxima + first);
        for (int q = first; q < first + lanes; q++) {
            const f32 mine = splat(factors.mine[q - first]), theirs = splat(factors.theirs[q - first]);
            float* to = rows + (size_t)q * row;
            const float* other = other_rows + (size_t)q * row;
            for (int i = 0; i < row; i += 16) store(to + i, fma(load(to + i), mine, mul(load(other + i), theirs)));
        }
    }
}

static void finish(const float* row, int head_dim, float* out) {
    const f32 inverse = splat(1.0f / sum(load(row + head_dim)));
    for (int i = 0; i < head_dim; i += 16) store(out + i, mul(load(row + i), inverse));
}

// The queries [first, last) that see any of the positions [base, end): queries go by position.
static inline void narrow(const AttentionItem& item, int base, int end, int& first, int& last) {
    while (first < last && item.last[first] <= base) first++;
    while (first < last && item.first[last - 1] >= end) last--;
}

// Calls step.template operator()<n>(first) over `count` queries, n at a time, n at most kMost.
template <int kMost, class Step>
static inline void by_runs(int count, Step step, int first = 0) {
    for (; count >= kMost; first += kMost, count -= kMost) step.template operator()<kMost>(first);
    if constexpr (kMost > 1) {
        if (count > 0) by_runs<kMost - 1>(count, step, first);
    }
}

}  // namespace TANDEM_ISA
