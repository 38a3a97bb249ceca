#include "step.h"

#include <algorithm>
#include <numeric>

#include "context.h"
#include "paged_attention.h"
#include "products.h"
#include "state_layer.h"

namespace {

// Of a head, 16 tokens each, that a drafted token is looked for in: with a trained drafter of 8,192 tokens the best one
// was among 32 in 99.5 of 100 drafts.
constexpr int kCandidateTiles = 32;

class Step {
public:
    Step(const Model& model, const Batch& batch, int threads)
        : m(model), b(batch), k(kernels()), threads(threads), q_size(model.heads * model.head_dim),
          kv_size(model.kv_heads * model.head_dim), drops_rows(may_drop_rows(model, batch)), pass(pass_of(model, batch)),
          paged(k, pass, threads) {}

    // Lays out all memory in `space`; run against an empty one it only measures.
    void lay_out(Workspace& space) {
        for (int l = 0; l < m.num_layers; l++) {
            const Layer& layer = m.layers[l];
            for (const Weight* w : {&layer.q, &layer.k, &layer.v, &layer.gate, &layer.up}) hidden_needs.add(*w);
            attended_needs.add(layer.o), inner_needs.add(layer.down);
        }
        hidden_needs.add(m.head);
        if (in_order()) hidden_needs.add(m.successor);
        const int rows = max(b.tokens, b.outputs);
        x = space.take<float>((size_t)b.tokens * m.hidden);
        qkv = space.take<float>((size_t)b.tokens * (q_size + 2 * kv_size));
        attended = space.take<float>((size_t)b.tokens * q_size);
        added = space.take<float>((size_t)b.tokens * m.hidden);
        const size_t kept = drops_rows ? b.outputs : 0;
        kept_x = space.take<float>(kept * m.hidden);
        kept_attended = space.take<float>(kept * q_size);
        hidden_in = take_activations(space, rows, m.hidden, hidden_needs);
        attended_in = take_activations(space, b.tokens, q_size, attended_needs);
        inner_in = take_activations(space, b.tokens, m.intermediate, inner_needs);
        const size_t said = in_order() ? b.outputs : 0;
        after = space.take<float>(said * m.hidden);
        peaks = space.take<float>(said * tiles_of(m.head));
        candidate = space.take<int32_t>(said * candidates());
        paged.lay_out(space);
        own = space.take<Own>(threads);
        const int widest = max(max(m.hidden, q_size), m.intermediate);
        for (int t = 0; t < threads; t++) {
            Own mine;
            mine.tile = space.take<float>(kRowChunk * 16);
            mine.up = space.take<float>(kRowChunk * 16);
            mine.inner = space.take<float>(kRowChunk * kGroup);
            mine.row = space.take<float>(widest);
            mine.hidden_in = take_activations(space, kPrivateRows, m.hidden, hidden_needs);
            mine.attended_in = take_activations(space, kPrivateRows, q_size, attended_needs);
            mine.embedded = space.take<float>(in_order() ? m.hidden : 0);
            mine.order = space.take<int32_t>(in_order() ? tiles_of(m.head) : 0);
            mine.best = space.take<Best>(b.chosen == nullptr ? 0 : 2 * b.outputs);
            mine.chosen = space.take<int64_t>(b.chosen == nullptr ? 0 : b.outputs);
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
        if (in_order() && b.outputs % b.sequences != 0) return kBadLength;
        for (int i = 0; in_order() && i < b.outputs; i += b.outputs / b.sequences)
            if (b.logits_rows[i] == 0) return kBadLength;  // there is no token before it
        return kDone;
    }

    void fill() { paged.fill(); }

    void run(const Member& member) {
        const unsigned before = k.enter();
        embed(member);
        Rows rows = {b.tokens, x, attended};
        for (int l = 0; l < m.num_layers; l++) {
            attend(member, l);
            if (l == m.num_layers - 1 && drops_rows) rows = keep_outputs(member);
            add_attended(member, l, rows);
            mlp(member, l, rows);
            capture(member, l);
        }
        if (b.chosen == nullptr)
            head(member);
        else
            choose(member);
        k.leave(before);
    }

private:
    struct Own {  // one thread's memory
        float *tile, *up, *inner, *row, *embedded;
        Activations hidden_in, attended_in;
        Best* best;       // of this round of choices, and of the one before
        int64_t* chosen;  // a token for each row of a round
        int32_t* order;
    };

    // Hidden states that the products of a layer are added to, and what attention made of them.
    struct Rows {
        int count;
        float *x, *attended;
    };

    static AttentionPass pass_of(const Model& m, const Batch& b) {
        return {m.heads, m.attention_scale, b.sequences, b.query_lens, b.context_lens, b.table_rows,
                b.slot_table, b.table_stride, b.kv};
    }

    void embed(const Member& member) {
        int first, last;
        member.share(b.tokens, first, last);
        for (int r = first; r < last; r++) embed_token(b.ids[r], x + (size_t)r * m.hidden);
        member.sync();
    }

    void embed_token(int64_t id, float* to) const {
        k.dequantise_row(m.embedding, (int)id, to);
        if (m.embedding_scale != 1.0f)
            for (int i = 0; i < m.hidden; i++) to[i] *= m.embedding_scale;
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
    void add_normed(const Member& member, const float* norm, const Rows& rows) {
        int first, last;
        member.share(rows.count, first, last);
        for (int r = first; r < last; r++) {
            k.rms_norm(added + (size_t)r * m.hidden, norm, m.eps, m.hidden, own[member.index].row);
            k.add(rows.x + (size_t)r * m.hidden, own[member.index].row, m.hidden);
        }
        member.sync();
    }

    // x (or `added`, where a norm comes between) takes the product with `weight`.
    void add_product(const Member& member, const Weight& weight, const Activations& in, const float* norm,
                     const Rows& rows) {
        const Weight* parts[] = {&weight};
        Own& mine = own[member.index];
        linear(k, member, parts, 1, in, rows.count, mine.tile,
               [&](int, int column, int lanes, int row, int count, const float* out) {
                   float* to = (norm ? added : rows.x) + (size_t)row * m.hidden + column;
                   if (norm)
                       copy_tile(out, count, lanes, to, m.hidden);
                   else
                       k.add_tile(out, count, lanes, to, m.hidden);
               });
        member.sync();
        if (norm != nullptr) add_normed(member, norm, rows);
    }

    // Of the last layer nothing is read but the rows that logits are wanted of.
    static bool may_drop_rows(const Model& m, const Batch& b) {
        for (int c = 0; c < b.num_captures; c++)
            if (b.capture_layers[c] == m.num_layers - 1) return false;
        return b.outputs < b.tokens;
    }

    Rows keep_outputs(const Member& member) {
        int first, last;
        member.share(b.outputs, first, last);
        for (int i = first; i < last; i++) {
            const size_t row = b.logits_rows[i];
            std::memcpy(kept_x + (size_t)i * m.hidden, x + row * m.hidden, sizeof(float) * m.hidden);
            std::memcpy(kept_attended + (size_t)i * q_size, attended + row * q_size, sizeof(float) * q_size);
        }
        member.sync();
        return {b.outputs, kept_x, kept_attended};
    }

    const float* output_row(int i) const {
        return drops_rows ? kept_x + (size_t)i * m.hidden : x + (size_t)b.logits_rows[i] * m.hidden;
    }

    void attend(const Member& member, int l) {
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
        paged.run(member, {qkv, (size_t)width, attended, l, layer.window, b.causal || layer.causal});
    }

    void add_attended(const Member& member, int l, const Rows& rows) {
        const Layer& layer = m.layers[l];
        const Activations& in = prepare(member, rows.count, nullptr, attended_in, own[member.index].attended_in,
                                        [&](int r) { return rows.attended + (size_t)r * q_size; });
        add_product(member, layer.o, in, layer.attention_out_norm, rows);
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

    void mlp(const Member& member, int l, const Rows& rows) {
        const Layer& layer = m.layers[l];
        Own& mine = own[member.index];
        const Activations& in = prepare(member, rows.count, layer.mlp_norm, hidden_in, mine.hidden_in,
                                        [&](int r) { return rows.x + (size_t)r * m.hidden; });
        share_out(member, rows.count, m.intermediate / kGroup, 1, false, [&](int row, int first, int last) {
            const int count = min(kRowChunk, rows.count - row);
            for (int g = first; g < last; g++) {
                for (int tile = 0; tile < 2; tile++) {
                    product(layer.gate, 2 * g + tile, in, row, count, mine.tile);
                    product(layer.up, 2 * g + tile, in, row, count, mine.up);
                    k.gate(mine.tile, mine.up, count, m.activation, mine.inner + 16 * tile, kGroup);
                }
                for (int r = 0; r < count; r++) put(k, inner_in, row + r, g * kGroup, kGroup, mine.inner + kGroup * r);
            }
        });
        member.sync();
        add_product(member, layer.down, inner_in, layer.mlp_out_norm, rows);
    }

    // One tile with its bias, to out [rows][16].
    void product(const Weight& w, int tile, const Activations& in, int row, int rows, float* out) {
        k.linear_tile(w, tile, in, row, rows, out);
        if (w.bias != nullptr)
            for (int r = 0; r < rows; r++) k.add(out + (size_t)r * 16, w.bias + 16 * tile, 16);
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
                                        [&](int r) { return output_row(r); });
        const Weight* parts[] = {&m.head};
        linear(k, member, parts, 1, in, b.outputs, mine.tile,
               [&](int, int column, int lanes, int row, int rows, const float* out) {
                   copy_tile(out, rows, lanes, b.logits + (size_t)row * m.head.rows + column, m.head.rows);
               });
    }

    // Whether tokens are chosen one after another, as each says something about the next of its sequence.
    bool in_order() const { return b.chosen != nullptr && b.outputs > 0 && m.successor.rows > 0; }
    int rounds() const { return in_order() ? b.outputs / b.sequences : 1; }
    int candidates() const { return min(kCandidateTiles, tiles_of(m.head)); }

    // The best token of each output row: all at once, or the first ones of all sequences, then the second ones ...
    // Which tiles of the head these are looked for in is known by then: those with the highest logits before anything
    // was said about them, so the head as a whole is read once.
    void choose(const Member& member) {
        Own& mine = own[member.index];
        const int rows = b.outputs / rounds();
        for (int r = 0; r < 2 * b.outputs; r++) mine.best[r] = Best();
        if (in_order()) follow(member, rows, [&](int r) { return b.ids[b.logits_rows[r * rounds()] - 1]; });
        const Activations& in = prepare(member, b.outputs, nullptr, hidden_in, mine.hidden_in, [&](int i) {
            return final_row(member, i, i % rounds() == 0);
        });
        const Weight* parts[] = {&m.head};
        linear(k, member, parts, 1, in, b.outputs, mine.tile,
               [&](int, int column, int lanes, int row, int count, const float* out) {
                   for (int i = row; i < row + count; i++, out += 16) {
                       if (i % rounds() == 0) {
                           k.observe(out, 1, lanes, column, b.chances != nullptr, mine.best + i / rounds());
                           continue;
                       }
                       const float peak = *std::max_element(out, out + lanes);
                       peaks[(size_t)i * tiles_of(m.head) + column / 16] = std::isnan(peak) ? -INFINITY : peak;
                   }
               },
               true);
        member.sync();
        settle(member, 0, rows);
        if (rounds() == 1) return;
        find_candidates(member);
        for (int round = 1; round < rounds(); round++) {
            follow(member, rows, [&](int r) { return mine.chosen[r]; });
            // Others may still be reading what was best in the round before.
            Best* best = mine.best + round % 2 * b.outputs;
            for (int r = 0; r < rows; r++) {
                best[r] = Best();
                look_among_candidates(member, r * rounds() + round, best[r]);
            }
            member.sync();
            settle(member, round, rows);
        }
    }

    // The normed hidden state of an output row, with what the token before it says where that is known.
    const float* final_row(const Member& member, int output, bool is_said) {
        float* row = own[member.index].row;
        k.rms_norm(output_row(output), m.final_norm, m.eps, m.hidden, row);
        if (in_order() && is_said) k.add(row, after + (size_t)(output / rounds()) * m.hidden, m.hidden);
        return row;
    }

    void find_candidates(const Member& member) {
        const int tiles = tiles_of(m.head);
        int first, last;
        member.share(b.outputs, first, last);
        for (int i = first; i < last; i++) {
            if (i % rounds() == 0) continue;
            const float* peak = peaks + (size_t)i * tiles;
            int32_t* order = own[member.index].order;
            std::iota(order, order + tiles, 0);
            std::nth_element(order, order + candidates() - 1, order + tiles,
                             [&](int32_t a, int32_t b) { return peak[a] > peak[b]; });
            std::sort(order, order + candidates());  // so that the first of equals wins
            std::copy(order, order + candidates(), candidate + (size_t)i * candidates());
        }
        member.sync();
    }

    void look_among_candidates(const Member& member, int output, Best& best) {
        Own& mine = own[member.index];
        put(k, mine.hidden_in, 0, 0, m.hidden, final_row(member, output, true));
        int first, last;
        member.share(candidates(), first, last);
        for (int c = first; c < last; c++) {
            const int tile = candidate[(size_t)output * candidates() + c];
            product(m.head, tile, mine.hidden_in, 0, 1, mine.tile);
            k.observe(mine.tile, 1, min(16, m.head.rows - 16 * tile), 16 * tile, b.chances != nullptr, &best);
        }
    }

    // Members hold runs of ascending columns, so the first of equals wins, and sums are made in one order.
    void settle(const Member& member, int round, int rows) {
        Own& mine = own[member.index];
        for (int r = 0; r < rows; r++) {
            Best best;
            bool is_sound = true;
            for (int t = 0; t < member.threads; t++) {
                Best other = own[t].best[round % 2 * b.outputs + r];
                is_sound &= other.is_sound();
                if (other.value > best.value) std::swap(best, other);
                best.total += other.total * std::exp(other.value - best.value);
            }
            mine.chosen[r] = m.token_ids == nullptr ? best.column : m.token_ids[best.column];
            if (member.index != 0) continue;
            const int output = r * rounds() + round;
            b.chosen[output] = is_sound ? mine.chosen[r] : -1;
            if (b.chances != nullptr) b.chances[output] = is_sound ? 1.0f / best.total : NAN;
        }
    }

    // What the token before(r) says about the one of row r, to `after`.
    template <class Before>
    void follow(const Member& member, int rows, Before before) {
        Own& mine = own[member.index];
        const Activations& in = prepare(member, rows, m.successor_norm, hidden_in, mine.hidden_in, [&](int r) {
            embed_token(before(r), mine.embedded);
            return mine.embedded;
        });
        const Weight* parts[] = {&m.successor};
        linear(k, member, parts, 1, in, rows, mine.tile,
               [&](int, int column, int lanes, int row, int count, const float* out) {
                   copy_tile(out, count, lanes, after + (size_t)row * m.hidden + column, m.hidden);
               });
        member.sync();
    }

    const Model& m;
    const Batch& b;
    const Kernels& k;
    const int threads, q_size, kv_size;
    const bool drops_rows;
    const AttentionPass pass;
    PagedAttention paged;
    Needs hidden_needs, attended_needs, inner_needs;
    float *x, *qkv, *attended, *added, *kept_x, *kept_attended, *after, *peaks;
    int32_t* candidate;
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
