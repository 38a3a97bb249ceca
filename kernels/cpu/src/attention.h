// Paged attention of the queries that share a KV head, by online softmax over blocks of positions.
//
// Blocks and splits lie at fixed absolute positions, and a query only ever sees its own blocks, in order: its
// result does not depend on the queries beside it, on how splits are shared out, or on where the slots lie.
#pragma once

#include "attention_pairs.h"
#include "attention_tiles.h"
#include "kv.h"
#include "softmax.h"

namespace TANDEM_ISA {

// keys [head_dim][32]: one column a position.
template <KvDtype kDtype>
static void gather_keys(const char* const* rows, int head_dim, float* keys) {
    constexpr int kBytes = kv_bytes(kDtype), kNumbers = 4 / kBytes;  // of a dword
    for (int half = 0; half < kKvBlock; half += 16) {
        i32 dwords[4];
        for (int d = 0; d < head_dim; d += 4 * kNumbers) {
            transpose4(rows + half, (size_t)d * kBytes, dwords);
            float* to = keys + (size_t)d * kKvBlock + half;
            for (int j = 0; j < 4; j++, to += kNumbers * kKvBlock) {
                store(to, of_dword<kDtype, 0>(dwords[j]));
                if constexpr (kNumbers > 1) store(to + kKvBlock, of_dword<kDtype, 1>(dwords[j]));
                if constexpr (kNumbers > 2) {
                    store(to + 2 * kKvBlock, of_dword<kDtype, 2>(dwords[j]));
                    store(to + 3 * kKvBlock, of_dword<kDtype, 3>(dwords[j]));
                }
            }
        }
    }
}

// Even and odd dimensions are summed apart: two chains of operations hide each other's latency.
template <int kQueries>
static void score(const float* const* query, const float* keys, int head_dim, float* scores) {
    f32 s[kQueries][2][2];
    for (int q = 0; q < kQueries; q++)
        for (int i = 0; i < 4; i++) s[q][i / 2][i % 2] = splat(0.0f);
    for (int d = 0; d < head_dim; d += 2) {
        for (int odd = 0; odd < 2; odd++) {
            f32 a = load(keys + (size_t)(d + odd) * kKvBlock), b = load(keys + (size_t)(d + odd) * kKvBlock + 16);
            for (int q = 0; q < kQueries; q++) {
                f32 x = splat(query[q][d + odd]);
                s[q][odd][0] = fma(a, x, s[q][odd][0]);
                s[q][odd][1] = fma(b, x, s[q][odd][1]);
            }
        }
    }
    for (int q = 0; q < kQueries; q++)
        for (int h = 0; h < 2; h++)
            store(scores + kKvBlock * q + 16 * h, add(s[q][0][h], s[q][1][h]));
}

// rows [kQueries] = rows * correction + probabilities [kQueries][32] times values, over kVectors * 16 columns at `at`.
template <int kQueries, int kVectors>
static void weigh(const float* probabilities, const float* correction, const float* const* values, int positions,
                  float* rows, int head_dim, int at) {
    f32 a[kQueries][kVectors];
    float* to = rows + at;
    const size_t stride = attention_row(head_dim);
    for (int q = 0; q < kQueries; q++)
        for (int v = 0; v < kVectors; v++) a[q][v] = mul(load(to + q * stride + 16 * v), splat(correction[q]));
    for (int p = 0; p < positions; p++) {
        f32 row[kVectors];
        for (int v = 0; v < kVectors; v++) row[v] = load(values[p] + at + 16 * v);
        for (int q = 0; q < kQueries; q++) {
            f32 weight = splat(probabilities[kKvBlock * q + p]);
            for (int v = 0; v < kVectors; v++) a[q][v] = fma(row[v], weight, a[q][v]);
        }
    }
    for (int q = 0; q < kQueries; q++)
        for (int v = 0; v < kVectors; v++) store(to + q * stride + 16 * v, a[q][v]);
}

// Masks scores [count][32] of queries [begin, begin + count) over the block at `base`, multiplies them by scales [32],
// and turns them into probabilities beside the maxima so far. What was summed before is to be multiplied by
// correction [count].
static void soften(const AttentionItem& item, int base, int begin, int count, const float* scales, float* maxima,
                   float* scores, float* rows, float* correction) {
    alignas(64) float larger[kQueryBlock];
    const f32 scale = load(scales), other_scale = load(scales + 16);
    for (int i = 0; i < count; i++) {
        const int first = item.first[begin + i] - base, last = item.last[begin + i] - base;
        float* s = scores + kKvBlock * i;
        store(s, mul(load(s), scale)), store(s + 16, mul(load(s + 16), other_scale));
        for (int p = 0; p < first; p++) s[p] = -INFINITY;
        for (int p = last; p < kKvBlock; p++) s[p] = -INFINITY;
        const float before = maxima[begin + i], block = largest(max(load(s), load(s + 16)));
        larger[i] = before > block ? before : block;
        correction[i] = before - larger[i];
        maxima[begin + i] = larger[i];
    }
    for (int i = 0; i < count; i += 16) store(correction + i, exp(load(correction + i)));
    for (int i = 0; i < count; i++) {
        float* s = scores + kKvBlock * i;
        float* sums = rows + (size_t)i * attention_row(item.head_dim) + item.head_dim;
        const f32 a = exp(sub(load(s), splat(larger[i]))), b = exp(sub(load(s + 16), splat(larger[i])));
        store(s, a), store(s + 16, b);
        store(sums, fma(load(sums), splat(correction[i]), add(a, b)));
    }
}

// Queries [begin, end) of the item over the block of positions at `base`.
template <KvDtype kDtype>
static void attend_block(const AttentionItem& item, int base, int begin, int end, float* maxima, float* rows,
                         float* scratch) {
    const int count = end - begin;
    float* scores = scratch;  // [queries][32]
    float* rest = scores + kQueryBlock * kKvBlock;
    rows += (size_t)begin * attention_row(item.head_dim);
    const int positions = item.context - base < kKvBlock ? item.context - base : kKvBlock;
    const char *key_rows[kKvBlock], *value_rows[kKvBlock];
    alignas(64) float score_scales[kKvBlock], value_scales[kKvBlock];
    for (int p = 0; p < kKvBlock; p++) {
        const size_t slot = (size_t)item.slots[base + (p < positions ? p : positions - 1)], at = slot * item.slot_stride;
        key_rows[p] = item.key + at, value_rows[p] = item.value + at;
        score_scales[p] = item.scale;
        if constexpr (has_scales(kDtype)) {
            score_scales[p] *= item.key_scale[slot * item.scale_stride];
            value_scales[p] = item.value_scale[slot * item.scale_stride];
        }
    }
    alignas(64) float correction[kQueryBlock] = {};
    float* keys = rest;                                       // [head_dim][32]
    float* values = keys + (size_t)item.head_dim * kKvBlock;  // [32][head_dim], where the pool has not the like
    if constexpr (kDtype != kKvFloat32) {
        for (int p = 0; p < positions; p++) {
            float* row = values + (size_t)p * item.head_dim;
            for (int i = 0; i < item.head_dim; i += 16) store(row + i, load_kv<kDtype>(value_rows[p], i));
            value_rows[p] = (const char*)row;
        }
    }
    gather_keys<kDtype>(key_rows, item.head_dim, keys);
    by_runs<kRegisterQueries>(count, [&]<int n>(int i) {
        score<n>(item.query + begin + i, keys, item.head_dim, scores + kKvBlock * i);
    });
    soften(item, base, begin, count, score_scales, maxima, scores, rows, correction);
    if constexpr (has_scales(kDtype)) {  // the scales of values go to what weighs them
        for (int i = 0; i < count * kKvBlock; i += 16)
            store(scores + i, mul(load(scores + i), load(value_scales + i % kKvBlock)));
    }
    by_runs<kRegisterQueries>(count, [&]<int n>(int i) {
        float* to = rows + (size_t)i * attention_row(item.head_dim);
        const float* s = scores + kKvBlock * i;
        int at = 0;
        for (; at + 64 <= item.head_dim; at += 64)
            weigh<n, 4>(s, correction + i, (const float* const*)value_rows, positions, to, item.head_dim, at);
        for (; at < item.head_dim; at += 16)
            weigh<n, 1>(s, correction + i, (const float* const*)value_rows, positions, to, item.head_dim, at);
    });
}

// The same, over the blocks of the split at `base` one after another: maxima and rows go on from what they hold.
template <KvDtype kDtype>
static void attend_blocks(const AttentionItem& item, int base, int end, float* maxima, float* rows, float* scratch) {
    for (; base < end; base += kKvBlock) {
        int first = 0, last = item.count;
        narrow(item, base, base + kKvBlock, first, last);
        if (first < last) attend_block<kDtype>(item, base, first, last, maxima, rows, scratch);
    }
}

template <KvDtype kDtype>
static void attend_over(const AttentionItem& item, int first_split, int last_split, float* maxima, float* rows,
                        float* scratch) {
#if defined(__AVX512BF16__)
    if constexpr (kDtype != kKvFloat32) return attend_bf16<kDtype>(item, first_split, last_split, maxima, rows, scratch);
#endif
    const size_t stride = attention_row(item.head_dim);
    float* partial = scratch;
    float* rest = partial + kQueryBlock * stride;
    for (int split = first_split; split < last_split; split++) {
        const int base = split * kKvSplit, end = base + kKvSplit < item.context ? base + kKvSplit : item.context;
        float part[kQueryBlock];
        for (int q = 0; q < item.count; q++) part[q] = -INFINITY;
        std::memset(partial, 0, sizeof(float) * item.count * stride);
        attend_blocks<kDtype>(item, base, end, part, partial, rest);
        merge(item.count, maxima, rows, part, partial, item.head_dim);
    }
}

static void attend(const AttentionItem& item, int first_split, int last_split, float* maxima, float* rows,
                   float* scratch) {
    switch (item.dtype) {
        case kKvFloat32: return attend_over<kKvFloat32>(item, first_split, last_split, maxima, rows, scratch);
        case kKvBfloat16: return attend_over<kKvBfloat16>(item, first_split, last_split, maxima, rows, scratch);
        case kKvFp8: return attend_over<kKvFp8>(item, first_split, last_split, maxima, rows, scratch);
        case kKvInt8: return attend_over<kKvInt8>(item, first_split, last_split, maxima, rows, scratch);
    }
}

}  // namespace TANDEM_ISA
