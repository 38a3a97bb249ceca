// What the driver (step.cpp, api.cpp) and the kernels of each instruction set share: plain structs and one table
// of functions. ctypes mirrors the structs marked (python).
#pragma once

#include <cstddef>
#include <cstdint>

// Formats of a packed weight. The numbers are shared with layout.py.
enum Format : int32_t { F32, BF16, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, kFormats };

static inline bool is_quantised(int32_t format) { return format >= Q4_0; }

// (python) y = x W^T + bias. `data` is tiles of 16 rows, see formats.h. 0 rows: there is no such weight.
struct Weight {
    int32_t format, rows, columns, reserved;
    const uint8_t* data;
    const float* bias;
};

// Activations as the integer kernels read them: for each block of 16 rows and each group of 32 columns one record.
// `sum` holds minus the sum of a row's 32 values, `half_sum` minus those of its two halves of 16: they cancel the
// offset of weights that are stored unsigned. `scaled_sum` is scale * sum, for weights that have a minimum.
constexpr int kBlockRows = 16, kGroup = 32;
struct Record {
    int8_t values[kBlockRows][kGroup];
    float scale[kBlockRows], scaled_sum[kBlockRows];
    int32_t sum[kBlockRows], half_sum[2][kBlockRows];
};
static_assert(sizeof(Record) == 832, "13 cache lines");

// Rows in both forms, either of which may be absent: `records` [ceil(rows / 16)][columns / 32], `floats` [rows][columns].
struct Activations {
    Record* records;
    float* floats;
    int columns;
};

// What keys and values are held in. The numbers are shared with kv.py.
enum KvDtype : int32_t { kKvFloat32, kKvBfloat16, kKvFp8, kKvInt8 };

static constexpr int kv_bytes(KvDtype dtype) { return dtype == kKvFloat32 ? 4 : dtype == kKvBfloat16 ? 2 : 1; }

// (python) Entries [layers][slots][kv_heads] of head_dim numbers, and scales by which those are to be multiplied: of
// int8 one for each entry, of fp8 one for each layer, else null.
struct KvPool {
    KvDtype dtype;
    int32_t kv_heads, head_dim;
    int64_t slots;
    char *key, *value;
    float *key_scales, *value_scales;

    size_t entry_bytes() const { return (size_t)head_dim * kv_bytes(dtype); }
    size_t entry(int layer, int64_t slot, int head) const {
        return ((size_t)layer * slots + slot) * kv_heads + head;
    }
    float* scale(float* scales, int layer, size_t entry) const {
        return scales == nullptr ? nullptr : scales + (dtype == kKvInt8 ? entry : layer);
    }
};

// One head's work of one sequence: `count` queries that share a KV head, over the KV blocks of [first, last) splits.
constexpr int kKvBlock = 32;       // positions a block: online softmax goes block by block
constexpr int kKvSplit = 128;      // positions a split: partial results that are merged in order, at fixed positions
constexpr int kQueryBlock = 96;    // queries at once, at most

struct AttentionItem {
    const float* query[kQueryBlock];  // [head_dim] each
    float* out[kQueryBlock];          // [head_dim] each
    int first[kQueryBlock], last[kQueryBlock];  // positions a query sees: [first, last)
    int count, head_dim;
    float scale;
    const int32_t* slots;  // slots[position]
    int context;           // positions at and beyond it have no slot
    const char *key, *value;  // the KV head's first element in slot 0
    size_t slot_stride;       // bytes
    const float *key_scale, *value_scale;  // of the KV head in slot 0, or null
    size_t scale_stride;                   // 0: all slots have one
    KvDtype dtype;
};

// The running softmax of a query: a maximum beside a row of so many floats, the weighted values and then 16 partial
// sums of the weights. It starts with -infinity and zeros.
static inline int attention_row(int head_dim) { return head_dim + 16; }

// What a row adds to a head's recurrent state and, where it has a query, reads of it: key and query [key_dim], value and
// out one block of up to kStateColumns columns. beta is for the delta rule.
constexpr int kStateColumns = 64, kStateChunk = 16;
constexpr int kMostTaps = 16;  // of a convolution
struct StateRow {
    const float *key, *value, *query;
    float* out;
    float log_decay, beta;
};

// The best of the logits seen so far, the lowest column of equals, and where it is asked for the sum of all
// e^(logit - best). It starts as it is here. `poison` is zeros unless a logit was no number or infinite.
struct Best {
    float value = -3e38f, total = 0.0f;
    int64_t column = 0;
    float poison[16] = {};

    bool is_sound() const {
        float all = 0.0f;
        for (float lane : poison) all += lane;
        return all == 0.0f;
    }
};

struct Kernels {
    const char* name;
    // out [rows][16] = rows [row, row + rows) of the activations times tile `tile` of the weight, bias not added.
    // row is a multiple of 16; out has room for rows rounded up to 16.
    void (*linear_tile)(const Weight&, int tile, const Activations&, int row, int rows, float* out);
    void (*quantise)(const float* x, int groups, Record* records, int row);
    void (*rms_norm)(const float* x, const float* weight, float eps, int n, float* out);
    void (*rotate)(float* x, const float* cos, const float* sin, int head_dim);
    // gate and up [rows][16]; rows of out = act(gate) * up are `stride` apart
    void (*gate)(const float* gate, const float* up, int rows, int32_t activation, float* out, size_t stride);
    void (*add)(float* x, const float* y, int n);
    void (*add_tile)(const float* tile, int rows, int lanes, float* to, size_t stride);  // tile [rows][16]
    // tile [rows][16], best [rows]
    void (*observe)(const float* tile, int rows, int lanes, int column, bool wants_total, Best* best);
    void (*write_kv)(const float* x, int n, KvDtype dtype, void* out, float* scale);
    void (*dequantise_row)(const Weight&, int row, float* out);
    // Attends to splits [first, last) of positions; maxima and rows [count] go on from what they hold.
    void (*attend)(const AttentionItem&, int first_split, int last_split, float* maxima, float* rows, float* scratch);
    void (*merge)(int count, float* maxima, float* rows, const float* other_maxima, const float* other_rows, int head_dim);
    void (*finish)(const float* row, int head_dim, float* out);
    // state [key_dim][kStateColumns] goes through the rows, one after another; `lanes` columns of it are there.
    void (*recur)(const StateRow* rows, int count, int key_dim, int lanes, bool delta_rule, float* state);
    // out [channels] = the sum of taps [count][channels] times weight [count][channels], plus bias where there is one.
    void (*convolve)(const float* const* taps, const float* weight, const float* bias, int count, int channels, float* out);
    unsigned (*enter)();  // before and after a thread's work: tile registers, flush-to-zero
    void (*leave)(unsigned);
};

extern const Kernels kernels_scalar;
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
extern const Kernels kernels_avx512_bf16;
extern const Kernels kernels_amx;
extern const Kernels kernels_neon;

const Kernels& kernels();  // those of this machine

// Floats that `attend` needs as scratch.
static inline size_t attention_scratch(int head_dim) {
    const size_t dim = (size_t)(head_dim + 31) / 32 * 32;
    const size_t in_blocks = kQueryBlock * kKvBlock + 2 * kKvBlock * dim;
    // In the order of tile_memory in attention_tiles.h; pair_memory in attention_pairs.h is smaller.
    const size_t in_tiles = 7 * kKvSplit / 2 * 16 + kQueryBlock + (kQueryBlock / 2 + 8 + kKvSplit + 2 * 16) * dim;
    return kQueryBlock * attention_row(head_dim) + (in_blocks > in_tiles ? in_blocks : in_tiles);
}

size_t tile_bytes(int32_t format);  // bytes of `tile_columns` columns of 16 rows
int tile_columns(int32_t format);
