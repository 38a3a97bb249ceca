// y = x W^T for one tile of 16 outputs. A row's value is built by one chain of operations, group after group, in
// the same order however many rows go together and whichever unit makes the integer dot products; those are exact.
#pragma once

#include "formats.h"

namespace TANDEM_ISA {

constexpr int kPrefetch = 2048;  // bytes ahead of the weights being read: the hardware stops at page boundaries

// One row's group: y += scale * d * dot (+ m * scaled_sum). The only place where floats are rounded.
template <class F>
static inline f32 accumulate(f32 y, i32 dot, f32 d, f32 m, const Record& record, int row) {
    y = fma(to_float(dot), mul(splat(record.scale[row]), d), y);
    return F::has_minimum ? fma(m, splat(record.scaled_sum[row]), y) : y;
}

static inline f32 accumulate_halves(f32 y, i32 dot, i32 dot2, f32 d, f32 d2, const Record& record, int row) {
    f32 scale = splat(record.scale[row]);
    y = fma(to_float(dot), mul(scale, d), y);
    return fma(to_float(dot2), mul(scale, d2), y);
}

template <class F>
static inline i32 cancel_offset(const int32_t* negative_sum) {
    return F::offset_bits ? splat_i((int32_t)((uint32_t)*negative_sum << F::offset_bits)) : splat_i(0);
}

template <class F, int kRows>
static void few_rows(const uint8_t* tile, int groups, const Record* records, int row, float* out) {
    f32 y[kRows];
    for (int r = 0; r < kRows; r++) y[r] = splat(0.0f);
    constexpr int groups_per_tile = F::columns / kGroup;
    for (int g = 0; g < groups; g++) {
        int inner = g % groups_per_tile;
        const uint8_t* lines = tile + (size_t)inner * F::Lines::bytes;
        for (int line = 0; line < F::Lines::bytes; line += 64) prefetch(lines + kPrefetch + line);
        i32 w[8];
        f32 d, d2, m;
        F::Lines::unpack(lines, w);
        F::scales(tile, inner, d, d2, m);
        const Record& record = records[g];
        for (int r = 0; r < kRows; r++) {
            const int8_t* a = record.values[row + r];
            if (F::has_halves) {
                i32 dot = cancel_offset<F>(&record.half_sum[0][row + r]);
                i32 dot2 = cancel_offset<F>(&record.half_sum[1][row + r]);
                for (int j = 0; j < 4; j++) dot = dot4(dot, w[j], a + 4 * j);
                for (int j = 4; j < 8; j++) dot2 = dot4(dot2, w[j], a + 4 * j);
                y[r] = accumulate_halves(y[r], dot, dot2, d, d2, record, row + r);
            } else {
                i32 dot = cancel_offset<F>(&record.sum[row + r]);
                for (int j = 0; j < 8; j++) dot = dot4(dot, w[j], a + 4 * j);
                y[r] = accumulate<F>(y[r], dot, d, m, record, row + r);
            }
        }
        if (inner == groups_per_tile - 1) tile += F::bytes;
    }
    for (int r = 0; r < kRows; r++) store(out + kLanes * r, y[r]);
}

template <class F, int kRows>
static void up_to(int rows, const uint8_t* tile, int groups, const Record* records, int row, float* out) {
    if (rows == kRows) return few_rows<F, kRows>(tile, groups, records, row, out);
    if constexpr (kRows > 1) up_to<F, kRows - 1>(rows, tile, groups, records, row, out);
}

#if defined(__AMX_INT8__)

struct TileConfig {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
// Tile registers. For 16 and for 8 rows: integer sums, activations of 32 columns, activations of 16 columns.
// For both: weights of 32 columns, weights of 16.
enum { kSums16, kActs16, kHalfActs16, kSums8, kActs8, kHalfActs8, kWeights, kHalfWeights };

static void enter() {
    alignas(64) TileConfig config = {};
    config.palette = 1;
    const uint8_t rows[8] = {16, 16, 16, 8, 8, 8, 8, 4}, row_bytes[8] = {64, 32, 16, 64, 32, 16, 64, 64};
    for (int t = 0; t < 8; t++) config.rows[t] = rows[t], config.row_bytes[t] = row_bytes[t];
    asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
}
static void leave() { asm volatile("tilerelease" ::: "memory"); }

// sums [rows][16] = activations (signed) times weights (unsigned) over one group, or over half of one.
template <int kSums, int kActs, int kW>
static inline void tile_dot(const int8_t* activations, const uint8_t* weights, int32_t* sums) {
    asm volatile(
        "tilezero %%tmm%c[sums]\n\t"
        "tileloadd (%[a],%[a_stride],1), %%tmm%c[acts]\n\t"
        "tileloadd (%[w],%[line],1), %%tmm%c[weights]\n\t"
        "tdpbsud %%tmm%c[weights], %%tmm%c[acts], %%tmm%c[sums]\n\t"
        "tilestored %%tmm%c[sums], (%[out],%[line],1)"
        :
        : [a] "r"(activations), [a_stride] "r"((long)kGroup), [w] "r"(weights), [line] "r"(64L), [out] "r"(sums),
          [sums] "i"(kSums), [acts] "i"(kActs), [weights] "i"(kW)
        : "memory");
}

template <class F>
static inline const uint8_t* group_lines(const uint8_t* tile, int g) {
    constexpr int groups_per_tile = F::columns / kGroup;
    return tile + (size_t)(g / groups_per_tile) * F::bytes + (size_t)(g % groups_per_tile) * F::Lines::bytes;
}

// Adds groups [begin, end) to out [kRows][16]. The tile unit multiplies group g + 1 while group g is accumulated. The
// first block of rows to come by also fetches the weights that follow these: later, unpacking would wait for them.
template <class F, int kRows, bool kFetch>
static void block_rows(const uint8_t* tile, const uint8_t* weights, int begin, int end, const Record* records,
                       float* out) {
    constexpr int kSums = kRows == 16 ? kSums16 : kSums8;
    [[maybe_unused]] constexpr int kActs = kRows == 16 ? kActs16 : kActs8;
    [[maybe_unused]] constexpr int kHalfActs = kRows == 16 ? kHalfActs16 : kHalfActs8;
    constexpr int groups_per_tile = F::columns / kGroup;
    alignas(64) int32_t sums[2][2][16 * 16];
    auto dot = [&](int g) {
        const int8_t* a = &records[g].values[0][0];
        const uint8_t* w = weights + (size_t)(g - begin) * 512;
        if constexpr (F::has_halves) {
            tile_dot<kSums, kHalfActs, kHalfWeights>(a, w, sums[g & 1][0]);
            tile_dot<kSums, kHalfActs, kHalfWeights>(a + 16, w + 256, sums[g & 1][1]);
        } else {
            tile_dot<kSums, kActs, kWeights>(a, w, sums[g & 1][0]);
        }
    };
    f32 y[kRows];
    for (int r = 0; r < kRows; r++) y[r] = begin == 0 ? splat(0.0f) : load(out + kLanes * r);
    const size_t ahead = (size_t)(end - begin) / groups_per_tile * F::bytes;
    dot(begin);
    for (int g = begin; g < end; g++) {
        if (g + 1 < end) dot(g + 1);
        if (kFetch) {
            const uint8_t* lines = group_lines<F>(tile, g);
            constexpr int bytes = F::bytes / groups_per_tile;
            for (int line = 0; line < bytes; line += 64) prefetch(lines + ahead + line);
        }
        f32 d, d2, m;
        F::scales(tile + (size_t)(g / groups_per_tile) * F::bytes, g % groups_per_tile, d, d2, m);
        const Record& record = records[g];
        const int32_t* first = sums[g & 1][0];
        [[maybe_unused]] const int32_t* second = sums[g & 1][1];
#pragma GCC unroll 16
        for (int r = 0; r < kRows; r++) {
            auto exact = [&](const int32_t* sum, const int32_t* negative_sum) {
                i32 loaded = load_i(sum + 16 * r);
                return F::offset_bits ? _mm512_add_epi32(loaded, cancel_offset<F>(negative_sum + r)) : loaded;
            };
            if constexpr (F::has_halves) {
                y[r] = accumulate_halves(y[r], exact(first, record.half_sum[0]), exact(second, record.half_sum[1]),
                                         d, d2, record, r);
            } else {
                y[r] = accumulate<F>(y[r], exact(first, record.sum), d, m, record, r);
            }
        }
    }
    for (int r = 0; r < kRows; r++) store(out + kLanes * r, y[r]);
}

constexpr int kBlockThreshold = 5;  // rows below which the tile unit costs more than it saves
constexpr int kUnpacked = 24;       // groups unpacked at a time: 12 KB, which leaves the L1 room for activations

template <class F>
static void many_rows(const uint8_t* tile, int groups, const Record* records, int rows, float* out) {
    alignas(64) uint8_t weights[kUnpacked * 512];
    for (int begin = 0; begin < groups; begin += kUnpacked) {
        const int end = begin + kUnpacked < groups ? begin + kUnpacked : groups;
        for (int g = begin; g < end; g++) {
            i32 w[8];
            F::Lines::unpack(group_lines<F>(tile, g), w);
            for (int j = 0; j < 8; j++) store_i(weights + (size_t)(g - begin) * 512 + 64 * j, w[j]);
        }
        const Record* block = records;
        for (int r = 0; r < rows; r += kBlockRows, block += groups) {
            auto add_block = r == 0 ? (rows - r > 8 ? block_rows<F, 16, true> : block_rows<F, 8, true>)
                                    : (rows - r > 8 ? block_rows<F, 16, false> : block_rows<F, 8, false>);
            add_block(tile, weights, begin, end, block, out + kLanes * r);
        }
    }
}

#else
static void enter() {}
static void leave() {}
#endif

template <class F>
static void quantised_tile(const Weight& weight, int tile, const Activations& x, int row, int rows, float* out) {
    const int groups = x.columns / kGroup;
    const uint8_t* data = weight.data + (size_t)tile * (x.columns / F::columns) * F::bytes;
    const Record* records = x.records + (size_t)(row / kBlockRows) * groups;
#if defined(__AMX_INT8__)
    if (rows >= kBlockThreshold) return many_rows<F>(data, groups, records, rows, out);
#endif
    for (int r = 0; r < rows; r += kRegisterRows) {
        const Record* block = records + (size_t)(r / kBlockRows) * groups;
        int count = rows - r < kRegisterRows ? rows - r : kRegisterRows;
        up_to<F, kRegisterRows>(count, data, groups, block, r % kBlockRows, out + kLanes * r);
    }
}

template <class F, int kRows>
static void float_rows(int rows, const uint8_t* data, int columns, const float* x, float* out) {
    if (rows < kRows) {
        if constexpr (kRows > 1) float_rows<F, kRows - 1>(rows, data, columns, x, out);
        return;
    }
    f32 y[kRows];
    for (int r = 0; r < kRows; r++) y[r] = splat(0.0f);
    for (int k = 0; k < columns; k++) {
        const uint8_t* p = data + (size_t)k * F::bytes;
        if (k % (64 / F::bytes) == 0) prefetch(p + kPrefetch);
        f32 w = F::column(p);
        for (int r = 0; r < kRows; r++) y[r] = fma(w, splat(x[(size_t)r * columns + k]), y[r]);
    }
    for (int r = 0; r < kRows; r++) store(out + kLanes * r, y[r]);
}

template <class F>
static void float_tile(const Weight& weight, int tile, const Activations& x, int row, int rows, float* out) {
    const uint8_t* data = weight.data + (size_t)tile * x.columns * F::bytes;
    for (int r = 0; r < rows; r += kRegisterRows) {
        int count = rows - r < kRegisterRows ? rows - r : kRegisterRows;
        float_rows<F, kRegisterRows>(count, data, x.columns, x.floats + (size_t)(row + r) * x.columns,
                                     out + kLanes * r);
    }
}

static void linear_tile(const Weight& weight, int tile, const Activations& x, int row, int rows, float* out) {
    switch (weight.format) {
        case F32: return float_tile<Float<F32>>(weight, tile, x, row, rows, out);
        case BF16: return float_tile<Float<BF16>>(weight, tile, x, row, rows, out);
        case F16: return float_tile<Float<F16>>(weight, tile, x, row, rows, out);
        case Q4_0: return quantised_tile<Quantised<Q4_0>>(weight, tile, x, row, rows, out);
        case Q4_1: return quantised_tile<Quantised<Q4_1>>(weight, tile, x, row, rows, out);
        case Q5_0: return quantised_tile<Quantised<Q5_0>>(weight, tile, x, row, rows, out);
        case Q5_1: return quantised_tile<Quantised<Q5_1>>(weight, tile, x, row, rows, out);
        case Q8_0: return quantised_tile<Quantised<Q8_0>>(weight, tile, x, row, rows, out);
        case Q4_K: return quantised_tile<Quantised<Q4_K>>(weight, tile, x, row, rows, out);
        case Q5_K: return quantised_tile<Quantised<Q5_K>>(weight, tile, x, row, rows, out);
        case Q6_K: return quantised_tile<Quantised<Q6_K>>(weight, tile, x, row, rows, out);
    }
}

// One row of a weight as float32: the embedding, and what tests compare with.
template <class F>
static void quantised_row(const Weight& weight, int row, float* out) {
    const uint8_t* tiles = weight.data + (size_t)(row / 16) * (weight.columns / F::columns) * F::bytes;
    const int lane = row % 16;
    constexpr int groups_per_tile = F::columns / kGroup;
    alignas(64) uint8_t values[512];
    alignas(64) float scale[3][16] = {};
    for (int g = 0; g < weight.columns / kGroup; g++) {
        const uint8_t* tile = tiles + (size_t)(g / groups_per_tile) * F::bytes;
        i32 w[8];
        f32 d = splat(0.0f), d2 = d, m = d;
        F::Lines::unpack(tile + (size_t)(g % groups_per_tile) * F::Lines::bytes, w);
        F::scales(tile, g % groups_per_tile, d, d2, m);
        for (int j = 0; j < 8; j++) store_i(values + 64 * j, w[j]);
        store(scale[0], d), store(scale[1], F::has_halves ? d2 : d), store(scale[2], m);
        for (int c = 0; c < kGroup; c++) {
            int value = (int)values[64 * (c / 4) + 4 * lane + c % 4] - (F::offset_bits ? 1 << F::offset_bits : 0);
            float product = scale[c / 16][lane] * (float)value;
            out[g * kGroup + c] = F::has_minimum ? product + scale[2][lane] : product;
        }
    }
}

template <class F>
static void float_row(const Weight& weight, int row, float* out) {
    const uint8_t* data = weight.data + (size_t)(row / 16) * weight.columns * F::bytes;
    alignas(64) float lanes[16];
    for (int k = 0; k < weight.columns; k++) {
        store(lanes, F::column(data + (size_t)k * F::bytes));
        out[k] = lanes[row % 16];
    }
}

static void dequantise_row(const Weight& weight, int row, float* out) {
    switch (weight.format) {
        case F32: return float_row<Float<F32>>(weight, row, out);
        case BF16: return float_row<Float<BF16>>(weight, row, out);
        case F16: return float_row<Float<F16>>(weight, row, out);
        case Q4_0: return quantised_row<Quantised<Q4_0>>(weight, row, out);
        case Q4_1: return quantised_row<Quantised<Q4_1>>(weight, row, out);
        case Q5_0: return quantised_row<Quantised<Q5_0>>(weight, row, out);
        case Q5_1: return quantised_row<Quantised<Q5_1>>(weight, row, out);
        case Q8_0: return quantised_row<Quantised<Q8_0>>(weight, row, out);
        case Q4_K: return quantised_row<Quantised<Q4_K>>(weight, row, out);
        case Q5_K: return quantised_row<Quantised<Q5_K>>(weight, row, out);
        case Q6_K: return quantised_row<Quantised<Q6_K>>(weight, row, out);
    }
}

}  // namespace TANDEM_ISA
