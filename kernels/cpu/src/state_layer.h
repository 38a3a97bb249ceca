// A layer with recurrent state over the rows of a pass: linear attention, and the convolution before it.
#pragma once

#include "job.h"

namespace {

// Heads, and blocks of columns of their states, are independent of one another: each item is one of them, over all rows
// of a sequence in order. So a row is computed from the state at the last chunk's end by the same operations always.
struct Recurrence {
    const RecurrenceCall& c;
    const int threads;
    const Kernels& k = kernels();
    const int blocks = (c.value_dim + kStateColumns - 1) / kStateColumns, shared = c.heads / c.key_heads;
    const int keys = c.key_heads * c.key_dim, values = c.heads * c.value_dim;  // widths, of a row's parts
    const int width = keys + values + c.heads * (c.delta_rule ? 2 : 1);
    float* states = nullptr;

    void lay_out(Workspace& space) {
        states = space.take<float>((size_t)threads * c.key_dim * kStateColumns);
    }
    void fill() {}

    void run(const Member& member) {
        const unsigned before = k.enter();
        float* state = states + (size_t)member.index * c.key_dim * kStateColumns;
        member.take_turns(c.spans * c.heads * blocks, [&](int item) {
            advance(c.span[item / (c.heads * blocks)], item / blocks % c.heads, item % blocks, state);
        });
        member.sync();  // recent rows are read no more
        int first, last;
        member.share(c.spans, first, last);
        for (int s = first; s < last; s++) keep_recent(c.span[s]);
        k.leave(before);
    }

    // One block of columns of one head over the rows of a span.
    void advance(const StateSpan& s, int head, int block, float* state) {
        const int at = block * kStateColumns, lanes = min(kStateColumns, c.value_dim - at);
        const size_t line = (size_t)shared * c.value_dim;
        const size_t place = (size_t)(head / shared) * c.key_dim * line + (size_t)(head % shared) * c.value_dim + at;
        std::memset(state, 0, sizeof(float) * c.key_dim * kStateColumns);
        const float* from = c.recurrent + s.table_row * (size_t)c.key_heads * c.key_dim * line + place;
        for (int d = 0; d < c.key_dim && s.start >= kStateChunk; d++)
            std::memcpy(state + (size_t)d * kStateColumns, from + d * line, sizeof(float) * lanes);
        const StateStore* store = c.store + s.first_store;
        const int cached = s.start % kStateChunk;
        for (int chunk = 0; chunk * kStateChunk < cached + s.rows; chunk++) {
            StateRow rows[kStateChunk];
            const int end = min(kStateChunk, cached + s.rows - chunk * kStateChunk);
            for (int i = 0; i < end; i++) rows[i] = row_of(s, chunk * kStateChunk + i - cached, i, head, at);
            k.recur(rows, end, c.key_dim, lanes, c.delta_rule != 0, state);
            for (; store < c.store + s.first_store + s.stores && store->chunk == chunk; store++) {
                float* to = store->to + c.layer * store->layer_stride + place;
                for (int d = 0; d < c.key_dim; d++)
                    std::memcpy(to + d * line, state + (size_t)d * kStateColumns, sizeof(float) * lanes);
            }
        }
    }

    // Row `index` of the span, or row `in_chunk` of those that the pool has, where it is negative.
    StateRow row_of(const StateSpan& s, int index, int in_chunk, int head, int at) const {
        const bool is_cached = index < 0;
        const size_t row = is_cached ? (size_t)s.table_row * kStateChunk + in_chunk : (size_t)s.first_row + index;
        const float* parts = (is_cached ? c.recent : c.rows) + row * width;
        const float* gates = parts + keys + values + head;
        const size_t key = (size_t)(head / shared) * c.key_dim, value = (size_t)head * c.value_dim + at;
        StateRow found = {parts + key, parts + keys + value, nullptr, nullptr, gates[0], 0.0f};
        if (c.delta_rule) found.beta = gates[c.heads];
        if (!is_cached) found.query = c.query + row * keys + key, found.out = c.out + row * values + value;
        return found;
    }

    // The rows of a chunk that is not complete are the pool's to hold.
    void keep_recent(const StateSpan& s) const {
        if (!s.is_certain) return;
        const int end = s.start + s.rows, chunk = end / kStateChunk * kStateChunk;
        for (int position = max(chunk, s.start); position < end; position++)
            std::memcpy(c.recent + ((size_t)s.table_row * kStateChunk + position % kStateChunk) * width,
                        c.rows + (size_t)(s.first_row + position - s.start) * width, sizeof(float) * width);
    }
};

struct Convolution {
    const ConvolutionCall& c;
    const Kernels& k = kernels();

    void lay_out(Workspace&) {}
    void fill() {}
    void run(const Member& member) {
        const unsigned before = k.enter();
        int first, last;
        member.share(c.rows, first, last);
        for (int r = first; r < last; r++) {
            const float* taps[kMostTaps];
            for (int tap = 0; tap < c.taps; tap++)
                taps[tap] = c.inputs + (size_t)c.tap_rows[(size_t)tap * c.rows + r] * c.channels;
            k.convolve(taps, c.weight, c.bias, c.taps, c.channels, c.out + (size_t)r * c.channels);
        }
        k.leave(before);
    }
};

}  // namespace
