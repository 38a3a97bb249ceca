// Attention over caches of bfloat16, and of bytes, which bfloat16 holds exactly, by vector products of pairs: a split of
// 128 positions at a time.
//
// A product of two vectors of pairs takes two bfloat16 of each lane at once: of neighbouring dimensions where scores are
// made, whose lanes are positions, and of neighbouring positions where values are weighed, whose lanes are dimensions.
// Queries and probabilities are rounded to bfloat16, sums are float32. What a query gets does not depend on other
// queries: positions that only those see add nothing to it.
#pragma once

#include "attention_bf16.h"

namespace TANDEM_ISA {

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

// Parts of an item's scratch memory. `pairs` are two bfloat16 in a dword.
struct PairMemory {
    float* partial;      // softmax of a run of queries over one split, as in kernels.h
    float* scores;       // of that run [queries][128]
    uint32_t* weights;   // its probabilities, pairs of positions [queries][64]
    uint32_t* queries;   // all of the item, pairs of dimensions [queries][padded dim / 2]
    uint16_t* copies;    // keys of 16 positions that are held in bytes [16][padded dim]
    uint32_t* keys;      // pairs of dimensions [128 / 16][padded dim / 2][16]
    uint32_t* values;    // pairs of positions [64][padded dim]
};

static inline PairMemory pair_memory(float* scratch, int head_dim) {
    const int padded = padded_dim(head_dim);
    PairMemory memory;
    auto take = [&](int words) { return scratch += words, scratch - words; };
    memory.keys = (uint32_t*)take(kKvSplit / 2 * padded);
    memory.values = (uint32_t*)take(kKvSplit / 2 * padded);
    memory.scores = take(kRegisterQueries * kKvSplit);
    memory.weights = (uint32_t*)take(kRegisterQueries * kKvSplit / 2);
    memory.queries = (uint32_t*)take(kQueryBlock * padded / 2);
    memory.copies = (uint16_t*)take(kLanes * padded / 2);
    memory.partial = take(kRegisterQueries * attention_row(head_dim));
    return memory;
}

static inline f32 add_pairs(f32 sums, i32 a, i32 b) { return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b); }

static void round_queries(const AttentionItem& item, uint32_t* queries) {
    const int padded = padded_dim(item.head_dim);
    for (int q = 0; q < item.count; q++, queries += padded / 2)
        for (int d = 0; d < padded; d += 16) {
            const f32 part = d < item.head_dim ? load(item.query[q] + d) : splat(0.0f);
            _mm256_storeu_si256((__m256i*)(queries + d / 2), (__m256i)_mm512_cvtneps_pbh(part));
        }
}

// What will be read 16 positions later: entries of a head lie too far apart for the processor to see that they follow.
static inline void fetch_ahead(const AttentionItem& item, const char* entries, int position) {
    if (position + kLanes >= item.context) return;
    const char* entry = entries + (size_t)item.slots[position + kLanes] * item.slot_stride;
    const int bytes = item.head_dim * kv_bytes(item.dtype);
    for (int line = 0; line < bytes; line += 64) prefetch(entry + line);
}

// Keys of `positions` (16 or more, those beyond the context are like the last) from `base` on.
template <KvDtype kDtype>
static void lay_keys(const AttentionItem& item, int base, int positions, const PairMemory& memory) {
    const int padded = padded_dim(item.head_dim);
    uint32_t* to = memory.keys;
    for (int first = base; first < base + positions; first += kLanes, to += padded / 2 * kLanes) {
        const char* rows[kLanes];
        for (int p = 0; p < kLanes; p++) {
            const int at = first + p < item.context ? first + p : item.context - 1;
            rows[p] = item.key + (size_t)item.slots[at] * item.slot_stride;
            fetch_ahead(item, item.key, first + p);
            if constexpr (kDtype == kKvBfloat16) continue;
            uint16_t* copy = memory.copies + (size_t)p * padded;
            for (int d = 0; d < padded; d += kWordDims) store_i(copy + d, load_words<kDtype>(rows[p], d, item.head_dim));
            rows[p] = (const char*)copy;
        }
        i32 lines[4];
        for (int pair = 0; pair < item.head_dim / 2; pair += 4) {
            transpose4(rows, (size_t)pair * 4, lines);
            for (int j = 0; j < 4; j++) store_i(to + (size_t)(pair + j) * kLanes, lines[j]);
        }
    }
}

// Values of `positions`, an even number, from `base` on; those beyond the context, which nothing weighs, are like the last.
template <KvDtype kDtype>
static void lay_values(const AttentionItem& item, int base, int positions, const PairMemory& memory) {
    const int padded = padded_dim(item.head_dim);
    alignas(64) uint16_t order[2][32];  // by turns of one row and of the other
    for (int i = 0; i < 32; i++) {
        order[0][i] = (uint16_t)(i / 2 + i % 2 * 32);
        order[1][i] = (uint16_t)(order[0][i] + 16);
    }
    const i32 low = load_i(order[0]), high = load_i(order[1]);
    uint32_t* to = memory.values;
    for (int p = base; p < base + positions; p += 2, to += padded) {
        const char* rows[2];
        for (int i = 0; i < 2; i++) {
            const int at = p + i < item.context ? p + i : item.context - 1;
            rows[i] = item.value + (size_t)item.slots[at] * item.slot_stride;
            fetch_ahead(item, item.value, p + i);
        }
        for (int d = 0; d < padded; d += kWordDims) {
            const i32 a = load_words<kDtype>(rows[0], d, item.head_dim), b = load_words<kDtype>(rows[1], d, item.head_dim);
            store_i(to + d, _mm512_permutex2var_epi16(a, low, b));
            store_i(to + d + kLanes, _mm512_permutex2var_epi16(a, high, b));
        }
    }
}

// out[query][vector] = the sum over `pairs` of a pair of each row, in every lane, times a pair of vectors: rows are
// `row_stride` dwords apart, vectors `vector_stride`, and those of the next pair `pair_stride`.
template <int kQueries, int kVectors>
static inline void multiply_pairs(const uint32_t* rows, size_t row_stride, const uint32_t* vectors, size_t vector_stride,
                                  size_t pair_stride, int pairs, float* out, size_t out_stride) {
    f32 sums[kQueries][kVectors];
    for (int q = 0; q < kQueries; q++)
        for (int v = 0; v < kVectors; v++) sums[q][v] = splat(0.0f);
    for (int pair = 0; pair < pairs; pair++, vectors += pair_stride) {
        i32 vector[kVectors];
        for (int v = 0; v < kVectors; v++) vector[v] = load_i(vectors + v * vector_stride);
        for (int q = 0; q < kQueries; q++) {
            const i32 both = splat_i((int32_t)rows[q * row_stride + pair]);
            for (int v = 0; v < kVectors; v++) sums[q][v] = add_pairs(sums[q][v], vector[v], both);
        }
    }
    for (int q = 0; q < kQueries; q++)
        for (int v = 0; v < kVectors; v++) store(out + q * out_stride + v * kLanes, sums[q][v]);
}

// Scores [128] of a query over positions [from, to) of the split at `base`, a whole number of blocks, to probabilities
// beside the largest of them: times the scales of values and as pairs in `weights`, and in sums [16] as they are.
template <KvDtype kDtype>
static void soften_pairs(const AttentionItem& item, int base, int query, int from, int to, const SplitScales& scales,
                         float* scores, uint32_t* weights, float& maximum, float* sums) {
    const int first = item.first[query] - base, last = item.last[query] - base;
    const bool all_visible = first <= from && last >= to;
    auto visible = [&](int p) {
        const i32 position = _mm512_add_epi32(lane_numbers(), splat_i(p));
        return (__mmask16)(_mm512_cmple_epi32_mask(splat_i(first), position) &
                           _mm512_cmplt_epi32_mask(position, splat_i(last)));
    };
    const f32 lowest = splat(-INFINITY);
    f32 tops[2] = {lowest, lowest};
    for (int p = from; p < to; p += kKvBlock) {
        for (int half = 0; half < 2; half++) {
            const int at = p + half * kLanes;
            f32 s = load(scores + at);
            if constexpr (has_scales(kDtype)) s = mul(s, load(scales.keys + at)), store(scores + at, s);
            tops[half] = max(tops[half], all_visible ? s : _mm512_mask_blend_ps(visible(at), lowest, s));
        }
    }
    maximum = largest(max(tops[0], tops[1])) * item.scale;
    const f32 scale = splat(item.scale * kLog2E), shift = splat(maximum < -3e38f ? 0.0f : maximum * -kLog2E);
    f32 total = splat(0.0f);
    for (int p = from; p < to; p += kKvBlock) {
        f32 some[2];
        for (int half = 0; half < 2; half++) {
            const int at = p + half * kLanes;
            some[half] = exp2_of(fma(load(scores + at), scale, shift));
            if (!all_visible) some[half] = _mm512_maskz_mov_ps(visible(at), some[half]);
            total = add(total, some[half]);
            if constexpr (has_scales(kDtype)) some[half] = mul(some[half], load(scales.values + at));
        }
        store_i(weights + p / 2, (i32)_mm512_cvtne2ps_pbh(some[1], some[0]));
    }
    store(sums, total);
}

// kQueries queries from `begin` on over the split at `base`, of which keys and values are laid out.
template <KvDtype kDtype, int kQueries>
static void attend_pairs(const AttentionItem& item, int base, int begin, int positions, const SplitScales& scales,
                         float* maxima, float* rows, const PairMemory& memory) {
    const int padded = padded_dim(item.head_dim), row = attention_row(item.head_dim);
    // What any of them sees, in blocks: queries go by position.
    const int first = item.first[begin] - base, last = item.last[begin + kQueries - 1] - base;
    const int from = first > 0 ? first / kKvBlock * kKvBlock : 0;
    const int to = last < positions ? (last + kKvBlock - 1) / kKvBlock * kKvBlock : positions;
    if (from >= to) return;
    const uint32_t* queries = memory.queries + (size_t)begin * padded / 2;
    const size_t stride = (size_t)padded / 2 * kLanes;  // keys of 16 positions
    auto score = [&]<int kVectors>(int p) {
        multiply_pairs<kQueries, kVectors>(queries, padded / 2, memory.keys + p / kLanes * stride, stride, kLanes,
                                           item.head_dim / 2, memory.scores + p, kKvSplit);
    };
    int p = from;
    for (; p + 2 * kKvBlock <= to; p += 2 * kKvBlock) score.template operator()<4>(p);
    if (p < to) score.template operator()<2>(p);
    float split_maxima[kQueries];
    for (int q = 0; q < kQueries; q++)
        soften_pairs<kDtype>(item, base, begin + q, from, to, scales, memory.scores + q * kKvSplit,
                             memory.weights + q * (kKvSplit / 2), split_maxima[q],
                             memory.partial + q * row + item.head_dim);
    const uint32_t* values = memory.values + (size_t)from / 2 * padded;
    auto weigh = [&]<int kVectors>(int d) {
        multiply_pairs<kQueries, kVectors>(memory.weights + from / 2, kKvSplit / 2, values + d, kLanes, padded,
                                           (to - from) / 2, memory.partial + d, row);
    };
    int d = 0;
    for (; d + 4 * kLanes <= item.head_dim; d += 4 * kLanes) weigh.template operator()<4>(d);
    for (; d < item.head_dim; d += kLanes) weigh.template operator()<1>(d);
    merge(kQueries, maxima + begin, rows + (size_t)begin * row, split_maxima, memory.partial, item.head_dim);
}

// As `attend` of kernels.h.
template <KvDtype kDtype>
static void attend_bf16(const AttentionItem& item, int first_split, int last_split, float* maxima, float* rows,
                        float* scratch) {
    const PairMemory memory = pair_memory(scratch, item.head_dim);
    round_queries(item, memory.queries);
    for (int split = first_split; split < last_split; split++) {
        const int base = split * kKvSplit, left = item.context - base < kKvSplit ? item.context - base : kKvSplit;
        int first = 0, last = item.count;
        narrow(item, base, base + left, first, last);
        if (first == last) continue;
        const int positions = (left + kKvBlock - 1) / kKvBlock * kKvBlock;
        lay_keys<kDtype>(item, base, positions, memory);
        lay_values<kDtype>(item, base, positions, memory);
        SplitScales scales;
        if constexpr (has_scales(kDtype)) take_scales(item, base, left, scales);
        by_runs<kRegisterQueries>(last - first, [&]<int n>(int i) {
            attend_pairs<kDtype, n>(item, base, first + i, positions, scales, maxima, rows, memory);
        });
    }
}

#endif

}  // namespace TANDEM_ISA
