// The formats that a pool holds keys and values in: how they are written, and how they become floats again. What is
// read here is still to be multiplied by its scale.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace TANDEM_ISA {

static constexpr bool has_scales(KvDtype dtype) { return dtype == kKvFp8 || dtype == kKvInt8; }

// The scale makes the largest of x [n] 127. It is at least the smallest normal number, so that it divides, and finite,
// so that infinity saturates.
static void write_int8(const float* x, int n, int8_t* out, float& scale) {
    f32 peaks = splat(0.0f);
    for (int i = 0; i < n; i += 16) peaks = max(peaks, abs(load(x + i)));
    const float peak = largest(peaks), least = 127 * 0x1p-126f, most = 0x1p127f;
    scale = (peak < least ? least : peak > most ? most : peak) / 127.0f;
    const f32 divisor = splat(scale), limit = splat(127.0f);
    for (int i = 0; i < n; i += 16) {
        const f32 v = div(load(x + i), divisor);
        alignas(64) int32_t lanes[16];
        store_i(lanes, to_int(max(select_less(v, limit, v, limit), splat(-127.0f))));
        for (int lane = 0; lane < 16; lane++) out[i + lane] = (int8_t)lanes[lane];
    }
}

// The nearest number of fp8 (e4m3), ties to even; what is too large becomes the largest, 448.
static inline uint8_t to_fp8(float x) {
    float magnitude = __builtin_fabsf(x);
    if (!(magnitude < 448.0f)) magnitude = 448.0f;
    uint32_t bits, code;
    std::memcpy(&bits, &magnitude, 4);
    if (magnitude < 0x1p-6f)
        code = (uint32_t)__builtin_nearbyintf(magnitude * 0x1p9f);
    else
        code = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - ((127 - 7) << 3);
    return (uint8_t)(code | (__builtin_signbit(x) ? 0x80 : 0));
}

// x [n], a multiple of 16, to `out`. Of int8 the scale is set, of fp8 it is what numbers are divided by.
static void write_kv(const float* x, int n, KvDtype dtype, void* out, float* scale) {
    switch (dtype) {
        case kKvFloat32: std::memcpy(out, x, sizeof(float) * n); break;
        case kKvBfloat16:
            for (int i = 0; i < n; i += 16) store_bf16((uint16_t*)out + i, load(x + i));
            break;
        case kKvFp8:
            for (int i = 0; i < n; i++) ((uint8_t*)out)[i] = to_fp8(x[i] / *scale);
            break;
        case kKvInt8: write_int8(x, n, (int8_t*)out, *scale); break;
    }
}

// The numbers in the highest byte of each lane, whatever is below it.
template <KvDtype kDtype>
static inline f32 of_high_byte(i32 a) {
    if constexpr (kDtype == kKvInt8) {
        return mul(to_float(and_i(a, splat_i((int32_t)0xff000000))), splat(0x1p-24f));
    } else {
        // Exponent and fraction below the exponent's highest bit are f = 2^(1 + e) (1 + m / 8): 2^8 times the number,
        // but where e is 0 that is 2 f - 4, which is less than f there and nowhere else. Here both have a minus.
        const i32 bits = shift_right<4>(and_i(a, splat_i(0x7f000000)));
        const f32 f = bits_to_float(or_i(bits, splat_i((int32_t)0xc0000000)));
        const i32 factor = or_i(and_i(a, splat_i((int32_t)0x80000000)), splat_i((127 - 8) << 23));
        return mul(abs(max(f, fma(f, splat(2.0f), splat(4.0f)))), bits_to_float(factor));
    }
}

// Numbers [i, i + 16) of an entry.
template <KvDtype kDtype>
static inline f32 load_kv(const char* entry, int i) {
    if constexpr (kDtype == kKvFloat32) return load((const float*)entry + i);
    if constexpr (kDtype == kKvBfloat16) return load_bf16(entry + 2 * i);
    if constexpr (kDtype == kKvInt8) return load_s8(entry + i);
    if constexpr (kDtype == kKvFp8) {  // as float16, whose exponent is a bit longer and 8 higher
        uint16_t halves[16];
        for (int lane = 0; lane < 16; lane++) halves[lane] = (uint16_t)((int8_t)entry[i + lane] * 128) & 0xbfff;
        return mul(load_f16(halves), splat(0x1p8f));
    }
}

// The i-th number in each lane of dwords.
template <KvDtype kDtype, int i>
static inline f32 of_dword(i32 dwords) {
    if constexpr (kDtype == kKvFloat32) return bits_to_float(dwords);
    if constexpr (kDtype == kKvBfloat16)
        return bits_to_float(i == 0 ? shift_left<16>(dwords) : and_i(dwords, splat_i((int32_t)0xffff0000)));
    if constexpr (has_scales(kDtype)) return of_high_byte<kDtype>(shift_left<24 - 8 * i>(dwords));
}

}  // namespace TANDEM_ISA
