// The products of attention over bfloat16 caches in tile registers: scores and weighted values of a block of 32
// positions for up to 32 queries. Queries and probabilities are rounded to bfloat16, sums are float32; a query's sums
// do not depend on the queries beside it, since each is a row of its tile.
#pragma once

#include "simd.h"

namespace TANDEM_ISA {

#if defined(__AMX_BF16__)

constexpr int kTileRows = 16;

// What one item needs beside scores: parts of its scratch memory.
struct TileMemory {
    uint16_t* queries;        // [32][padded dim]
    uint16_t* keys;           // [padded dim / 2][32 positions][2]
    uint16_t* values;         // [head_dim / 16][16 pairs of positions][16][2]
    uint16_t* probabilities;  // [32][32]
    float* weighted;          // [32][head_dim]
};

static inline int padded_dim(int head_dim) { return (head_dim + 31) & ~31; }

static inline TileMemory tile_memory(float* scratch, int head_dim) {
    const int padded = padded_dim(head_dim);
    TileMemory memory;
    memory.queries = (uint16_t*)scratch;
    memory.keys = memory.queries + kQueryBlock * padded;
    memory.values = memory.keys + kKvBlock * padded;
    memory.probabilities = memory.values + kKvBlock * head_dim;
    memory.weighted = (float*)(memory.probabilities + kQueryBlock * kKvBlock);
    return memory;
}

enum { kSumsA, kSumsB, kRowsTile, kColumnsA, kColumnsB };

// Tiles of `rows` queries by 16 columns of sums, 32 bfloat16 of the queries, 16 pairs of rows of the other operand.
static void configure_attention(int rows) {
    alignas(64) TileConfig config = {};
    config.palette = 1;
    const int tile_rows[5] = {rows, rows, rows, kTileRows, kTileRows};
    for (int t = 0; t < 5; t++) config.rows[t] = (uint8_t)tile_rows[t], config.row_bytes[t] = 64;
    asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
}
template <int kTile>
static inline void tile_zero() { asm volatile("tilezero %%tmm%c0" ::"i"(kTile)); }
template <int kTile>
static inline void tile_load(const void* p, size_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(kTile) : "memory");
}
template <int kTile>
static inline void tile_store(void* p, size_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(kTile) : "memory");
}
template <int kSums, int kColumns>
static inline void tile_multiply() {
    asm volatile("tdpbf16ps %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(kColumns), "i"(kRowsTile), "i"(kSums));
}

// Rows of a tile for `count` queries: one or two tiles of them, as even as can be.
static inline int tile_rows(int count) { return count <= kTileRows ? count : (count + 1) / 2; }

static inline void to_bf16(uint16_t* p, f32 a) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(a)); }

static void round_queries(const float* const* query, int count, int head_dim, const TileMemory& memory) {
    const int padded = padded_dim(head_dim);
    for (int q = 0; q < kQueryBlock; q++) {
        uint16_t* to = memory.queries + (size_t)q * padded;
        for (int d = 0; d < padded; d += 16) {
            const bool is_there = q < count && d < head_dim;
            to_bf16(to + d, is_there ? load(query[q] + d) : splat(0.0f));
        }
    }
}

// Dimensions in pairs, as they lie: dword `position` of line d / 2.
static void pair_keys(const char* const* rows, int head_dim, uint16_t* keys) {
    i32 lines[4];
    for (int half = 0; half < kKvBlock; half += 16) {
        for (int d = 0; d < head_dim; d += 8) {
            transpose4(rows + half, (size_t)d * 2, lines);
            for (int j = 0; j < 4; j++) store_i(keys + (size_t)(d / 2 + j) * 2 * kKvBlock + 2 * half, lines[j]);
        }
    }
    for (int line = head_dim / 2; line < padded_dim(head_dim) / 2; line++)
        std::memset(keys + (size_t)line * 2 * kKvBlock, 0, 2 * kKvBlock * sizeof(uint16_t));
}

// Positions in pairs; those from `positions` on, whose probability is zero, are zeros.
static void pair_values(const char* const* rows, int positions, int head_dim, uint16_t* values) {
    alignas(64) uint16_t low[32], high[32];
    for (int i = 0; i < 32; i++) {
        low[i] = (uint16_t)(i / 2 + i % 2 * 32);
        high[i] = (uint16_t)(low[i] + 16);
    }
    const i32 low_index = load_i(low), high_index = load_i(high), none = splat_i(0);
    for (int p = 0; p < kKvBlock; p += 2) {
        for (int d = 0; d < head_dim; d += 32) {
            const __mmask32 there = head_dim - d < 32 ? 0xffff : 0xffffffff;
            i32 a = p < positions ? _mm512_maskz_loadu_epi16(there, rows[p] + 2 * d) : none;
            i32 b = p + 1 < positions ? _mm512_maskz_loadu_epi16(there, rows[p + 1] + 2 * d) : none;
            uint16_t* to = values + (size_t)(d / 16) * kKvBlock * 16 + (size_t)p * 16;
            store_i(to, _mm512_permutex2var_epi16(a, low_index, b));
            if (head_dim - d > 16) store_i(to + kKvBlock * 16, _mm512_permutex2var_epi16(a, high_index, b));
        }
    }
}

// scores [count rounded up to tiles][32], not scaled, of queries [begin, begin + count).
static void tile_scores(const TileMemory& memory, int begin, int count, int head_dim, float* scores) {
    const int padded = padded_dim(head_dim), rows = tile_rows(count);
    constexpr size_t line = 2 * kKvBlock * sizeof(uint16_t);
    for (int q = 0; q < count; q += rows) {
        tile_zero<kSumsA>(), tile_zero<kSumsB>();
        for (int d = 0; d < padded; d += 32) {
            const char* keys = (const char*)memory.keys + (size_t)(d / 2) * line;
            tile_load<kRowsTile>(memory.queries + (size_t)(begin + q) * padded + d, padded * sizeof(uint16_t));
            tile_load<kColumnsA>(keys, line);
            tile_load<kColumnsB>(keys + 64, line);
            tile_multiply<kSumsA, kColumnsA>();
            tile_multiply<kSumsB, kColumnsB>();
        }
        tile_store<kSumsA>(scores + kKvBlock * q, kKvBlock * sizeof(float));
        tile_store<kSumsB>(scores + kKvBlock * q + 16, kKvBlock * sizeof(float));
    }
}

// rows [count] = rows * correction + probabilities times values.
static void tile_weigh(const TileMemory& memory, const float* correction, int count, int head_dim, float* rows) {
    const int tile = tile_rows(count);
    for (int q = 0; q < count; q += tile) {
        tile_load<kRowsTile>(memory.probabilities + (size_t)q * kKvBlock, kKvBlock * sizeof(uint16_t));
        for (int d = 0; d < head_dim; d += 16) {
            tile_zero<kSumsA>();
            tile_load<kColumnsA>(memory.values + (size_t)d * kKvBlock, 64);
            tile_multiply<kSumsA, kColumnsA>();
            tile_store<kSumsA>(memory.weighted + (size_t)q * head_dim + d, head_dim * sizeof(float));
        }
    }
    for (int q = 0; q < count; q++) {
        float* to = rows + (size_t)q * attention_row(head_dim);
        const float* from = memory.weighted + (size_t)q * head_dim;
        const f32 factor = splat(correction[q]);
        for (int d = 0; d < head_dim; d += 16) store(to + d, fma(load(to + d), factor, load(from + d)));
    }
}

#endif

}  // namespace TANDEM_ISA
