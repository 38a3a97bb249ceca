// How each weight format lies in memory, and how a kernel reads it.
//
// A weight is cut into tiles of 16 rows by `columns` columns; the tiles of the same 16 rows lie one after another.
// In a tile, the values of 4 neighbouring columns of a row form a dword, and 16 such dwords (one a row) a line of
// 64 bytes: 8 lines make a group of 32 columns. Nothing is lost against the file: same integers, same scales.
//
//   4 bits: 4 lines; the low nibbles of line p are line p of the group, the high nibbles line p + 4.
//   5 bits: 4 lines as above, then a line whose bit j is the fifth bit of line j.
//   6 bits: 4 lines as above, then 2 lines: bits 2j, 2j + 1 of line h are the high bits of line 4h + j.
//   8 bits: 8 lines, value + 128.
//
// After the groups come the scales: f16 for 16 rows (and the minimum likewise); for the K formats, one byte for each
// sub-block and row more. Values are unsigned; `offset` is subtracted by way of the activations' sums, but for that of
// 8 bits where an instruction set multiplies signed weights only (fewer bits are the same either way).
#pragma once

#include "kernels.h"
#include "simd.h"

namespace TANDEM_ISA {

struct Lines4 {
    static constexpr int bits = 4, bytes = 256;
    static inline void unpack(const uint8_t* p, i32* w) {
        i32 mask = splat_i(0x0f0f0f0f);
        for (int j = 0; j < 4; j++) {
            i32 line = load_i(p + 64 * j);
            w[j] = and_i(line, mask);
            w[j + 4] = and_i(shift_right<4>(line), mask);
        }
    }
};

struct Lines5 {
    static constexpr int bits = 5, bytes = 320;
    static inline void unpack(const uint8_t* p, i32* w) {
        Lines4::unpack(p, w);
        i32 high = load_i(p + 256), mask = splat_i(0x10101010);
        w[0] = or_i(w[0], and_i(shift_left<4>(high), mask));
        w[1] = or_i(w[1], and_i(shift_left<3>(high), mask));
        w[2] = or_i(w[2], and_i(shift_left<2>(high), mask));
        w[3] = or_i(w[3], and_i(shift_left<1>(high), mask));
        w[4] = or_i(w[4], and_i(high, mask));
        w[5] = or_i(w[5], and_i(shift_right<1>(high), mask));
        w[6] = or_i(w[6], and_i(shift_right<2>(high), mask));
        w[7] = or_i(w[7], and_i(shift_right<3>(high), mask));
    }
};

struct Lines6 {
    static constexpr int bits = 6, bytes = 384;
    static inline void unpack(const uint8_t* p, i32* w) {
        Lines4::unpack(p, w);
        i32 mask = splat_i(0x30303030);
        for (int h = 0; h < 2; h++) {
            i32 high = load_i(p + 256 + 64 * h);
            w[4 * h] = or_i(w[4 * h], and_i(shift_left<4>(high), mask));
            w[4 * h + 1] = or_i(w[4 * h + 1], and_i(shift_left<2>(high), mask));
            w[4 * h + 2] = or_i(w[4 * h + 2], and_i(high, mask));
            w[4 * h + 3] = or_i(w[4 * h + 3], and_i(shift_right<2>(high), mask));
        }
    }
};

struct Lines8 {
    static constexpr int bits = 8, bytes = 512;
    static inline void unpack(const uint8_t* p, i32* w) {
        for (int j = 0; j < 8; j++) w[j] = as_weights(load_i(p + 64 * j));
    }
};

// One scale (and minimum) for 32 columns: w = d * (q - 2^offset_bits), or d * q + m.
template <class LinesT, int kOffsetBits, bool kMinimum>
struct Simple {
    using Lines = LinesT;
    static constexpr int columns = 32, bytes = Lines::bytes + (kMinimum ? 64 : 32), offset_bits = kOffsetBits;
    static constexpr bool has_minimum = kMinimum, has_halves = false;
    static inline void scales(const uint8_t* tile, int, f32& d, f32&, f32& m) {
        d = load_f16(tile + Lines::bytes);
        if (kMinimum) m = load_f16(tile + Lines::bytes + 32);
    }
};

// Q4_K, Q5_K: w = (d * scale) * q - (dmin * minimum), scale and minimum 6 bits for 32 columns of 256.
template <class LinesT>
struct WithMinima {
    using Lines = LinesT;
    static constexpr int columns = 256, bytes = 8 * Lines::bytes + 64 + 256, offset_bits = 0;
    static constexpr bool has_minimum = true, has_halves = false;
    static inline void scales(const uint8_t* tile, int group, f32& d, f32&, f32& m) {
        const uint8_t* p = tile + 8 * Lines::bytes;
        d = mul(load_f16(p), load_u8(p + 64 + 16 * group));
        m = sub(splat(0.0f), mul(load_f16(p + 32), load_u8(p + 192 + 16 * group)));
    }
};

// Q6_K: w = (d * scale) * (q - 32), scale a signed byte for 16 columns of 256.
struct WithHalves {
    using Lines = Lines6;
    static constexpr int columns = 256, bytes = 8 * Lines::bytes + 32 + 256, offset_bits = 5;
    static constexpr bool has_minimum = false, has_halves = true;
    static inline void scales(const uint8_t* tile, int group, f32& d, f32& d2, f32&) {
        const uint8_t* p = tile + 8 * Lines::bytes;
        f32 all = load_f16(p);
        d = mul(all, load_s8(p + 32 + 32 * group));
        d2 = mul(all, load_s8(p + 48 + 32 * group));
    }
};

template <int kFormat> struct Quantised;
template <> struct Quantised<Q4_0> : Simple<Lines4, 3, false> {};
template <> struct Quantised<Q4_1> : Simple<Lines4, 0, true> {};
template <> struct Quantised<Q5_0> : Simple<Lines5, 4, false> {};
template <> struct Quantised<Q5_1> : Simple<Lines5, 0, true> {};
template <> struct Quantised<Q8_0> : Simple<Lines8, kSignedWeights ? 0 : 7, false> {};
template <> struct Quantised<Q4_K> : WithMinima<Lines4> {};
template <> struct Quantised<Q5_K> : WithMinima<Lines5> {};
template <> struct Quantised<Q6_K> : WithHalves {};

// Float weights: 16 values (one a row) for each column.
template <int kFormat> struct Float;
template <> struct Float<F32> {
    static constexpr int bytes = 64;
    static inline f32 column(const uint8_t* p) { return load((const float*)p); }
};
template <> struct Float<BF16> {
    static constexpr int bytes = 32;
    static inline f32 column(const uint8_t* p) { return load_bf16(p); }
};
template <> struct Float<F16> {
    static constexpr int bytes = 32;
    static inline f32 column(const uint8_t* p) { return load_f16(p); }
};

}  // namespace TANDEM_ISA
