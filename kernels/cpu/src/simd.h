// Vectors of 16 lanes, one spelling for every instruction set. Kernels are written once over these and compiled
// once for each set, so every set does the same float operations in the same order.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

namespace TANDEM_ISA {

constexpr int kLanes = 16;

#if defined(__AVX512F__)

using f32 = __m512;
using i32 = __m512i;
constexpr int kRegisterRows = 8, kRegisterQueries = 6;  // rows of activations, queries that registers have room for

static inline f32 load(const float* p) { return _mm512_loadu_ps(p); }
static inline void store(float* p, f32 a) { _mm512_storeu_ps(p, a); }
static inline f32 splat(float a) { return _mm512_set1_ps(a); }
static inline f32 add(f32 a, f32 b) { return _mm512_add_ps(a, b); }
static inline f32 sub(f32 a, f32 b) { return _mm512_sub_ps(a, b); }
static inline f32 mul(f32 a, f32 b) { return _mm512_mul_ps(a, b); }
static inline f32 div(f32 a, f32 b) { return _mm512_div_ps(a, b); }
static inline f32 fma(f32 a, f32 b, f32 c) { return _mm512_fmadd_ps(a, b, c); }
static inline f32 max(f32 a, f32 b) { return _mm512_max_ps(a, b); }
static inline f32 abs(f32 a) { return _mm512_abs_ps(a); }
static inline f32 round(f32 a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// where a < b take x, elsewhere y
static inline f32 select_less(f32 a, f32 b, f32 x, f32 y) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
static inline f32 to_float(i32 a) { return _mm512_cvtepi32_ps(a); }
static inline i32 to_int(f32 a) { return _mm512_cvtps_epi32(a); }
static inline f32 pow2(f32 n) {  // n a whole number in [-126, 127]
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(to_int(n), _mm512_set1_epi32(127)), 23));
}
static inline i32 load_i(const void* p) { return _mm512_loadu_si512(p); }
static inline void store_i(void* p, i32 a) { _mm512_storeu_si512(p, a); }
static inline i32 splat_i(int32_t a) { return _mm512_set1_epi32(a); }
static inline i32 and_i(i32 a, i32 b) { return _mm512_and_si512(a, b); }
static inline i32 or_i(i32 a, i32 b) { return _mm512_or_si512(a, b); }
template <int N>
static inline i32 shift_left(i32 a) { return _mm512_slli_epi32(a, N); }
template <int N>
static inline i32 shift_right(i32 a) { return _mm512_srli_epi32(a, N); }
static inline f32 bits_to_float(i32 a) { return _mm512_castsi512_ps(a); }
// 32 lanes within a byte's range to p, and the sums of each half
static inline void store_i8(int8_t* p, i32 a, i32 b, int32_t& sum_a, int32_t& sum_b) {
    __m256i bytes = _mm256_set_m128i(_mm512_cvtepi32_epi8(b), _mm512_cvtepi32_epi8(a));
    _mm256_storeu_si256((__m256i*)p, bytes);
    __m256i fours = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), bytes);
    fours = _mm256_add_epi32(fours, _mm256_shuffle_epi32(fours, 0x4e));
    fours = _mm256_add_epi32(fours, _mm256_shuffle_epi32(fours, 0xb1));
    sum_a = _mm_cvtsi128_si32(_mm256_castsi256_si128(fours));
    sum_b = _mm_cvtsi128_si32(_mm256_extracti128_si256(fours, 1));
}
static inline void store_bf16(void* p, f32 a) {  // to nearest even; NaN stays NaN
    i32 bits = _mm512_castps_si512(a), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), splat_i(1));
    i32 rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, splat_i(0x7fff))), 16);
    rounded = _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), rounded, splat_i(0x7fc0));
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(rounded));
}
static inline f32 load_f16(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
static inline f32 load_bf16(const void* p) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
static inline f32 load_u8(const void* p) {
    return to_float(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
static inline f32 load_s8(const void* p) {
    return to_float(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
// acc + the products of 4 weights a lane with a row's signed activations 4 kLine and following, summed exactly
template <int kLine>
static inline i32 dot4(i32 acc, i32 weights, const int8_t* row) {
    using four __attribute__((may_alias, aligned(1))) = int32_t;
    const four* a = (const four*)(row + 4 * kLine);
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(weights), "m"(*a));  // compilers load apart
    return acc;
}
// lane i of out[j] is dword j at rows[i] + offset
static inline void transpose4(const char* const* rows, size_t offset, i32* out) {
    __m512i r[4];
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i*)(rows[i] + offset)));
        for (int lane = 1; lane < 4; lane++) {
            __m128i part = _mm_loadu_si128((const __m128i*)(rows[4 * lane + i] + offset));
            r[i] = _mm512_mask_broadcast_i32x4(r[i], (__mmask16)(0xf << (4 * lane)), part);
        }
    }
    __m512i a = _mm512_unpacklo_epi32(r[0], r[1]), b = _mm512_unpackhi_epi32(r[0], r[1]);
    __m512i c = _mm512_unpacklo_epi32(r[2], r[3]), d = _mm512_unpackhi_epi32(r[2], r[3]);
    out[0] = _mm512_unpacklo_epi64(a, c);
    out[1] = _mm512_unpackhi_epi64(a, c);
    out[2] = _mm512_unpacklo_epi64(b, d);
    out[3] = _mm512_unpackhi_epi64(b, d);
}
static inline void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }

#elif defined(__AVX2__)

struct f32 { __m256 lo, hi; };
struct i32 { __m256i lo, hi; };
constexpr int kRegisterRows = 4, kRegisterQueries = 2;

static inline f32 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, f32 a) { _mm256_storeu_ps(p, a.lo), _mm256_storeu_ps(p + 8, a.hi); }
static inline f32 splat(float a) { return {_mm256_set1_ps(a), _mm256_set1_ps(a)}; }
static inline f32 add(f32 a, f32 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
static inline f32 sub(f32 a, f32 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
static inline f32 mul(f32 a, f32 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
static inline f32 div(f32 a, f32 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
static inline f32 fma(f32 a, f32 b, f32 c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
static inline f32 max(f32 a, f32 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
static inline f32 abs(f32 a) {
    __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
static inline f32 round(f32 a) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(a.lo, mode), _mm256_round_ps(a.hi, mode)};
}
static inline f32 select_less(f32 a, f32 b, f32 x, f32 y) {
    return {_mm256_blendv_ps(y.lo, x.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ)),
            _mm256_blendv_ps(y.hi, x.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ))};
}
static inline f32 to_float(i32 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
static inline i32 to_int(f32 a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
static inline i32 load_i(const void* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
static inline void store_i(void* p, i32 a) {
    _mm256_storeu_si256((__m256i*)p, a.lo), _mm256_storeu_si256((__m256i*)p + 1, a.hi);
}
static inline i32 splat_i(int32_t a) { return {_mm256_set1_epi32(a), _mm256_set1_epi32(a)}; }
static inline i32 and_i(i32 a, i32 b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
static inline i32 or_i(i32 a, i32 b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
template <int N>
static inline i32 shift_left(i32 a) { return {_mm256_slli_epi32(a.lo, N), _mm256_slli_epi32(a.hi, N)}; }
template <int N>
static inline i32 shift_right(i32 a) { return {_mm256_srli_epi32(a.lo, N), _mm256_srli_epi32(a.hi, N)}; }
static inline f32 bits_to_float(i32 a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
static inline f32 pow2(f32 n) {
    i32 e = to_int(n);
    __m256i bias = _mm256_set1_epi32(127);
    return bits_to_float(shift_left<23>({_mm256_add_epi32(e.lo, bias), _mm256_add_epi32(e.hi, bias)}));
}
static inline void store_half_i8(int8_t* p, i32 a) {
    __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xd8);
    _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
static inline int32_t sum_i(i32 a) {
    __m256i h = _mm256_add_epi32(a.lo, a.hi);
    __m128i q = _mm_add_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
    q = _mm_add_epi32(q, _mm_shuffle_epi32(q, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(q, _mm_shuffle_epi32(q, 0xb1)));
}
static inline void store_i8(int8_t* p, i32 a, i32 b, int32_t& sum_a, int32_t& sum_b) {
    store_half_i8(p, a), store_half_i8(p + 16, b);
    sum_a = sum_i(a), sum_b = sum_i(b);
}
static inline f32 load_f16(const void* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
            _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p + 1))};
}
static inline f32 load_bf16(const void* p) {
    return bits_to_float(
        shift_left<16>({_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)),
                        _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p + 1))}));
}
static inline f32 load_u8(const void* p) {
    __m128i a = _mm_loadu_si128((const __m128i*)p);
    return to_float({_mm256_cvtepu8_epi32(a), _mm256_cvtepu8_epi32(_mm_srli_si128(a, 8))});
}
static inline f32 load_s8(const void* p) {
    __m128i a = _mm_loadu_si128((const __m128i*)p);
    return to_float({_mm256_cvtepi8_epi32(a), _mm256_cvtepi8_epi32(_mm_srli_si128(a, 8))});
}
constexpr bool kSignedWeights = true;  // of 8 bits, else two products may not fit into 16
static inline i32 as_weights(i32 a) {
    const __m256i flip = _mm256_set1_epi8((char)0x80);
    return {_mm256_xor_si256(a.lo, flip), _mm256_xor_si256(a.hi, flip)};
}
// The sum that `add` is called for with n = 0, 1, 2, ...: products are summed in 16 bits for as long as they fit.
template <int kBits>
struct Dot {
    static constexpr int kLines = kBits == 8 ? 1 : kBits == 6 ? 2 : kBits == 5 ? 4 : 8;
    i32 sum, words;

    static __m256i products(__m256i w, __m256i a) {  // of weights, unsigned, and activations; of two neighbours
        if constexpr (kBits == 8) return _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(a, w));
        return _mm256_maddubs_epi16(w, a);
    }
    template <int n, int kLine>
    void add(i32 weights, const int8_t* row) {
        int32_t four;
        std::memcpy(&four, row + 4 * kLine, 4);
        const __m256i all = _mm256_set1_epi32(four), ones = _mm256_set1_epi16(1);
        const __m256i lo = products(weights.lo, all), hi = products(weights.hi, all);
        words.lo = n % kLines == 0 ? lo : _mm256_add_epi16(words.lo, lo);
        words.hi = n % kLines == 0 ? hi : _mm256_add_epi16(words.hi, hi);
        if constexpr (n % kLines != kLines - 1) return;
        sum.lo = _mm256_add_epi32(sum.lo, _mm256_madd_epi16(words.lo, ones));
        sum.hi = _mm256_add_epi32(sum.hi, _mm256_madd_epi16(words.hi, ones));
    }
};
static inline void transpose4(const char* const* rows, size_t offset, i32* out) {
    alignas(32) int32_t lanes[4][16];
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 4; j++) std::memcpy(&lanes[j][i], rows[i] + offset + 4 * j, 4);
    for (int j = 0; j < 4; j++) out[j] = load_i(lanes[j]);
}
static inline void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }

#elif defined(__ARM_FEATURE_DOTPROD)

struct f32 { float32x4_t v[4]; };
struct i32 { int32x4_t v[4]; };
constexpr int kRegisterRows = 4, kRegisterQueries = 1;

#define QUARTERS for (int i = 0; i < 4; i++)
static inline f32 load(const float* p) { f32 r; QUARTERS r.v[i] = vld1q_f32(p + 4 * i); return r; }
static inline void store(float* p, f32 a) { QUARTERS vst1q_f32(p + 4 * i, a.v[i]); }
static inline f32 splat(float a) { f32 r; QUARTERS r.v[i] = vdupq_n_f32(a); return r; }
static inline f32 add(f32 a, f32 b) { QUARTERS a.v[i] = vaddq_f32(a.v[i], b.v[i]); return a; }
static inline f32 sub(f32 a, f32 b) { QUARTERS a.v[i] = vsubq_f32(a.v[i], b.v[i]); return a; }
static inline f32 mul(f32 a, f32 b) { QUARTERS a.v[i] = vmulq_f32(a.v[i], b.v[i]); return a; }
static inline f32 div(f32 a, f32 b) { QUARTERS a.v[i] = vdivq_f32(a.v[i], b.v[i]); return a; }
static inline f32 fma(f32 a, f32 b, f32 c) { QUARTERS c.v[i] = vfmaq_f32(c.v[i], a.v[i], b.v[i]); return c; }
static inline float32x4_t max_quarter(float32x4_t a, float32x4_t b) {  // of NaN what others say, unlike vmaxq_f32
    return vbslq_f32(vcgtq_f32(a, b), a, b);
}
static inline f32 max(f32 a, f32 b) { QUARTERS a.v[i] = max_quarter(a.v[i], b.v[i]); return a; }
static inline f32 abs(f32 a) { QUARTERS a.v[i] = vabsq_f32(a.v[i]); return a; }
static inline f32 round(f32 a) { QUARTERS a.v[i] = vrndnq_f32(a.v[i]); return a; }
static inline f32 select_less(f32 a, f32 b, f32 x, f32 y) {
    QUARTERS y.v[i] = vbslq_f32(vcltq_f32(a.v[i], b.v[i]), x.v[i], y.v[i]);
    return y;
}
static inline f32 to_float(i32 a) { f32 r; QUARTERS r.v[i] = vcvtq_f32_s32(a.v[i]); return r; }
static inline i32 to_int(f32 a) { i32 r; QUARTERS r.v[i] = vcvtnq_s32_f32(a.v[i]); return r; }
static inline i32 load_i(const void* p) { i32 r; QUARTERS r.v[i] = vld1q_s32((const int32_t*)p + 4 * i); return r; }
static inline void store_i(void* p, i32 a) { QUARTERS vst1q_s32((int32_t*)p + 4 * i, a.v[i]); }
static inline i32 splat_i(int32_t a) { i32 r; QUARTERS r.v[i] = vdupq_n_s32(a); return r; }
static inline i32 and_i(i32 a, i32 b) { QUARTERS a.v[i] = vandq_s32(a.v[i], b.v[i]); return a; }
static inline i32 or_i(i32 a, i32 b) { QUARTERS a.v[i] = vorrq_s32(a.v[i], b.v[i]); return a; }
template <int N>
static inline i32 shift_left(i32 a) { QUARTERS a.v[i] = vshlq_n_s32(a.v[i], N); return a; }
template <int N>
static inline i32 shift_right(i32 a) {
    QUARTERS a.v[i] = vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(a.v[i]), N));
    return a;
}
static inline f32 bits_to_float(i32 a) { f32 r; QUARTERS r.v[i] = vreinterpretq_f32_s32(a.v[i]); return r; }
static inline f32 pow2(f32 n) {
    i32 e = to_int(n);
    QUARTERS e.v[i] = vaddq_s32(e.v[i], vdupq_n_s32(127));
    return bits_to_float(shift_left<23>(e));
}
static inline void store_half_i8(int8_t* p, i32 a) {
    const int16x8_t low = vcombine_s16(vmovn_s32(a.v[0]), vmovn_s32(a.v[1]));
    const int16x8_t high = vcombine_s16(vmovn_s32(a.v[2]), vmovn_s32(a.v[3]));
    vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}
static inline int32_t sum_i(i32 a) {
    return vaddvq_s32(vaddq_s32(vaddq_s32(a.v[0], a.v[1]), vaddq_s32(a.v[2], a.v[3])));
}
static inline void store_i8(int8_t* p, i32 a, i32 b, int32_t& sum_a, int32_t& sum_b) {
    store_half_i8(p, a), store_half_i8(p + 16, b);
    sum_a = sum_i(a), sum_b = sum_i(b);
}
static inline f32 load_f16(const void* p) {
    f32 r;
    QUARTERS r.v[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t*)p + 4 * i)));
    return r;
}
static inline f32 load_bf16(const void* p) {
    i32 r;
    QUARTERS r.v[i] = vreinterpretq_s32_u32(vshll_n_u16(vld1_u16((const uint16_t*)p + 4 * i), 16));
    return bits_to_float(r);
}
static inline f32 load_u8(const void* p) {
    const uint8x16_t a = vld1q_u8((const uint8_t*)p);
    const uint16x8_t low = vmovl_u8(vget_low_u8(a)), high = vmovl_high_u8(a);
    return {{vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))), vcvtq_f32_u32(vmovl_high_u16(low)),
             vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))), vcvtq_f32_u32(vmovl_high_u16(high))}};
}
static inline f32 load_s8(const void* p) {
    const int8x16_t a = vld1q_s8((const int8_t*)p);
    const int16x8_t low = vmovl_s8(vget_low_s8(a)), high = vmovl_high_s8(a);
    return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low)),
             vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_high_s16(high))}};
}
constexpr bool kSignedWeights = true;  // as both sides of vdotq_s32 are
static inline i32 as_weights(i32 a) {
    QUARTERS a.v[i] = veorq_s32(a.v[i], vdupq_n_s32((int32_t)0x80808080));
    return a;
}
template <int kLine>
static inline i32 dot4(i32 acc, i32 weights, const int8_t* row) {
    const int8x16_t a = vld1q_s8(row + kLine / 4 * 16);
    QUARTERS acc.v[i] = vdotq_laneq_s32(acc.v[i], vreinterpretq_s8_s32(weights.v[i]), a, kLine % 4);
    return acc;
}
static inline void transpose4(const char* const* rows, size_t offset, i32* out) {
    for (int i = 0; i < 4; i++) {
        int32x4_t r[4];
        for (int j = 0; j < 4; j++) r[j] = vreinterpretq_s32_s8(vld1q_s8((const int8_t*)rows[4 * i + j] + offset));
        auto pairs = [](int32x4_t x) { return vreinterpretq_s64_s32(x); };
        const int64x2_t a = pairs(vtrn1q_s32(r[0], r[1])), b = pairs(vtrn2q_s32(r[0], r[1]));
        const int64x2_t c = pairs(vtrn1q_s32(r[2], r[3])), d = pairs(vtrn2q_s32(r[2], r[3]));
        out[0].v[i] = vreinterpretq_s32_s64(vtrn1q_s64(a, c));
        out[1].v[i] = vreinterpretq_s32_s64(vtrn1q_s64(b, d));
        out[2].v[i] = vreinterpretq_s32_s64(vtrn2q_s64(a, c));
        out[3].v[i] = vreinterpretq_s32_s64(vtrn2q_s64(b, d));
    }
}
static inline void prefetch(const void* p) { __builtin_prefetch(p); }
#undef QUARTERS

#else  // plain C++: the reference, and what serves other machines

struct f32 { float v[16]; };
struct i32 { int32_t v[16]; };
constexpr int kRegisterRows = 1, kRegisterQueries = 1;

#define LANES for (int i = 0; i < 16; i++)
static inline f32 load(const float* p) { f32 r; std::memcpy(r.v, p, 64); return r; }
static inline void store(float* p, f32 a) { std::memcpy(p, a.v, 64); }
static inline f32 splat(float a) { f32 r; LANES r.v[i] = a; return r; }
static inline f32 add(f32 a, f32 b) { LANES a.v[i] += b.v[i]; return a; }
static inline f32 sub(f32 a, f32 b) { LANES a.v[i] -= b.v[i]; return a; }
static inline f32 mul(f32 a, f32 b) { LANES a.v[i] *= b.v[i]; return a; }
static inline f32 div(f32 a, f32 b) { LANES a.v[i] /= b.v[i]; return a; }
static inline f32 fma(f32 a, f32 b, f32 c) { LANES c.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]); return c; }
static inline f32 max(f32 a, f32 b) { LANES a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
static inline f32 abs(f32 a) { LANES a.v[i] = __builtin_fabsf(a.v[i]); return a; }
static inline f32 round(f32 a) { LANES a.v[i] = __builtin_nearbyintf(a.v[i]); return a; }
static inline f32 select_less(f32 a, f32 b, f32 x, f32 y) { LANES y.v[i] = a.v[i] < b.v[i] ? x.v[i] : y.v[i]; return y; }
static inline f32 to_float(i32 a) { f32 r; LANES r.v[i] = (float)a.v[i]; return r; }
static inline i32 to_int(f32 a) { i32 r; LANES r.v[i] = (int32_t)__builtin_nearbyintf(a.v[i]); return r; }
static inline i32 load_i(const void* p) { i32 r; std::memcpy(r.v, p, 64); return r; }
static inline void store_i(void* p, i32 a) { std::memcpy(p, a.v, 64); }
static inline i32 splat_i(int32_t a) { i32 r; LANES r.v[i] = a; return r; }
static inline i32 and_i(i32 a, i32 b) { LANES a.v[i] &= b.v[i]; return a; }
static inline i32 or_i(i32 a, i32 b) { LANES a.v[i] |= b.v[i]; return a; }
template <int N>
static inline i32 shift_left(i32 a) { LANES a.v[i] = (int32_t)((uint32_t)a.v[i] << N); return a; }
template <int N>
static inline i32 shift_right(i32 a) { LANES a.v[i] = (int32_t)((uint32_t)a.v[i] >> N); return a; }
static inline f32 bits_to_float(i32 a) { f32 r; std::memcpy(r.v, a.v, 64); return r; }
static inline f32 pow2(f32 n) { i32 e = to_int(n); LANES e.v[i] = (e.v[i] + 127) << 23; return bits_to_float(e); }
static inline void store_i8(int8_t* p, i32 a, i32 b, int32_t& sum_a, int32_t& sum_b) {
    sum_a = sum_b = 0;
    LANES p[i] = (int8_t)a.v[i], p[i + 16] = (int8_t)b.v[i], sum_a += a.v[i], sum_b += b.v[i];
}
static inline float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 0x3ff, bits;
    if (exponent == 0) {
        float subnormal = (float)fraction * 0x1p-24f;
        std::memcpy(&bits, &subnormal, 4);
        bits |= sign;
    } else {
        bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
    }
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}
static inline f32 load_f16(const void* p) {
    uint16_t h[16];
    std::memcpy(h, p, 32);
    f32 r;
    LANES r.v[i] = half_to_float(h[i]);
    return r;
}
static inline f32 load_bf16(const void* p) {
    uint16_t h[16];
    std::memcpy(h, p, 32);
    i32 r;
    LANES r.v[i] = (int32_t)((uint32_t)h[i] << 16);
    return bits_to_float(r);
}
static inline f32 load_u8(const void* p) { f32 r; LANES r.v[i] = ((const uint8_t*)p)[i]; return r; }
static inline f32 load_s8(const void* p) { f32 r; LANES r.v[i] = ((const int8_t*)p)[i]; return r; }
template <int kLine>
static inline i32 dot4(i32 acc, i32 weights, const int8_t* row) {
    const int8_t* a = row + 4 * kLine;
    uint8_t w[64];
    std::memcpy(w, weights.v, 64);
    LANES acc.v[i] += w[4 * i] * a[0] + w[4 * i + 1] * a[1] + w[4 * i + 2] * a[2] + w[4 * i + 3] * a[3];
    return acc;
}
static inline void transpose4(const char* const* rows, size_t offset, i32* out) {
    for (int j = 0; j < 4; j++) LANES std::memcpy(&out[j].v[i], rows[i] + offset + 4 * j, 4);
}
static inline void prefetch(const void*) {}
#undef LANES

#endif

// Weights of 8 bits, which are stored with 128 added, as they are multiplied; and a row's sum over the lines of a group.
#if defined(__AVX512F__) || !defined(__AVX2__)
#if !defined(__ARM_FEATURE_DOTPROD)
constexpr bool kSignedWeights = false;
static inline i32 as_weights(i32 a) { return a; }
#endif
template <int kBits>
struct Dot {
    i32 sum;

    template <int n, int kLine>
    void add(i32 weights, const int8_t* row) { sum = dot4<kLine>(sum, weights, row); }
};
#endif

// Sum and maximum of the lanes, by halves: the same tree for every instruction set.
#if defined(__AVX512F__) || defined(__AVX2__)
static inline __m256 fold(f32 a, __m256 (*combine)(__m256, __m256)) {
#if defined(__AVX512F__)
    return combine(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
#else
    return combine(a.lo, a.hi);
#endif
}
static inline float sum(f32 a) {
    __m256 h = fold(a, [](__m256 x, __m256 y) { return _mm256_add_ps(x, y); });
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
static inline float largest(f32 a) {
    __m256 h = fold(a, [](__m256 x, __m256 y) { return _mm256_max_ps(x, y); });
    __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}
#elif defined(__ARM_FEATURE_DOTPROD)
template <class Combine>
static inline float reduce(f32 a, Combine combine) {
    const float32x4_t quarter = combine(combine(a.v[0], a.v[2]), combine(a.v[1], a.v[3]));
    const float32x4_t half = combine(quarter, vextq_f32(quarter, quarter, 2));
    return vgetq_lane_f32(combine(half, vextq_f32(half, half, 1)), 0);
}
static inline float sum(f32 a) {
    return reduce(a, [](float32x4_t x, float32x4_t y) { return vaddq_f32(x, y); });
}
static inline float largest(f32 a) { return reduce(a, max_quarter); }
#else
static inline float sum(f32 a) {
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; i++) a.v[i] += a.v[i + width];
    return a.v[0];
}
static inline float largest(f32 a) {
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; i++) a.v[i] = a.v[i] > a.v[i + width] ? a.v[i] : a.v[i + width];
    return a.v[0];
}
#endif

// e^x to about 1 ulp; exactly 1 at 0, exactly 0 below -87 (so that masked scores vanish). x must be under 88.
static inline f32 exp(f32 x) {
    f32 clamped = max(x, splat(-87.0f));
    f32 n = round(mul(clamped, splat(1.44269504088896341f)));
    f32 r = fma(n, splat(-0.693359375f), clamped);
    r = fma(n, splat(2.12194440e-4f), r);
    f32 p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(mul(p, r), r, add(r, splat(1.0f)));
    return select_less(x, splat(-87.0f), splat(0.0f), mul(p, pow2(n)));
}

#if !defined(__AVX512F__)
static inline void store_bf16(void* p, f32 a) {  // to nearest even; NaN stays NaN
    uint32_t bits[16];
    std::memcpy(bits, &a, 64);
    for (int i = 0; i < 16; i++) {
        const bool is_nan = (bits[i] & 0x7fffffff) > 0x7f800000;
        const uint16_t rounded = is_nan ? 0x7fc0 : (bits[i] + 0x7fff + ((bits[i] >> 16) & 1)) >> 16;
        std::memcpy((char*)p + 2 * i, &rounded, 2);
    }
}
#endif

}  // namespace TANDEM_ISA
