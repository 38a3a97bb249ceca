// The context pass of a DFlash drafter in one call: what the target computed for some tokens becomes the keys and
// values of every layer of the drafter.
#pragma once

#include "job.h"

namespace {

struct ContextPass {
    const ContextModel& m;
    const ContextRows& b;
    const int threads;
    const Kernels& k = kernels();
    Activations features_in = {}, hidden_in = {};
    float *tiles = nullptr, *hidden = nullptr, *kv = nullptr, *normed = nullptr;

    int widest() const { return max(m.fc.rows, m.head_dim); }

    void lay_out(Workspace& space) {
        Needs of_features, of_hidden;
        of_features.add(m.fc), of_hidden.add(m.kv);
        features_in = take_activations(space, b.rows, m.fc.columns, of_features);
        hidden_in = take_activations(space, b.rows, m.kv.columns, of_hidden);
        hidden = space.take<float>((size_t)b.rows * m.fc.rows);
        kv = space.take<float>((size_t)b.rows * m.kv.rows);
        tiles = space.take<float>((size_t)threads * kRowChunk * 16);
        normed = space.take<float>((size_t)threads * widest());
    }
    void fill() {}

    StepStatus check() const {
        for (int r = 0; r < b.rows; r++) {
            if (b.positions[r] < 0 || b.positions[r] >= m.max_positions) return kBadPosition;
            if (b.slots[r] < 0 || b.slots[r] >= b.kv.slots) return kBadSlot;
        }
        return kDone;
    }

    void product(const Member& member, const Weight& weight, const Activations& in, float* out) {
        const Weight* parts[] = {&weight};
        linear(k, member, parts, 1, in, b.rows, tiles + (size_t)member.index * kRowChunk * 16,
               [&](int, int column, int lanes, int row, int rows, const float* tile) {
                   for (int r = 0; r < rows; r++)
                       std::memcpy(out + (size_t)(row + r) * weight.rows + column, tile + 16 * r, sizeof(float) * lanes);
               });
        member.sync();
    }

    void run(const Member& member) {
        const unsigned before = k.enter();
        float* row = normed + (size_t)member.index * widest();
        int first, last;
        member.share(b.rows, first, last);
        for (int r = first; r < last; r++)
            put(k, features_in, r, 0, m.fc.columns, b.features + (size_t)r * m.fc.columns);
        member.sync();
        product(member, m.fc, features_in, hidden);
        for (int r = first; r < last; r++) {
            k.rms_norm(hidden + (size_t)r * m.fc.rows, m.hidden_norm, m.eps, m.fc.rows, row);
            put(k, hidden_in, r, 0, m.fc.rows, row);
        }
        member.sync();
        product(member, m.kv, hidden_in, kv);
        write(member, row);
        k.leave(before);
    }

    // Of each row and layer: keys are normed and rotated, then both go to the row's slot.
    void write(const Member& member, float* normed_key) {
        const int d = m.head_dim, kv_size = m.kv_heads * d, heads = m.layers * m.kv_heads;
        int first, last;
        member.share(b.rows * heads, first, last);
        for (int i = first; i < last; i++) {
            const int row = i / heads, layer = i % heads / m.kv_heads, head = i % m.kv_heads;
            const float* key = kv + (size_t)row * m.kv.rows + (size_t)layer * 2 * kv_size + head * d;
            k.rms_norm(key, m.k_norms + (size_t)layer * d, m.eps, d, normed_key);
            const size_t angle = (size_t)b.positions[row] * (d / 2);
            k.rotate(normed_key, m.cos + angle, m.sin + angle, d);
            write_entry(k, b.kv, layer, b.slots[row], head, normed_key, key + kv_size);
        }
    }
};

}  // namespace
