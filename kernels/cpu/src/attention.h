// Paged attention of the queries that share a KV head, by online softmax over blocks of positions.
//
// Blocks and splits lie at fixed absolute positions, and a query only ever sees its own blocks, in order: its
// result does not depend on the queries beside it, on how splits are shared out, or on where the slots lie.
#pragma once

#include "rows.h"

namespace TANDEM_ISA {

static void merge(Softmax& into, float* acc, const Softmax& other, const float* other_acc, int head_dim) {
    if (other.sum == 0.0f) return;
    const float maximum = into.maximum > other.maximum ? into.maximum : other.maximum;
    alignas(64) float weights[16];
    store(weights, exp(splat(into.maximum - maximum)));
    const f32 mine = splat(into.sum == 0.0f ? 0.0f : weights[0]);
    store(weights, exp(splat(other.maximum - maximum)));
    const f32 theirs = splat(weights[0]);
    alignas(64) float sums[16];
    store(sums, fma(splat(into.sum), mine, mul(splat(other.sum), theirs)));
    for (int i = 0; i < head_dim; i += 16)
        store(acc + i, fma(load(acc + i), mine, mul(load(other_acc + i), theirs)));
    into = {maximum, sums[0]};
}

static void finish(const Softmax& state, const float* acc, int head_dim, float* out) {
    const f32 inverse = splat(1.0f / state.sum);
    for (int i = 0; i < head_dim; i += 16) store(out + i, mul(load(acc + i), inverse));
}

// keys [head_dim][32]: one column a position.
static void gather_keys(const char* const* rows, int head_dim, bool is_bf16, float* keys) {
    for (int half = 0; half < kKvBlock; half += 16) {
        i32 lines[4];
        for (int d = 0; d < head_dim; d += is_bf16 ? 8 : 4) {
            transpose4(rows + half, (size_t)d * (is_bf16 ? 2 : 4), lines);
            for (int j = 0; j < 4; j++) {
                if (is_bf16) {
                    float* to = keys + (size_t)(d + 2 * j) * kKvBlock + half;
                    store(to, bits_to_float(shift_left<16>(lines[j])));
                    store(to + kKvBlock, bits_to_float(and_i(lines[j], splat_i((int32_t)0xffff0000))));
                } else {
                    store(keys + (size_t)(d + j) * kKvBlock + half, bits_to_float(lines[j]));
                }
            }
        }
    }
}

template <int kQueries>
static void score(const float* const* query, const float* keys, int head_dim, float scale, float* scores) {
    f32 s[kQueries][2];
    for (int q = 0; q < kQueries; q++) s[q][0] = s[q][1] = splat(0.0f);
    for (int d = 0; d < head_dim; d++) {
        f32 a = load(keys + (size_t)d * kKvBlock), b = load(keys + (size_t)d * kKvBlock + 16);
        for (int q = 0; q < kQueries; q++) {
            f32 x = splat(query[q][d]);
            s[q][0] = fma(a, x, s[q][0]);
            s[q][1] = fma(b, x, s[q][1]);
        }
    }
    for (int q = 0; q < kQueries; q++)
        for (int h = 0; h < 2; h++) store(scores + kKvBlock * q + 16 * h, mul(s[q][h], splat(scale)));
}

// acc [kQueries][head_dim] = acc * correction + probabilities [kQueries][32] times values, over kVectors * 16 columns
template <int kQueries, int kVectors>
static void weigh(const float* probabilities, const float* correction, const float* const* values, int positions,
                  float* acc, int head_dim) {
    f32 a[kQueries][kVectors];
    for (int q = 0; q < kQueries; q++)
        for (int v = 0; v < kVectors; v++)
            a[q][v] = mul(load(acc + (size_t)q * head_dim + 16 * v), splat(correction[q]));
    for (int p = 0; p < positions; p++) {
        f32 row[kVectors];
        for (int v = 0; v < kVectors; v++) row[v] = load(values[p] + 16 * v);
        for (int q = 0; q < kQueries; q++) {
            f32 weight = splat(probabilities[kKvBlock * q + p]);
            for (int v = 0; v < kVectors; v++) a[q][v] = fma(row[v], weight, a[q][v]);
        }
    }
    for (int q = 0; q < kQueries; q++)
        for (int v = 0; v < kVectors; v++) store(acc + (size_t)q * head_dim + 16 * v, a[q][v]);
}

template <int kQueries>
static void weigh_all(const float* probabilities, const float* correction, const float* const* values, int positions,
                      float* acc, int head_dim) {
    const float* at[kKvBlock];
    int i = 0;
    auto columns = [&](auto step, int vectors) {
        for (; i + 16 * vectors <= head_dim; i += 16 * vectors) {
            for (int p = 0; p < positions; p++) at[p] = values[p] + i;
            step(acc + i);
        }
    };
    columns([&](float* to) { weigh<kQueries, 4>(probabilities, correction, at, positions, to, head_dim); }, 4);
    columns([&](float* to) { weigh<kQueries, 1>(probabilities, correction, at, positions, to, head_dim); }, 1);
}

// Calls step.template operator()<n>(first) over `count` queries, in runs of kMost and then fewer.
template <int kMost, class Step>
static inline void by_runs(int count, Step step) {
    int first = 0;
    for (; first + kMost <= count; first += kMost) step.template operator()<kMost>(first);
    if constexpr (kMost > 1) {
        if (first < count)
            by_runs<kMost / 2>(count - first, [&]<int n>(int i) { step.template operator()<n>(first + i); });
    }
}

// Queries [begin, end) of the item over the block of positions at `base`.
static void attend_block(const AttentionItem& item, int base, int begin, int end, Softmax* state, float* acc,
                         float* scratch) {
    const int count = end - begin;
    float* keys = scratch;                                   // [head_dim][32]
    float* values = keys + (size_t)item.head_dim * kKvBlock;  // [32][head_dim], where the pool is bf16
    float* scores = values + (size_t)item.head_dim * kKvBlock;  // [count][32]
    const int positions = item.context - base < kKvBlock ? item.context - base : kKvBlock;
    const char* key_rows[kKvBlock];
    const float* value_rows[kKvBlock];
    for (int p = 0; p < kKvBlock; p++) {
        const size_t slot = (size_t)item.slots[base + (p < positions ? p : positions - 1)];
        key_rows[p] = item.key + slot * item.slot_stride;
        const char* value = item.value + slot * item.slot_stride;
        value_rows[p] = (const float*)value;
        if (item.is_bf16 && p < positions) {
            float* row = values + (size_t)p * item.head_dim;
            for (int i = 0; i < item.head_dim; i += 16) store(row + i, load_bf16(value + 2 * i));
            value_rows[p] = row;
        }
    }
    gather_keys(key_rows, item.head_dim, item.is_bf16, keys);

    by_runs<kRegisterRows>(count, [&]<int n>(int i) {
        score<n>(item.query + begin + i, keys, item.head_dim, item.scale, scores + kKvBlock * i);
    });

    float correction[kQueryBlock];
    for (int i = 0; i < count; i++) {
        const int q = begin + i, first = item.first[q] - base, last = item.last[q] - base;
        float* s = scores + kKvBlock * i;
        for (int p = 0; p < first; p++) s[p] = -INFINITY;
        for (int p = last > 0 ? last : 0; p < kKvBlock; p++) s[p] = -INFINITY;
        f32 a = load(s), b = load(s + 16);
        const float before = state[q].maximum, block = largest(max(a, b));
        const float maximum = before > block ? before : block;
        a = exp(sub(a, splat(maximum)));
        b = exp(sub(b, splat(maximum)));
        store(s, a), store(s + 16, b);
        alignas(64) float lanes[16];
        store(lanes, exp(splat(before - maximum)));
        correction[i] = state[q].sum == 0.0f ? 0.0f : lanes[0];
        state[q] = {maximum, __builtin_fmaf(state[q].sum, correction[i], sum(add(a, b)))};
    }
    const int most = kRegisterRows >= 4 ? 4 : kRegisterRows;
    by_runs<most>(count, [&]<int n>(int i) {
        weigh_all<n>(scores + kKvBlock * i, correction + i, value_rows, positions,
                     acc + (size_t)(begin + i) * item.head_dim, item.head_dim);
    });
}

static void attend(const AttentionItem& item, int first_split, int last_split, Softmax* state, float* acc,
                   void* scratch) {
    float* partial = (float*)scratch;  // [kQueryBlock][head_dim]
    float* rest = partial + (size_t)kQueryBlock * item.head_dim;
    for (int split = first_split; split < last_split; split++) {
        Softmax part[kQueryBlock];
        for (int q = 0; q < item.count; q++) part[q] = {-INFINITY, 0.0f};
        std::memset(partial, 0, sizeof(float) * item.count * item.head_dim);
        const int end = (split + 1) * kKvSplit < item.context ? (split + 1) * kKvSplit : item.context;
        for (int base = split * kKvSplit; base < end; base += kKvBlock) {
            int q = 0, active = item.count;  // queries go by position: those that see this block are neighbours
            while (q < active && item.last[q] <= base) q++;
            while (q < active && item.first[active - 1] >= base + kKvBlock) active--;
            if (q < active) attend_block(item, base, q, active, part, partial, rest);
        }
        for (int q = 0; q < item.count; q++)
            merge(state[q], acc + (size_t)q * item.head_dim, part[q], partial + (size_t)q * item.head_dim,
                  item.head_dim);
    }
}

}  // namespace TANDEM_ISA
