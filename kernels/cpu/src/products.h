// Products outside a step: one weight, or one of many for each row.
#pragma once

#include "job.h"

namespace {

struct Linear {
    const Weight& weight;
    const float* x;
    int rows;
    float* out;
    int threads;
    const Kernels& k = kernels();
    Activations in = {};
    float* tiles = nullptr;

    void lay_out(Workspace& space) {
        Needs needs;
        needs.add(weight);
        in = {nullptr, const_cast<float*>(x), weight.columns};
        if (needs.records) in = take_activations(space, rows, weight.columns, needs);
        tiles = space.take<float>((size_t)threads * kRowChunk * 16);
    }
    void fill() {}
    void run(const Member& member) {
        const unsigned before = k.enter();
        if (in.records != nullptr) {
            int first, last;
            member.share(blocks_of(rows), first, last);
            for (int r = first * kBlockRows; r < min(last * kBlockRows, rows); r++)
                put(k, in, r, 0, weight.columns, x + (size_t)r * weight.columns);
            member.sync();
        }
        const Weight* parts[] = {&weight};
        linear(k, member, parts, 1, in, rows, tiles + (size_t)member.index * kRowChunk * 16,
               [&](int, int column, int lanes, int row, int count, const float* tile) {
                   copy_tile(tile, count, lanes, out + (size_t)row * weight.rows + column, weight.rows);
               });
        k.leave(before);
    }
};

// Rows sorted by the expert they go to. Those of an expert begin a block of 16 rows, as its products want them.
struct LinearByExpert {
    struct Segment {
        Weight weight;
        int row, rows, padded_row;
    };
    const Weight& first;
    const int64_t stride;
    const int32_t* counts;
    const int experts;
    const float* x;
    float* out;
    const int threads;
    const Kernels& k = kernels();
    Activations in = {};
    Segment* segments = nullptr;
    int used = 0;
    float* tiles = nullptr;

    void lay_out(Workspace& space) {
        Needs needs;
        needs.add(first);
        int blocks = 0;
        for (int e = 0; e < experts; e++) blocks += blocks_of(counts[e]);
        in = {nullptr, const_cast<float*>(x), first.columns};
        if (needs.records) in = take_activations(space, blocks * kBlockRows, first.columns, needs);
        segments = space.take<Segment>(experts);
        tiles = space.take<float>((size_t)threads * kRowChunk * 16);
    }
    void fill() {
        int row = 0, padded_row = 0;
        for (int e = 0; e < experts; e++) {
            if (counts[e] == 0) continue;
            Segment& segment = segments[used++];
            segment = {first, row, counts[e], padded_row};
            segment.weight.data += e * stride;
            row += counts[e];
            padded_row += blocks_of(counts[e]) * kBlockRows;
        }
    }
    void run(const Member& member) {
        const unsigned before = k.enter();
        int begin, end;
        if (in.records != nullptr) {
            member.share(segments[used - 1].row + segments[used - 1].rows, begin, end);
            for (int s = 0; s < used; s++) {
                const Segment& segment = segments[s];
                const int last = min(end, segment.row + segment.rows);
                for (int r = max(begin, segment.row); r < last; r++)
                    put(k, in, segment.padded_row + r - segment.row, 0, in.columns, x + (size_t)r * in.columns);
            }
            member.sync();
        }
        float* tile_out = tiles + (size_t)member.index * kRowChunk * 16;
        member.share(tiles_of(first), begin, end);
        for (int s = 0; s < used; s++) {
            const Segment& segment = segments[s];
            const int from = in.records != nullptr ? segment.padded_row : segment.row;
            for (int row = 0; row < segment.rows; row += kRowChunk) {
                const int chunk = min(kRowChunk, segment.rows - row);
                for (int tile = begin; tile < end; tile++) {
                    k.linear_tile(segment.weight, tile, in, from + row, chunk, tile_out);
                    const int lanes = min(16, first.rows - 16 * tile);
                    float* to = out + (size_t)(segment.row + row) * first.rows + 16 * tile;
                    copy_tile(tile_out, chunk, lanes, to, first.rows);
                }
            }
        }
        k.leave(before);
    }
};

}  // namespace
