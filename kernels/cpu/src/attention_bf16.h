// What attention in bfloat16 needs, be it in tiles (attention_tiles.h) or in vectors (attention_pairs.h).
#pragma once

#include "kv.h"
#include "softmax.h"

namespace TANDEM_ISA {

#if defined(__AVX512BF16__)

constexpr int kWordDims = 32;  // numbers of bfloat16 in a vector
constexpr float kLog2E = 1.44269504088896341f;

static inline int padded_dim(int head_dim) { return (head_dim + kWordDims - 1) / kWordDims * kWordDims; }

static inline i32 lane_numbers() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

// 2^x to 3e-6, for x of at most 0; of far lower ones 2^-126. The whole part of x goes to the exponent by way of a
// number so large that its last bit is worth 1. Coefficients: least largest error over [-1/2, 1/2].
static inline f32 exp2_of(f32 x) {
    const f32 large = splat(12582912.0f), clamped = max(x, splat(-126.0f));
    const f32 shifted = add(clamped, large), f = sub(clamped, sub(shifted, large));
    f32 p = fma(splat(9.570101947e-3f), f, splat(5.591786159e-2f));
    p = fma(p, f, splat(2.402474484e-1f));
    p = fma(p, f, splat(6.931218146e-1f));
    p = fma(p, f, splat(9.999992614e-1f));
    return (f32)_mm512_add_epi32((i32)p, shift_left<23>((i32)shifted));
}

// Numbers [d, d + 32) of an entry as bfloat16, zeros beyond its end.
template <KvDtype kDtype>
static inline i32 load_words(const char* entry, int d, int head_dim) {
    const bool is_whole = head_dim - d >= 32;
    if constexpr (kDtype == kKvBfloat16) return _mm512_maskz_loadu_epi16(is_whole ? 0xffffffff : 0xffff, entry + 2 * d);
    const f32 first = load_kv<kDtype>(entry, d), second = is_whole ? load_kv<kDtype>(entry, d + 16) : splat(0.0f);
    return (i32)_mm512_cvtne2ps_pbh(second, first);
}

// By what the scores and the weights of values of a split are to be multiplied, position by position.
struct SplitScales {
    alignas(64) float keys[kKvSplit + 16], values[kKvSplit + 16];  // the last 16 are only read
};

static void take_scales(const AttentionItem& item, int base, int left, SplitScales& scales) {
    for (int p = 0; p < kKvSplit + 16; p++) {
        const size_t at = p < left ? (size_t)item.slots[base + p] * item.scale_stride : 0;
        scales.keys[p] = p < left ? item.key_scale[at] : 0.0f;
        scales.values[p] = p < left ? item.value_scale[at] : 0.0f;
    }
}

#endif

}  // namespace TANDEM_ISA
