// y = x W^T for one tile of 16 outputs. A row's value is built by one chain of operations, group after group, in
// the same order however many rows go together and whichever unit makes the integer dot products; those are exact.
#pragma once

#include "formats.h"

namespace TANDEM_ISA {

constexpr int kPrefetch = 4096;  // bytes ahead of the weights being read: what eight rows take to multiply hides a miss

// One row's group, or half of one: y += scale * d * dot (+ m * scaled_sum). The only place where floats are rounded.
template <class F>
static inline f32 accumulate(f32 y, i32 dot, f32 d, f32 m, float scale, float scaled_sum) {
    y = fma(to_float(dot), mul(splat(scale), d), y);
    return F::has_minimum ? fma(m, splat(scaled_sum), y) : y;
}

template <class F>
static inline i32 cancel_offset(const int32_t* negative_sum) {
    return F::offset_bits ? splat_i((int32_t)((uint32_t)*negative_sum << F::offset_bits)) : splat_i(0);
}

// Calls step.template operator()<j>() for each j of [kFirst, kLast): a loop whose index is a constant.
template <int kFirst, int kLast, class Step>
static inline void unrolled(Step step) {
    if constexpr (kFirst < kLast) {
        step.template operator()<kFirst>();
        unrolled<kFirst + 1, kLast>(step);
    }
}

// Flattened: a function that is not inlined would take and give lines of weights through memory.
template <class F, int kRows>
[[gnu::flatten]] static void few_rows(const uint8_t* tile, int groups, const Record* records, int row, float* out) {
    f32 y[kRows];
    unrolled<0, kRows>([&]<int r>() { y[r] = splat(0.0f); });
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
        // Addresses of the first row: those of the others are so many bytes on.
        const int8_t* values = record.values[row];
        const float *scale = record.scale + row, *scaled_sum = record.scaled_sum + row;
        // Rows go side by side through a line of weights: their chains of products hide each other's latency.
        auto add = [&]<int kFirst, int kLast>(const int32_t* negative_sum, f32 d) {
            Dot<F::Lines::bits> dots[kRows];
            unrolled<0, kRows>([&]<int r>() { dots[r].sum = cancel_offset<F>(negative_sum + row + r); });
            unrolled<kFirst, kLast>([&]<int j>() {
                constexpr int line = F::has_halves ? j : j / 2 + j % 2 * 4;  // as they are unpacked
                unrolled<0, kRows>(
                    [&]<int r>() { dots[r].template add<j - kFirst, line>(w[line], values + kGroup * r); });
            });
            unrolled<0, kRows>(
                [&]<int r>() { y[r] = accumulate<F>(y[r], dots[r].sum, d, m, scale[r], scaled_sum[r]); });
        };
        if constexpr (F::has_halves) {
            add.template operator()<0, 4>(record.half_sum[0], d);
            add.template operator()<4, 8>(record.half_sum[1], d2);
        } else {
            add.template operator()<0, 8>(record.sum, d);
        }
        if (inner == groups_per_tile - 1) tile += F::bytes;
    }
    unrolled<0, kRows>([&]<int r>() { store(out + kLanes * r, y[r]); });
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
// Tile registers: four of integer sums of 16 rows, activations and weights of 32 columns, the same of 16 columns.
enum { kSums, kActs = 4, kWeights, kHalfActs, kHalfWeights };

// Notes that the tile registers of this thread are configured as `shape`, a number for each; false if they are already.
static inline bool becomes_current(int shape) {
    static thread_local int current = 0;
    if (current == shape) return false;
    current = shape;
    return true;
}

static void configure_tiles() {
    if (!becomes_current(-1)) return;
    alignas(64) TileConfig config = {};
    config.palette = 1;
    const uint8_t rows[8] = {16, 16, 16, 16, 16, 8, 16, 4}, row_bytes[8] = {64, 64, 64, 64, 32, 64, 16, 64};
    for (int t = 0; t < 8; t++) config.rows[t] = rows[t], config.row_bytes[t] = row_bytes[t];
    asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
}
static void release_tiles() {
    if (becomes_current(0)) asm volatile("tilerelease" ::: "memory");
}

// Sums = activations (signed) times weights (unsigned) over one group, or over half of one. Memory is named rather than
// all of it claimed, which would keep the rows that are being accumulated out of registers.
template <int kSum, int kA, int kW>
static inline void tile_dot(const int8_t* activations, const uint8_t* weights) {
    constexpr int part = kA == kActs ? 1 : 2;
    asm volatile(
        "tilezero %%tmm%c[sums]\n\t"
        "tileloadd (%[a],%[a_stride],1), %%tmm%c[acts]\n\t"
        "tileloadd (%[w],%[line],1), %%tmm%c[weights]\n\t"
        "tdpbsud %%tmm%c[weights], %%tmm%c[acts], %%tmm%c[sums]"
        :
        : [a] "r"(activations), [a_stride] "r"((long)kGroup), [w] "r"(weights), [line] "r"(64L), [sums] "i"(kSums + kSum),
          [acts] "i"(kA), [weights] "i"(kW), "m"(*(const int8_t(*)[(kBlockRows - 1) * kGroup + kGroup / part])activations),
          "m"(*(const uint8_t(*)[16 * kGroup / part])weights));
}
template <int kSum>
static inline void store_sums(int32_t* sums) {
    asm volatile("tilestored %%tmm%c[sums], (%[out],%[line],1)"
                 : "=m"(*(int32_t(*)[kBlockRows * 16])sums)
                 : [out] "r"(sums), [line] "r"(64L), [sums] "i"(kSums + kSum));
}

template <class F>
static inline const uint8_t* group_lines(const uint8_t* tile, int g) {
    constexpr int groups_per_tile = F::columns / kGroup;
    return tile + (size_t)(g / groups_per_tile) * F::bytes + (size_t)(g % groups_per_tile) * F::Lines::bytes;
}

// Adds groups [begin, end), which kAhead divides, to out [16][16]. The tile unit multiplies the next kAhead groups before
// these are accumulated: what it stores cannot be loaded at once. The first block of rows to come by also fetches the
// weights that follow these: later, unpacking would wait for them. Flattened, and a whole kAhead at a time: else y would
// lie in memory.
template <class F, bool kFetch, int kAhead>
[[gnu::flatten]] static void block_rows(const uint8_t* tile, const uint8_t* weights, int begin, int end,
                                        const Record* records, float* out) {
    constexpr int groups_per_tile = F::columns / kGroup, parts = F::has_halves ? 2 : 1;
    alignas(64) int32_t sums[2 * kAhead][parts][kBlockRows * 16];
    auto of_group = [&](int g) { return sums[(g - begin) % (2 * kAhead)]; };
    auto multiply = [&](int first) {
        if (first >= end) return;
        unrolled<0, kAhead>([&]<int i>() {
            const int8_t* a = &records[first + i].values[0][0];
            const uint8_t* w = weights + (size_t)(first + i - begin) * 512;
            if constexpr (F::has_halves)
                tile_dot<2 * i, kHalfActs, kHalfWeights>(a, w), tile_dot<2 * i + 1, kHalfActs, kHalfWeights>(a + 16, w + 256);
            else
                tile_dot<i, kActs, kWeights>(a, w);
        });
        unrolled<0, kAhead * parts>([&]<int i>() { store_sums<i>(of_group(first + i / parts)[i % parts]); });
    };
    f32 y[kBlockRows];
    unrolled<0, kBlockRows>([&]<int r>() { y[r] = begin == 0 ? splat(0.0f) : load(out + kLanes * r); });
    const size_t ahead = (size_t)(end - begin) / groups_per_tile * F::bytes;
    multiply(begin);
    for (int first = begin; first < end; first += kAhead) {
        multiply(first + kAhead);
        for (int g = first; g < first + kAhead; g++) {
            if (kFetch) {
                const uint8_t* lines = group_lines<F>(tile, g);
                constexpr int bytes = F::bytes / groups_per_tile;
                for (int line = 0; line < bytes; line += 64) prefetch(lines + ahead + line);
            }
            f32 d, d2, m;
            F::scales(tile + (size_t)(g / groups_per_tile) * F::bytes, g % groups_per_tile, d, d2, m);
            const Record& record = records[g];
            auto add = [&](const int32_t* sum, const int32_t* negative_sum, f32 d) {
                unrolled<0, kBlockRows>([&]<int r>() {
                    i32 dot = load_i(sum + 16 * r);
                    if (F::offset_bits) dot = _mm512_add_epi32(dot, cancel_offset<F>(negative_sum + r));
                    y[r] = accumulate<F>(y[r], dot, d, m, record.scale[r], record.scaled_sum[r]);
                });
            };
            add(of_group(g)[0], F::has_halves ? record.half_sum[0] : record.sum, d);
            if constexpr (F::has_halves) add(of_group(g)[1], record.half_sum[1], d2);
        }
    }
    unrolled<0, kBlockRows>([&]<int r>() { store(out + kLanes * r, y[r]); });
}

// Of 16 rows, so many cost the vector unit more than the tile unit takes for all of them: what the two do overlaps
// little, since tiles are loaded and stored through the vector unit's ports.
constexpr int kBlockThreshold = 13;
constexpr int kUnpacked = 24;  // groups unpacked at a time: 12 KB, which leaves the L1 room for activations

template <class F>
static void row_blocks(const uint8_t* tile, int groups, const Record* records, int blocks, float* out) {
    alignas(64) uint8_t weights[kUnpacked * 512];
    for (int begin = 0; begin < groups; begin += kUnpacked) {
        const int end = begin + kUnpacked < groups ? begin + kUnpacked : groups;
        for (int g = begin; g < end; g++) {
            i32 w[8];
            F::Lines::unpack(group_lines<F>(tile, g), w);
            for (int j = 0; j < 8; j++) store_i(weights + (size_t)(g - begin) * 512 + 64 * j, w[j]);
        }
        const int pairs_end = end - (end - begin) % 2;
        for (int b = 0; b < blocks; b++) {
            auto add_pairs = b == 0 ? block_rows<F, true, 2> : block_rows<F, false, 2>;
            const Record* x = records + (size_t)b * groups;
            float* to = out + (size_t)b * kBlockRows * kLanes;
            if (pairs_end > begin) add_pairs(tile, weights, begin, pairs_end, x, to);
            if (pairs_end == end) continue;
            block_rows<F, false, 1>(tile, weights + (size_t)(pairs_end - begin) * 512, pairs_end, end, x, to);
        }
    }
}

#else
static void release_tiles() {}
#endif

// Rows of a block that are not there are multiplied too, and what is in their place may be denormal: slow, if not
// taken for zero. Returns the state of the thread that `leave` restores.
static unsigned enter() {
#if defined(__SSE__)
    constexpr unsigned flush_to_zero = 0x8000, denormals_are_zero = 0x40;
    const unsigned before = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(before | flush_to_zero | denormals_are_zero);
    return before;
#else
    return 0;
#endif
}
static void leave([[maybe_unused]] unsigned before) {
    release_tiles();
#if defined(__SSE__)
    __builtin_ia32_ldmxcsr(before);
#endif
}

template <class F>
static void quantised_tile(const Weight& weight, int tile, const Activations& x, int row, int rows, float* out) {
    const int groups = x.columns / kGroup;
    const uint8_t* data = weight.data + (size_t)tile * (x.columns / F::columns) * F::bytes;
    const Record* records = x.records + (size_t)(row / kBlockRows) * groups;
    int r = 0;
#if defined(__AMX_INT8__)
    const int blocks = rows / kBlockRows + (rows % kBlockRows >= kBlockThreshold);
    if (blocks > 0) configure_tiles(), row_blocks<F>(data, groups, records, blocks, out);
    r = blocks * kBlockRows;
#endif
    for (; r < rows; r += kRegisterRows) {
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
            const uint8_t byte = values[64 * (c / 4) + 4 * lane + c % 4];
            int value = (kSignedWeights ? (int8_t)byte : byte) - (F::offset_bits ? 1 << F::offset_bits : 0);
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
