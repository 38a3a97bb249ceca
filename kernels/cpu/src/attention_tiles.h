// Attention over caches of bfloat16, and of bytes, which bfloat16 holds exactly, in tile registers: a split of 128
// positions at a time, 16 queries in each tile.
//
// Keys lie in a cache of bfloat16 as a tile wants its rows, so scores come out transposed: [position][query], with as
// many queries side by side as there are (4, 8 or 16), and the softmax goes over positions without a horizontal step.
// Queries and probabilities are rounded to bfloat16, sums are float32. A query is a column of one tile and a row of the
// other, and its probabilities are summed in four chains, by position modulo 4, whatever lies beside it: its result
// does not depend on other queries.
#pragma once

#include "attention_bf16.h"

namespace TANDEM_ISA {

#if defined(__AMX_BF16__)

constexpr int kTileRows = 16, kOutTiles = 4;

// Parts of an item's scratch memory. `pairs` are two bfloat16 in a dword: of neighbouring dimensions or positions.
// What one stage of a split leaves to the next is there twice, see attend_split.
struct TileMemory {
    uint32_t* queries;        // pairs of dimensions [padded dim / 2][lanes], for each 16 of the item
    uint16_t* rows;           // queries [16][padded dim]
    uint16_t* keys;           // those that are copied [128][padded dim]
    float* scores[2];         // [128][lanes], then probabilities
    uint32_t* probabilities;  // pairs of positions [64][lanes]
    uint32_t* weights[2];     // the same by query, [128 / 32][16][16]
    uint32_t* values;         // pairs of positions [128 / 32][padded dim / 16][16][16]
    float* sums[2];           // weighted values [16][padded dim]
};

// Dwords of 16 queries, and of what their last line has beyond the lanes.
static inline int query_words(int head_dim) { return padded_dim(head_dim) / 2 * kTileRows + kTileRows; }

static inline TileMemory tile_memory(float* scratch, int head_dim) {
    const int padded = padded_dim(head_dim);
    TileMemory memory;
    auto take = [&](int words) { return scratch += words, scratch - words; };
    for (float*& scores : memory.scores) scores = take(kKvSplit * kTileRows);
    memory.probabilities = (uint32_t*)take(kKvSplit / 2 * kTileRows);
    for (uint32_t*& weights : memory.weights) weights = (uint32_t*)take(kKvSplit / 2 * kTileRows);
    memory.queries = (uint32_t*)take(kQueryBlock / kTileRows * query_words(head_dim));
    memory.rows = (uint16_t*)take(kTileRows / 2 * padded);
    memory.keys = (uint16_t*)take(kKvSplit / 2 * padded);
    memory.values = (uint32_t*)take(kKvSplit / 2 * padded);
    for (float*& sums : memory.sums) sums = take(kTileRows * padded);
    return memory;
}

// Tile registers: sums of weighted values, then a tile of keys or values, of weights, of scores and of queries. With 16
// lanes all are alike, and the first four are of scores, too.
enum { kOut, kCache = kOutTiles, kWeightRows, kScores, kQueries };

static void configure_attention(int lanes) {
    if (!becomes_current(lanes)) return;
    alignas(64) TileConfig config = {};
    config.palette = 1;
    for (int t = 0; t < 8; t++) config.rows[t] = kTileRows, config.row_bytes[t] = 64;
    for (int t = 0; t < kOutTiles; t++) config.rows[kOut + t] = (uint8_t)lanes;
    config.rows[kWeightRows] = (uint8_t)lanes;
    config.row_bytes[kScores] = config.row_bytes[kQueries] = (uint16_t)(4 * lanes);
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
template <int kSums, int kRows, int kColumns>
static inline void tile_multiply() {
    asm volatile("tdpbf16ps %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(kColumns), "i"(kRows), "i"(kSums));
}

static inline f32 swap_halves(f32 a) { return _mm512_shuffle_f32x4(a, a, 0x4e); }
static inline f32 swap_quarters(f32 a) { return _mm512_shuffle_f32x4(a, a, 0xb1); }

// Queries that go through tiles together, from `begin` on.
static inline int queries_from(const AttentionItem& item, int begin) {
    return item.count - begin < kTileRows ? item.count - begin : kTileRows;
}
static inline int lanes_of(int queries) { return queries <= 4 ? 4 : queries <= 8 ? 8 : 16; }

// Pairs of dimensions of queries [begin, begin + count), rounded, as columns.
static void lay_queries(const AttentionItem& item, int begin, int count, int lanes, const TileMemory& memory) {
    uint32_t* to = memory.queries + begin / kTileRows * query_words(item.head_dim);
    const int padded = padded_dim(item.head_dim);
    const char* rows[kTileRows];
    for (int q = 0; q < kTileRows; q++) {
        uint16_t* row = memory.rows + (size_t)q * padded;
        rows[q] = (const char*)row;
        if (q >= count && q >= lanes) continue;
        for (int d = 0; d < padded; d += 16) {
            const bool is_there = q < count && d < item.head_dim;
            const f32 part = is_there ? load(item.query[begin + q] + d) : splat(0.0f);
            _mm256_storeu_si256((__m256i*)(row + d), (__m256i)_mm512_cvtneps_pbh(part));
        }
    }
    i32 lines[4];
    for (int pair = 0; pair < padded / 2; pair += 4) {  // what a line has beyond the lanes, the next one overwrites
        transpose4(rows, (size_t)pair * 4, lines);
        for (int j = 0; j < 4; j++) store_i(to + (size_t)(pair + j) * lanes, lines[j]);
    }
}

// Where the keys of a split lie as rows, for each 16 positions, and how far apart.
struct SplitKeys {
    const char* rows[kKvSplit / kTileRows];
    size_t stride[kKvSplit / kTileRows];
};

// Keys of bfloat16 are used where they lie; others and those that are not evenly apart are copied, as are rows that are
// no whole tiles.
template <KvDtype kDtype>
static void find_keys(const AttentionItem& item, int base, int positions, uint16_t* copies, SplitKeys& keys) {
    const int padded = padded_dim(item.head_dim);
    for (int tile = 0; tile < positions / kTileRows; tile++, copies += kTileRows * padded) {
        const int first = base + tile * kTileRows;
        const int32_t* slots = item.slots + first;
        const int there = item.context - first < kTileRows ? item.context - first : kTileRows;
        if (kDtype == kKvBfloat16 && there == kTileRows && item.head_dim % kWordDims == 0) {
            const i32 even = _mm512_add_epi32(splat_i(slots[0]), lane_numbers());
            if (_mm512_cmpneq_epi32_mask(load_i(slots), even) == 0) {
                keys.rows[tile] = item.key + (size_t)slots[0] * item.slot_stride;
                keys.stride[tile] = item.slot_stride;
                continue;
            }
        }
        for (int p = 0; p < kTileRows; p++) {
            const int slot = item.slots[first + p < item.context ? first + p : item.context - 1];
            const char* row = item.key + (size_t)slot * item.slot_stride;
            for (int d = 0; d < padded; d += kWordDims)
                store_i(copies + (size_t)p * padded + d, load_words<kDtype>(row, d, item.head_dim));
        }
        keys.rows[tile] = (const char*)copies, keys.stride[tile] = padded * sizeof(uint16_t);
    }
}

// Scores of 16 positions for each of up to four tiles of keys, `kLanes` queries wide.
template <int kLanes, int kTiles>
static inline void score_tiles(const char* const* keys, const size_t* strides, const uint32_t* queries, int head_dim,
                               float* scores) {
    constexpr int first = kLanes == 16 ? kOut : kScores;
    unrolled<0, kTiles>([&]<int t>() { tile_zero<first + t>(); });
    for (int d = 0; d < head_dim; d += kWordDims) {
        tile_load<kQueries>(queries + (size_t)d / 2 * kLanes, 4 * kLanes);
        unrolled<0, kTiles>([&]<int t>() {
            tile_load<kCache>(keys[t] + 2 * d, strides[t]);
            tile_multiply<first + t, kCache, kQueries>();
        });
    }
    unrolled<0, kTiles>([&]<int t>() { tile_store<first + t>(scores + t * kTileRows * kLanes, 4 * kLanes); });
}

// scores [positions][lanes] of queries from `begin`, not scaled. There is a whole number of blocks of positions.
template <int kLanes>
static void score_keys(const SplitKeys& keys, int positions, int begin, int head_dim, const TileMemory& memory,
                       float* scores) {
    const uint32_t* queries = memory.queries + begin / kTileRows * query_words(head_dim);
    auto run = [&]<int kTiles>(int tile) {
        score_tiles<kLanes, kTiles>(keys.rows + tile, keys.stride + tile, queries, head_dim,
                                    scores + (size_t)tile * kTileRows * kLanes);
    };
    const int tiles = positions / kTileRows;
    if constexpr (kLanes < 16) {
        for (int tile = 0; tile < tiles; tile++) run.template operator()<1>(tile);
    } else {
        for (int tile = 0; tile + 4 <= tiles; tile += 4) run.template operator()<4>(tile);
        if (tiles % 4 != 0) run.template operator()<2>(tiles - 2);  // a block has two
    }
}

// Pairs of the values of 32 positions from `base`. Those beyond the context, whose probability is zero, are zeros.
// Of 32 dimensions the first tile has the even fours, the second the odd ones: as unpacking leaves them.
template <KvDtype kDtype>
static void pair_values(const AttentionItem& item, int base, uint32_t* values) {
    const int positions = item.context - base < kKvBlock ? item.context - base : kKvBlock;
    const int32_t* slots = item.slots + base;
    for (int d = 0; d < item.head_dim; d += 32, values += 2 * kTileRows * 16) {
        auto row = [&](int p) {
            if (p >= positions) return splat_i(0);
            return load_words<kDtype>(item.value + (size_t)slots[p] * item.slot_stride, d, item.head_dim);
        };
        for (int p = 0; p < kKvBlock; p += 2) {
            const i32 a = row(p), b = row(p + 1);
            store_i(values + p / 2 * 16, _mm512_unpacklo_epi16(a, b));
            store_i(values + p / 2 * 16 + kTileRows * 16, _mm512_unpackhi_epi16(a, b));
        }
    }
}

// Scores of queries [begin, begin + count) to probabilities beside the largest score of the split, times the scales of
// values and as bfloat16 pairs, and to their sums in float32. Positions that a query does not see are zeros.
template <KvDtype kDtype, int kLanes>
static void soften(const AttentionItem& item, int base, int positions, int begin, int count, const SplitScales& scales,
                   float* scores, uint32_t* probabilities, float* maxima, float* totals) {
    constexpr int kPositions = 16 / kLanes, kChains = 4 / kPositions > 0 ? 4 / kPositions : 1;  // of a vector; sums
    alignas(64) int32_t first[16], last[16], at[16];
    bool all_visible = true;
    for (int i = 0; i < 16; i++) {
        const int q = i % kLanes < count ? i % kLanes : 0;
        first[i] = item.first[begin + q] - base, last[i] = item.last[begin + q] - base, at[i] = i / kLanes;
        all_visible &= first[i] <= 0 && last[i] >= positions;
    }
    const i32 from = load_i(first), to = load_i(last), offset = load_i(at);
    auto visible = [&](int p) {
        const i32 position = _mm512_add_epi32(offset, splat_i(p));
        return (__mmask16)(_mm512_cmple_epi32_mask(from, position) & _mm512_cmplt_epi32_mask(position, to));
    };
    auto of_positions = [&](const float* some, int p) { return _mm512_permutexvar_ps(offset, load(some + p)); };
    const f32 lowest = splat(-INFINITY);
    f32 tops[4] = {lowest, lowest, lowest, lowest};
    for (int p = 0; p < positions; p += 4 * kPositions) {
        for (int v = 0; v < 4; v++) {
            const int vector = p + v * kPositions;
            f32 s = load(scores + (size_t)vector * kLanes);
            if constexpr (has_scales(kDtype)) {
                s = mul(s, of_positions(scales.keys, vector));
                store(scores + (size_t)vector * kLanes, s);
            }
            tops[v] = max(tops[v], all_visible ? s : _mm512_mask_blend_ps(visible(vector), lowest, s));
        }
    }
    f32 top = max(max(tops[0], tops[1]), max(tops[2], tops[3]));
    if constexpr (kLanes <= 8) top = max(top, swap_halves(top));
    if constexpr (kLanes <= 4) top = max(top, swap_quarters(top));
    top = mul(top, splat(item.scale));
    store(maxima, top);
    const f32 scale = splat(item.scale * kLog2E);
    const f32 shift = mul(select_less(top, splat(-3e38f), splat(0.0f), top), splat(-kLog2E));
    alignas(64) uint16_t order[32];
    for (int w = 0; w < 32; w++) order[w] = (uint16_t)((2 * (w / 2 / kLanes) + w % 2) * kLanes + w / 2 % kLanes);
    const i32 in_pairs = load_i(order);
    f32 sums[kChains];
    for (int c = 0; c < kChains; c++) sums[c] = splat(0.0f);
    for (int p = 0; p < positions; p += 4 * kPositions) {
        f32 some[4];
        for (int v = 0; v < 4; v++) {
            const int vector = p + v * kPositions;
            some[v] = exp2_of(fma(load(scores + (size_t)vector * kLanes), scale, shift));
            if (!all_visible) some[v] = _mm512_maskz_mov_ps(visible(vector), some[v]);
            sums[v % kChains] = add(sums[v % kChains], some[v]);
            if constexpr (has_scales(kDtype)) some[v] = mul(some[v], of_positions(scales.values, vector));
        }
        for (int v = 0; v < 4; v += 2) {
            const i32 words = (i32)_mm512_cvtne2ps_pbh(some[v + 1], some[v]);
            store_i(probabilities + (size_t)(p + v * kPositions) / 2 * kLanes,
                    _mm512_permutexvar_epi16(in_pairs, words));
        }
    }
    f32 sum = sums[0];
    if constexpr (kLanes == 16) sum = add(add(sums[0], sums[2]), add(sums[1], sums[3]));
    if constexpr (kLanes == 8) sum = add(sums[0], sums[1]), sum = add(sum, swap_halves(sum));
    if constexpr (kLanes == 4) sum = add(sum, swap_halves(sum)), sum = add(sum, swap_quarters(sum));
    store(totals, sum);
}

// The probabilities' pairs by query: rows of a tile for each 32 positions.
static void turn_probabilities(const uint32_t* probabilities, int positions, int lanes, uint32_t* weights) {
    for (int block = 0; block < positions / kKvBlock; block++) {
        const char* pairs[kTileRows];
        for (int i = 0; i < kTileRows; i++)
            pairs[i] = (const char*)(probabilities + (size_t)(block * kTileRows + i) * lanes);
        for (int q = 0; q < lanes; q += 4) {
            i32 lines[4];
            transpose4(pairs, (size_t)q * 4, lines);
            for (int j = 0; j < 4; j++) store_i(weights + (size_t)(block * kTileRows + q + j) * kTileRows, lines[j]);
        }
    }
}

// Sums of two or four tiles of values, from `tile` on.
template <int kTiles>
static inline void weigh_tiles(const uint32_t* weights, const uint32_t* values, int positions, int tile, int padded,
                               float* sums) {
    unrolled<0, kTiles>([]<int t>() { tile_zero<kOut + t>(); });
    for (int block = 0; block < positions / kKvBlock; block++) {
        const uint32_t* some = values + (size_t)(block * (padded / 16) + tile) * kTileRows * 16;
        tile_load<kWeightRows>(weights + (size_t)block * kTileRows * kTileRows, 64);
        unrolled<0, kTiles>([&]<int t>() {
            tile_load<kCache>(some + kTileRows * 16 * t, 64);
            tile_multiply<kOut + t, kWeightRows, kCache>();
        });
    }
    unrolled<0, kTiles>([&]<int t>() { tile_store<kOut + t>(sums + 16 * (tile + t), padded * sizeof(float)); });
}
static void weigh_values(const uint32_t* weights, const uint32_t* values, int positions, int padded, float* sums) {
    int tile = 0;
    for (; tile + 4 <= padded / 16; tile += 4) weigh_tiles<4>(weights, values, positions, tile, padded, sums);
    if (tile < padded / 16) weigh_tiles<2>(weights, values, positions, tile, padded, sums);
}

// Takes a split's maxima, totals and weighted values of `count` queries into their running softmax, as `merge` does.
static void take_split(const float* all_sums, int count, int head_dim, const float* split_maxima, const float* totals,
                       float* maxima, float* rows) {
    const Factors factors = merge_maxima(count, maxima, split_maxima);
    alignas(64) int32_t first[16], second[16];
    for (int i = 0; i < 16; i++) {
        first[i] = i / 8 * 4 + i % 4 + i / 4 % 2 * 16;
        second[i] = first[i] + 8;
    }
    const i32 low = load_i(first), high = load_i(second);
    const int padded = padded_dim(head_dim);
    for (int q = 0; q < count; q++) {
        float* row = rows + (size_t)q * attention_row(head_dim);
        const float* sums = all_sums + (size_t)q * padded;
        const f32 keep = splat(factors.mine[q]), factor = splat(factors.theirs[q]);
        for (int d = 0; d < head_dim; d += 32) {
            const f32 even = load(sums + d), odd = load(sums + d + 16);
            auto take = [&](float* to, i32 order) {
                store(to, fma(load(to), keep, mul(_mm512_permutex2var_ps(even, order, odd), factor)));
            };
            take(row + d, low);
            if (d + 16 < head_dim) take(row + d + 16, high);
        }
        row[head_dim] = __builtin_fmaf(row[head_dim], factors.mine[q], totals[q] * factors.theirs[q]);
    }
}

// The item over the split at `base`, once its queries are laid out. maxima and rows go on from what they hold.
//
// 16 queries go through four stages, and each stage takes those that went through the one before it a round ago: what
// the tile unit writes cannot be read at once, nor the other way round.
template <KvDtype kDtype>
static void attend_split(const AttentionItem& item, int base, float* maxima, float* rows, const TileMemory& memory) {
    const int left = item.context - base < kKvSplit ? item.context - base : kKvSplit;
    const int positions = (left + kKvBlock - 1) / kKvBlock * kKvBlock, padded = padded_dim(item.head_dim);
    // Queries [first, last), which go by position, see some of these.
    int first = 0, last = (item.count + kTileRows - 1) / kTileRows * kTileRows;
    while (first < last && item.last[first + queries_from(item, first) - 1] <= base) first += kTileRows;
    while (first < last && item.first[last - kTileRows] >= base + left) last -= kTileRows;
    if (first == last) return;
    for (int p = 0; p < positions; p += kKvBlock)
        pair_values<kDtype>(item, base + p, memory.values + (size_t)p / 2 * padded);
    SplitKeys keys;
    find_keys<kDtype>(item, base, positions, memory.keys, keys);
    SplitScales scales;
    if constexpr (has_scales(kDtype)) take_scales(item, base, left, scales);
    alignas(64) float split_maxima[4][16], totals[4][16];
    // Queries [begin, end), with lanes that suit each 16 of them.
    auto run = [&]<int kLanes>(int begin, int end) {
        auto stage = [&](int q, auto take) {
            const int nth = q / kTileRows;
            if (begin <= q && q < end) take(q, nth % 2, split_maxima[nth % 4], totals[nth % 4]);
        };
        for (int q = begin; q < end + 3 * kTileRows; q += kTileRows) {
            stage(q, [&](int at, int turn, float*, float*) {
                score_keys<kLanes>(keys, positions, at, item.head_dim, memory, memory.scores[turn]);
            });
            stage(q - kTileRows, [&](int at, int turn, float* maximum, float* total) {
                soften<kDtype, kLanes>(item, base, positions, at, queries_from(item, at), scales, memory.scores[turn],
                                       memory.probabilities, maximum, total);
                turn_probabilities(memory.probabilities, positions, kLanes, memory.weights[turn]);
            });
            stage(q - 2 * kTileRows, [&](int, int turn, float*, float*) {
                weigh_values(memory.weights[turn], memory.values, positions, padded, memory.sums[turn]);
            });
            stage(q - 3 * kTileRows, [&](int at, int turn, const float* maximum, const float* total) {
                take_split(memory.sums[turn], queries_from(item, at), item.head_dim, maximum, total, maxima + at,
                           rows + (size_t)at * attention_row(item.head_dim));
            });
        }
    };
    const int lanes = lanes_of(queries_from(item, last - kTileRows)), whole = lanes == 16 ? last : last - kTileRows;
    if (first < whole) configure_attention(16), run.template operator()<16>(first, whole);
    if (lanes < 16) configure_attention(lanes);
    if (lanes == 8) run.template operator()<8>(whole, last);
    if (lanes == 4) run.template operator()<4>(whole, last);
}

// As `attend` of kernels.h.
template <KvDtype kDtype>
static void attend_bf16(const AttentionItem& item, int first_split, int last_split, float* maxima, float* rows,
                        float* scratch) {
    const TileMemory memory = tile_memory(scratch, item.head_dim);
    for (int q = 0; q < item.count; q += kTileRows)
        lay_queries(item, q, queries_from(item, q), lanes_of(queries_from(item, q)), memory);
    for (int split = first_split; split < last_split; split++)
        attend_split<kDtype>(item, split * kKvSplit, maxima, rows, memory);
}

#endif

}  // namespace TANDEM_ISA
