#include "step.h"

#include <atomic>
#include <cmath>

#include "context.h"
#include "products.h"

namespace {

struct Sequence {
    int row, queries, context, blocks, splits, first_item;
    const int32_t* slots;
};

class Step {
public:
    Step(const Model& model, const Batch& batch, int threads)
        : m(model), b(batch), k(kernels()), threads(threads), q_size(model.heads * model.head_dim),
          kv_size(model.kv_heads * model.head_dim), group(model.heads / model.kv_heads),
          query_rows(max(1, kQueryBlock / group)) {}

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
        sequences = space.take<Sequence>(b.sequences);
        claims = space.take<std::atomic<int>>(m.num_layers);
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
            mine.attention = space.take<float>(attention_scratch(m.head_dim));
            mine.softmax = space.take<float>((size_t)kQueryBlock * attention_row(m.head_dim));
            mine.best = space.take<Best>(b.outputs);
            if (space.base != nullptr) own[t] = mine;
        }
        if (share_splits) {
            partial_maxima = space.take<float>((size_t)items * kQueryBlock);
            partial_rows = space.take<float>((size_t)items * kQueryBlock * attention_row(m.head_dim));
        }
    }

    StepStatus check() const {
        int64_t total = 0;
        for (int s = 0; s < b.sequences; s++) {
            if (b.query_lens[s] < 0 || b.context_lens[s] < b.query_lens[s] || b.context_lens[s] > b.table_stride)
                return kBadLength;
            total += b.query_lens[s];
        }
        if (total != b.tokens) return kBadLength;
        for (int i = 0; i < b.tokens; i++) {
            if (b.ids[i] < 0 || b.ids[i] >= m.embedding.rows) return kBadToken;
            if (b.positions[i] < 0 || b.positions[i] >= m.max_positions) return kBadPosition;
            if (b.out_slots[i] < 0 || b.out_slots[i] >= b.kv.slots) return kBadSlot;
        }
        for (int i = 0; i < b.outputs; i++)
            if (b.logits_rows[i] < 0 || b.logits_rows[i] >= b.tokens) return kBadLength;
        return kDone;
    }

    // How attention is cut into items. Splits are shared out only where there is too little to do otherwise.
    void count_items() {
        int whole = 0, with_splits = 0;
        for (int s = 0; s < b.sequences; s++) {
            const int blocks = (b.query_lens[s] + query_rows - 1) / query_rows * m.kv_heads;
            whole += blocks;
            with_splits += blocks * splits_of(s);
        }
        share_splits = threads > 1 && whole < 4 * threads && with_splits > whole;
        items = share_splits ? with_splits : whole;
    }

    void fill() {
        int row = 0, item = 0;
        for (int s = 0; s < b.sequences; s++) {
            const int blocks = (b.query_lens[s] + query_rows - 1) / query_rows;
            sequences[s] = {row, b.query_lens[s], b.context_lens[s], blocks, splits_of(s), item,
                            b.slot_table + (size_t)b.table_rows[s] * b.table_stride};
            row += b.query_lens[s];
            item += blocks * m.kv_heads * (share_splits ? splits_of(s) : 1);
        }
        for (int l = 0; l < m.num_layers; l++) claims[l].store(0, std::memory_order_relaxed);
    }

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
        float *tile, *gate, *up, *row, *attention, *softmax;
        Activations hidden_in, attended_in;
        Best* best;
    };

    int splits_of(int sequence) const { return (b.context_lens[sequence] + kKvSplit - 1) / kKvSplit; }

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
        for (;;) {
            const int item = claims[l].fetch_add(1, std::memory_order_relaxed);
            if (item >= items) break;
            attend(mine, layer, l, item);
        }
        member.sync();
        if (share_splits) {
            merge_splits(member, layer, l);
            member.sync();
        }
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

    const Sequence& sequence_of(int item) const {
        int low = 0, high = b.sequences - 1;
        while (low < high) {
            const int middle = (low + high + 1) / 2;
            if (sequences[middle].first_item <= item)
                low = middle;
            else
                high = middle - 1;
        }
        return sequences[low];
    }

    AttentionItem item_of(const Sequence& s, const Layer& layer, int l, int block, int kv_head) const {
        AttentionItem item;
        const size_t first = b.kv.entry(l, 0, kv_head);
        item.key = b.kv.key + first * b.kv.entry_bytes(), item.value = b.kv.value + first * b.kv.entry_bytes();
        item.slot_stride = m.kv_heads * b.kv.entry_bytes();
        item.key_scale = b.kv.scale(b.kv.key_scales, l, first);
        item.value_scale = b.kv.scale(b.kv.value_scales, l, first);
        item.scale_stride = b.kv.dtype == kKvInt8 ? m.kv_heads : 0;
        item.head_dim = m.head_dim, item.scale = m.attention_scale, item.dtype = b.kv.dtype;
        item.slots = s.slots, item.context = s.context, item.count = 0;
        const int end = min(s.queries, (block + 1) * query_rows);
        for (int j = block * query_rows; j < end; j++) {
            const int position = s.context - s.queries + j, row = s.row + j;
            for (int h = 0; h < group; h++) {
                const int q = item.count++, at = (kv_head * group + h) * m.head_dim;
                item.query[q] = qkv + (size_t)row * (q_size + 2 * kv_size) + at;
                item.out[q] = attended + (size_t)row * q_size + at;
                item.first[q] = layer.window > 0 ? max(0, position + 1 - layer.window) : 0;
                item.last[q] = b.causal || layer.causal ? position + 1 : s.context;
            }
        }
        return item;
    }

    void attend(Own& mine, const Layer& layer, int l, int index) {
        const Sequence& s = sequence_of(index);
        const int splits = share_splits ? s.splits : 1, local = index - s.first_item;
        const int kv_head = local % m.kv_heads, split = local / m.kv_heads % splits, block = local / m.kv_heads / splits;
        const AttentionItem item = item_of(s, layer, l, block, kv_head);
        const size_t stride = attention_row(m.head_dim);
        float own_maxima[kQueryBlock];
        float* maxima = share_splits ? partial_maxima + (size_t)index * kQueryBlock : own_maxima;
        float* rows = share_splits ? partial_rows + (size_t)index * kQueryBlock * stride : mine.softmax;
        for (int q = 0; q < item.count; q++) maxima[q] = -INFINITY;
        std::memset(rows, 0, sizeof(float) * item.count * stride);
        if (share_splits) return k.attend(item, split, split + 1, maxima, rows, mine.attention);
        k.attend(item, item.first[0] / kKvSplit, s.splits, maxima, rows, mine.attention);
        for (int q = 0; q < item.count; q++) k.finish(rows + q * stride, m.head_dim, item.out[q]);
    }

    void merge_splits(const Member& member, const Layer& layer, int l) {
        int claimed = 0;
        for (int n = 0; n < b.sequences; n++) {
            const Sequence& s = sequences[n];
            for (int i = 0; i < s.blocks * m.kv_heads; i++) {
                if (claimed++ % member.threads != member.index) continue;
                const int block = i / m.kv_heads, kv_head = i % m.kv_heads;
                const AttentionItem item = item_of(s, layer, l, block, kv_head);
                const size_t stride = attention_row(m.head_dim);
                float *rows = own[member.index].softmax, maxima[kQueryBlock];
                for (int q = 0; q < item.count; q++) maxima[q] = -INFINITY;
                std::memset(rows, 0, sizeof(float) * item.count * stride);
                for (int split = 0; split < s.splits; split++) {
                    const int index = s.first_item + (block * s.splits + split) * m.kv_heads + kv_head;
                    const size_t at = (size_t)index * kQueryBlock;
                    k.merge(item.count, maxima, rows, partial_maxima + at, partial_rows + at * stride, m.head_dim);
                }
                for (int q = 0; q < item.count; q++) k.finish(rows + q * stride, m.head_dim, item.out[q]);
            }
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
    const int threads, q_size, kv_size, group, query_rows;
    Needs hidden_needs, attended_needs, inner_needs;
    bool share_splits = false;
    int items = 0;
    float *x, *qkv, *attended, *added, *partial_maxima, *partial_rows;
    Activations hidden_in, attended_in, inner_in;
    Sequence* sequences;
    std::atomic<int>* claims;
    Own* own;
};

}  // namespace

StepStatus run_step(const Model& model, const Batch& batch) {
    std::lock_guard<std::mutex> lock(in_use);
    const int threads = team_size();
    Step step(model, batch, threads);
    const StepStatus status = step.check();
    if (status != kDone || batch.tokens == 0) return status;
    step.count_items();
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

StepStatus run_linear_by_expert(const Weight& first, int64_t stride, const int32_t* counts, int experts, const float* x,
                                float* out) {
    std::lock_guard<std::mutex> lock(in_use);
    const int threads = team_size();
    LinearByExpert job{first, stride, counts, experts, x, out, threads};
    return run_job(job, threads);
}
