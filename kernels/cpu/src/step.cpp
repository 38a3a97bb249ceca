#include "step.h"

#include "context.h"
#include "paged_attention.h"
#include "products.h"
#include "state_layer.h"

namespace {

class Step {
public:
    Step(const Model& model, const Batch& batch, int threads)
        : m(model), b(batch), k(kernels()), threads(threads), q_size(model.heads * model.head_dim),
          kv_size(model.kv_heads * model.head_dim), pass(pass_of(model, batch)),
          paged(k, pass, model.num_layers, threads) {}

    // Lays out all memory in `space`; run against an empty one it only measures.
    void lay_out(Workspace& space) {
        for (int l = 0; l < m.num_layers; l++) {
            const Layer& layer = m.layers[l];
            for (const Weight* w : {&layer.q, &layer.k, &layer.v, &layer.gate, &layer.up}) hidden_needs.add(*w);
            attended_needs.add(layer.o), inner_needs.add(layer.down);
        }
        hidden_needs.add(m.head);
        const int rows = max(b.tokens, b.outputs);
        x = space.take<float>((size_t)b.tokens * m.hidden);
        qkv = space.take<float>((size_t)b.tokens * (q_size + 2 * kv_size));
        attended = space.take<float>((size_t)b.tokens * q_size);
        added = space.take<float>((size_t)b.tokens * m.hidden);
        hidden_in = take_activations(space, rows, m.hidden, hidden_needs);
        attended_in = take_activations(space, b.tokens, q_size, attended_needs);
        inner_in = take_activations(space, b.tokens, m.intermediate, inner_needs);
        paged.lay_out(space);
        own = space.take<Own>(threads);
        const int widest = max(max(m.hidden, q_size), m.intermediate);
        for (int t = 0; t < threads; t++) {
            Own mine;
            mine.tile = space.take<float>(kRowChunk * 16);
            mine.gate = space.take<float>(kRowChunk * kGroup);
            mine.up = space.take<float>(kRowChunk * kGroup);
            mine.row = space.take<float>(widest);
            mine.hidden_in = take_activations(space, kPrivateRows, m.hidden, hidden_needs);
            mine.attended_in = take_activations(space, kPrivateRows, q_size, attended_needs);
            mine.best = space.take<Best>(b.outputs);
            if (space.base != nullptr) own[t] = mine;
        }
    }

    StepStatus check() const {
        const StepStatus status = pass.check(b.tokens, b.out_slots);
        if (status != kDone) return status;
        for (int i = 0; i < b.tokens; i++) {
            if (b.ids[i] < 0 || b.ids[i] >= m.embedding.rows) return kBadToken;
            if (b.positions[i] < 0 || b.positions[i] >= m.max_positions) return kBadPosition;
        }
        for (int i = 0; i < b.outputs; i++)
            if (b.logits_rows[i] < 0 || b.logits_rows[i] >= b.tokens) return kBadLength;
        return kDone;
    }

    void fill() { paged.fill(); }

    void run(const Member& member) {
        const unsigned before = k.enter();
        embed(member);
        for (int l = 0; l < m.num_layers; l++) {
            attention(member, l);
            mlp(member, l);
            capture(member, l);
        }
        head(member);
        k.leave(before);
    }

private:
    struct Best {
        float value;
        int64_t id;
    };
    struct Own {  // one thread's memory
        float *tile, *gate, *up, *row;
        Activations hidden_in, attended_in;
        Best* best;
    };

    static AttentionPass pass_of(const Model& m, const Batch& b) {
        return {m.heads, m.attention_scale, b.sequences, b.query_lens, b.context_lens, b.table_rows,
                b.slot_table, b.table_stride, b.kv};
    }

    void embed(const Member& member) {
        int first, last;
        member.share(b.tokens, first, last);
        for (int r = first; r < last; r++) {
            float* row = x + (size_t)r * m.hidden;
            k.dequantise_row(m.embedding, (int)b.ids[r], row);
            if (m.embedding_scale != 1.0f)
                for (int i = 0; i < m.hidden; i++) row[i] *= m.embedding_scale;
        }
        member.sync();
    }

    // Rows in(r) [columns], normed where there is a weight, as activations: this member's own, or everyone's.
    template <class In>
    const Activations& prepare(const Member& member, int rows, const float* norm, Activations& everyones, Activations& mine,
                               In in) {
        const bool is_private = rows <= kPrivateRows;
        Activations& to = is_private ? mine : everyones;
        int first = 0, last = blocks_of(rows);  // in whole blocks: two threads at one would pass its lines back and forth
        if (!is_private) member.share(blocks_of(rows), first, last);
        for (int r = first * kBlockRows; r < min(last * kBlockRows, rows); r++) {
            const float* row = in(r);
            if (norm != nullptr) {
                k.rms_norm(row, norm, m.eps, to.columns, own[member.index].row);
                row = own[member.index].row;
            }
            put(k, to, r, 0, to.columns, row);
        }
        if (!is_private) member.sync();
        return to;
    }

    // x += added, normed: what Gemma does with the output of a sublayer.
    void add_normed(const Member& member, const float* norm) {
        int first, last;
        member.share(b.tokens, first, last);
        for (int r = first; r < last; r++) {
            k.rms_norm(added + (size_t)r * m.hidden, norm, m.eps, m.hidden, own[member.index].row);
            k.add(x + (size_t)r * m.hidden, own[member.index].row, m.hidden);
        }
        member.sync();
    }

    // x (or `added`, where a norm comes between) takes the product with `weight`.
    void add_product(const Member& member, const Weight& weight, const Activations& in, const float* norm) {
        const Weight* parts[] = {&weight};
        Own& mine = own[member.index];
        linear(k, member, parts, 1, in, b.tokens, mine.tile,
               [&](int, int column, int lanes, int row, int rows, const float* out) {
                   float* to = (norm ? added : x) + (size_t)row * m.hidden + column;
                   if (norm)
                       copy_tile(out, rows, lanes, to, m.hidden);
                   else
                       k.add_tile(out, rows, lanes, to, m.hidden);
               });
        member.sync();
        if (norm != nullptr) add_normed(member, norm);
    }

    void attention(const Member& member, int l) {
        const Layer& layer = m.layers[l];
        Own& mine = own[member.index];
        const int width = q_size + 2 * kv_size;
        const Activations& in = prepare(member, b.tokens, layer.input_norm, hidden_in, mine.hidden_in,
                                        [&](int r) { return x + (size_t)r * m.hidden; });
        const Weight* parts[] = {&layer.q, &layer.k, &layer.v};
        const int offsets[] = {0, q_size, q_size + kv_size};
        linear(k, member, parts, 3, in, b.tokens, mine.tile,
               [&](int part, int column, int lanes, int row, int rows, const float* out) {
                   copy_tile(out, rows, lanes, qkv + (size_t)row * width + offsets[part] + column, width);
               });
        member.sync();
        rotate_and_write(member, layer, l);
        member.sync();
        paged.run(member, l, {qkv, (size_t)width, attended, l, layer.window, b.causal || layer.causal});
        const Activations& out = prepare(member, b.tokens, nullptr, attended_in, mine.attended_in,
                                         [&](int r) { return attended + (size_t)r * q_size; });
        add_product(member, layer.o, out, layer.attention_out_norm);
    }

    void rotate_and_write(const Member& member, const Layer& layer, int l) {
        const int d = m.head_dim, heads = m.heads + m.kv_heads;
        float* normed = own[member.index].row;
        int first, last;
        member.share(b.tokens * heads, first, last);
        for (int i = first; i < last; i++) {
            const int row = i / heads, head = i % heads;
            const bool is_key = head >= m.heads;
            float* at = qkv + (size_t)row * (q_size + 2 * kv_size) + head * d;
            const float* norm = is_key ? layer.k_norm : layer.q_norm;
            if (norm != nullptr) {
                k.rms_norm(at, norm, m.eps, d, normed);
                std::memcpy(at, normed, sizeof(float) * d);
            }
            const size_t angle = (size_t)b.positions[row] * (d / 2);
            k.rotate(at, layer.cos + angle, layer.sin + angle, d);
            if (is_key) write_entry(k, b.kv, l, b.out_slots[row], head - m.heads, at, at + kv_size);
        }
    }

    void mlp(const Member& member, int l) {
        const Layer& layer = m.layers[l];
        Own& mine = own[member.index];
        const Activations& in = prepare(member, b.tokens, layer.mlp_norm, hidden_in, mine.hidden_in,
                                        [&](int r) { return x + (size_t)r * m.hidden; });
        int first, last;
        member.share(m.intermediate / kGroup, first, last);
        for (int row = 0; row < b.tokens; row += kRowChunk) {
            const int rows = min(kRowChunk, b.tokens - row);
            for (int g = first; g < last; g++) {
                for (int tile = 0; tile < 2; tile++) {
                    product(layer.gate, 2 * g + tile, in, row, rows, mine, mine.gate + 16 * tile);
                    product(layer.up, 2 * g + tile, in, row, rows, mine, mine.up + 16 * tile);
                }
                for (int r = 0; r < rows; r++) {
                    float* gate = mine.gate + kGroup * r;
                    k.gate(gate, mine.up + kGroup * r, kGroup, m.activation, gate);
                    put(k, inner_in, row + r, g * kGroup, kGroup, gate);
                }
            }
        }
        member.sync();
        add_product(member, layer.down, inner_in, layer.mlp_out_norm);
    }

    // One tile with its bias, to out [rows] by kGroup.
    void product(const Weight& w, int tile, const Activations& in, int row, int rows, Own& mine, float* out) {
        k.linear_tile(w, tile, in, row, rows, mine.tile);
        copy_tile(mine.tile, rows, 16, out, kGroup);
        if (w.bias != nullptr)
            for (int r = 0; r < rows; r++) k.add(out + (size_t)r * kGroup, w.bias + 16 * tile, 16);
    }

    void capture(const Member& member, int l) {
        for (int c = 0; c < b.num_captures; c++) {
            if (b.capture_layers[c] != l) continue;
            int first, last;
            member.share(b.tokens, first, last);
            std::memcpy(b.captures + ((size_t)c * b.tokens + first) * m.hidden, x + (size_t)first * m.hidden,
                        sizeof(float) * (size_t)(last - first) * m.hidden);
        }
    }

    void head(const Member& member) {
        if (b.outputs == 0) return;
        Own& mine = own[member.index];
        const Activations& in = prepare(member, b.outputs, m.final_norm, hidden_in, mine.hidden_in,
                                        [&](int r) { return x + (size_t)b.logits_rows[r] * m.hidden; });
        for (int r = 0; r < b.outputs; r++) mine.best[r] = {-INFINITY, -1};
        const Weight* parts[] = {&m.head};
        linear(k, member, parts, 1, in, b.outputs, mine.tile,
               [&](int, int column, int lanes, int row, int rows, const float* out) {
                   if (b.logits != nullptr)
                       copy_tile(out, rows, lanes, b.logits + (size_t)row * m.head.rows + column, m.head.rows);
                   if (b.argmax == nullptr) return;
                   for (int r = 0; r < rows; r++) {
                       Best& best = mine.best[row + r];
                       for (int i = 0; i < lanes; i++)
                           if (out[16 * r + i] > best.value || best.id < 0) best = {out[16 * r + i], column + i};
                   }
               });
        if (b.argmax == nullptr) return;
        member.sync();
        if (member.index != 0) return;
        for (int r = 0; r < b.outputs; r++) {  // members hold ascending ids, so the first of equals wins
            Best best = own[0].best[r];
            for (int t = 1; t < member.threads; t++) {
                const Best& other = own[t].best[r];
                if (other.id >= 0 && (best.id < 0 || other.value > best.value)) best = other;
            }
            b.argmax[r] = best.id;
        }
    }

    const Model& m;
    const Batch& b;
    const Kernels& k;
    const int threads, q_size, kv_size;
    const AttentionPass pass;
    PagedAttention paged;
    Needs hidden_needs, attended_needs, inner_needs;
    float *x, *qkv, *attended, *added;
    Activations hidden_in, attended_in, inner_in;
    Own* own;
};

}  // namespace

StepStatus run_step(const Model& model, const Batch& batch) {
    std::lock_guard<std::mutex> lock(in_use);
    const int threads = team_size();
    Step step(model, batch, threads);
    const StepStatus status = step.check();
    if (status != kDone || batch.tokens == 0) return status;
    return run_job(step, threads);
}

StepStatus run_linear(const Weight& weight, const float* x, int rows, float* out) {
    std::lock_guard<std::mutex> lock(in_use);
    const int threads = team_size();
    Linear job{weight, x, rows, out, threads};
    return run_job(job, threads);
}

StepStatus run_context(const ContextModel& model, const ContextRows& rows) {
    std::lock_guard<std::mutex> lock(in_use);
    const int threads = team_size();
    ContextPass job{model, rows, threads};
    const StepStatus status = job.check();
    if (status != kDone || rows.rows == 0) return status;
    return run_job(job, threads);
}

StepStatus run_attention(const LayerAttentionCall& call) {
    std::lock_guard<std::mutex> lock(in_use);
    const int threads = team_size();
    LayerAttention job{call, threads};
    const StepStatus status = job.pass.check(call.tokens, call.out_slots);
    if (status != kDone || call.tokens == 0) return status;
    return run_job(job, threads);
}

StepStatus run_recurrence(const RecurrenceCall& call) {
    std::lock_guard<std::mutex> lock(in_use);
    const int threads = min(team_size(), call.spans * call.heads);
    if (threads == 0) return kDone;
    Recurrence job{call, threads};
    return run_job(job, threads);
}

StepStatus run_convolution(const ConvolutionCall& call) {
    if (call.taps > kMostTaps) return kBadLength;
    std::lock_guard<std::mutex> lock(in_use);
    Convolution job{call};
    constexpr int64_t worth_a_thread = 1 << 15;  // products: a thread that waits for work takes longer to wake up
    const int64_t products = (int64_t)call.rows * call.taps * call.channels;
    return run_job(job, max(1, min(team_size(), (int)(products / worth_a_thread))));
}

StepStatus run_linear_by_expert(const Weight& first, int64_t stride, const int32_t* counts, int experts, const float* x,
                                float* out) {
    std::lock_guard<std::mutex> lock(in_use);
    const int threads = team_size();
    LinearByExpert job{first, stride, counts, experts, x, out, threads};
    return run_job(job, threads);
}
