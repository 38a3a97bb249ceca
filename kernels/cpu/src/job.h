// What the jobs of step.cpp are made of: memory, activations, products over a team's tiles, and how a job is run.
#pragma once

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "step.h"
#include "team.h"

namespace {

constexpr int kRowChunk = 128;   // rows that go through a weight together: their activations stay in cache
constexpr int kPrivateRows = kBlockRows;  // so many rows every thread prepares for itself rather than wait for others

size_t align64(size_t bytes) { return (bytes + 63) & ~(size_t)63; }
int tiles_of(const Weight& w) { return (w.rows + 15) / 16; }
int blocks_of(int rows) { return (rows + kBlockRows - 1) / kBlockRows; }
int max(int a, int b) { return a > b ? a : b; }
int min(int a, int b) { return a < b ? a : b; }

// One block of memory that grows to the largest pass seen. One pass at a time uses it.
struct Workspace {
    char* base = nullptr;
    size_t size = 0, used = 0;

    bool reserve(size_t bytes) {
        used = 0;
        if (bytes <= size) return true;
        std::free(base);
        size = align64(bytes + bytes / 4);
        base = (char*)std::aligned_alloc(64, size);
        if (base == nullptr) size = 0;
        return base != nullptr;
    }
    // With no base it only counts, and what it returns must not be used.
    template <class T>
    T* take(size_t count) {
        T* p = (T*)((uintptr_t)base + used);
        used += align64(count * sizeof(T));
        return p;
    }
};
Workspace workspace;
std::mutex in_use;  // of the workspace

struct Needs {
    bool records = false, floats = false;
    void add(const Weight& w) { (is_quantised(w.format) ? records : floats) = true; }
};

Activations take_activations(Workspace& space, int rows, int columns, Needs needs) {
    Activations a{nullptr, nullptr, columns};
    if (needs.records) a.records = space.take<Record>((size_t)blocks_of(rows) * (columns / kGroup));
    if (needs.floats) a.floats = space.take<float>((size_t)rows * columns);
    return a;
}

// The columns [at, at + count) of one row, into whichever forms the activations have.
void put(const Kernels& k, Activations& a, int row, int at, int count, const float* x) {
    if (a.floats != nullptr) std::memcpy(a.floats + (size_t)row * a.columns + at, x, sizeof(float) * count);
    if (a.records == nullptr) return;
    Record* records = a.records + (size_t)(row / kBlockRows) * (a.columns / kGroup) + at / kGroup;
    k.quantise(x, count / kGroup, records, row % kBlockRows);
}

// Key and value [head_dim] of one token and KV head, to the token's slot.
void write_entry(const Kernels& k, const KvPool& pool, int layer, int64_t slot, int head, const float* key,
                 const float* value) {
    const size_t entry = pool.entry(layer, slot, head), at = entry * pool.entry_bytes();
    k.write_kv(key, pool.head_dim, pool.dtype, pool.key + at, pool.scale(pool.key_scales, layer, entry));
    k.write_kv(value, pool.head_dim, pool.dtype, pool.value + at, pool.scale(pool.value_scales, layer, entry));
}

// A tile's rows [16] to rows `stride` apart, of which `lanes` are there.
void copy_tile(const float* tile, int rows, int lanes, float* to, size_t stride) {
    for (int r = 0; r < rows; r++, tile += 16, to += stride) {
        if (lanes == 16)
            std::memcpy(to, tile, 16 * sizeof(float));
        else
            std::memcpy(to, tile, lanes * sizeof(float));
    }
}

// Calls run(row, first, last) until all of `count` things have been done for all rows: for the kRowChunk rows from `row`,
// those of [first, last). Few rows only wait for the weights, which each member reads in one run; with many rows things go
// to whoever is free, `at_once` at a time, unless each member's are wanted `in_one_run` as well.
template <class Run>
void share_out(const Member& member, int rows, int count, int at_once, bool in_one_run, Run run) {
    if (rows <= kPrivateRows || in_one_run) {
        int first, last;
        member.share(count, first, last);
        for (int row = 0; row < rows; row += kRowChunk) run(row, first, last);
        return;
    }
    const int chunks = (rows + kRowChunk - 1) / kRowChunk, runs = (count + at_once - 1) / at_once;
    member.take_turns(chunks * runs, [&](int i) {
        const int first = i % runs * at_once;
        run(i / runs * kRowChunk, first, min(first + at_once, count));
    });
}

// Runs `done(part, first column, lanes, row, rows, out [rows][16])` over this member's tiles of the parts, which
// read the same activations.
template <class Done>
void linear(const Kernels& k, const Member& member, const Weight* const* parts, int count, const Activations& x, int rows,
            float* out, Done done, bool in_one_run = false) {
    int tiles = 0;
    for (int p = 0; p < count; p++) tiles += tiles_of(*parts[p]);
    share_out(member, rows, tiles, 2, in_one_run, [&](int row, int first, int last) {
        const int chunk = min(kRowChunk, rows - row);
        int before = 0;
        for (int p = 0; p < count; before += tiles_of(*parts[p]), p++) {
            const Weight& w = *parts[p];
            const int end = min(last - before, tiles_of(w));
            for (int tile = max(first - before, 0); tile < end; tile++) {
                k.linear_tile(w, tile, x, row, chunk, out);
                const int lanes = min(16, w.rows - 16 * tile);
                if (w.bias != nullptr)
                    for (int r = 0; r < chunk; r++)
                        for (int i = 0; i < lanes; i++) out[16 * r + i] += w.bias[16 * tile + i];
                done(p, 16 * tile, lanes, row, chunk, out);
            }
        }
    });
}

// Lays the job out twice, to measure and for good, then runs it. Job: lay_out(Workspace&), fill(), run(member).
template <class Job>
StepStatus run_job(Job& job, int threads) {
    Workspace measured;
    job.lay_out(measured);
    if (!workspace.reserve(measured.used)) return kNoMemory;
    job.lay_out(workspace);
    job.fill();
    run_on_team(threads, [](void* argument, const Member& member) { ((Job*)argument)->run(member); }, &job);
    return kDone;
}

}  // namespace
