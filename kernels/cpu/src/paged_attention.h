// Paged attention of the queries of a pass, by a team. A step calls it for each of its layers, and `LayerAttention` for
// one, of a model whose passes are no steps.
#pragma once

#include <cmath>

#include "job.h"

namespace {

// What is the same in all layers of a pass; as in Batch.
struct AttentionPass {
    int heads;
    float scale;
    int sequences;
    const int32_t *query_lens, *context_lens, *table_rows, *slot_table;
    int64_t table_stride;
    const KvPool& kv;

    // Lengths that make up so many tokens, all of which have a slot to be written to.
    StepStatus check(int tokens, const int64_t* out_slots) const {
        int64_t total = 0;
        for (int s = 0; s < sequences; s++) {
            if (query_lens[s] < 0 || context_lens[s] < query_lens[s] || context_lens[s] > table_stride) return kBadLength;
            total += query_lens[s];
        }
        if (total != tokens) return kBadLength;
        for (int i = 0; i < tokens; i++)
            if (out_slots[i] < 0 || out_slots[i] >= kv.slots) return kBadSlot;
        return kDone;
    }
};

// Queries [heads][head_dim] of each token, `query_stride` floats apart, and where to put the like. layer: of the pool.
// window: positions a query sees, 0: all. causal: queries see no later one.
struct AttentionLayer {
    const float* query;
    size_t query_stride;
    float* out;
    int layer, window;
    bool causal;
};

// Items are runs of queries that share a KV head, over all of their context or, where there would be too few of them,
// over one of its splits. Long runs read keys and values less often, short ones keep more threads busy. Where these only
// wait for memory, a thread takes the KV heads of a split one after another, once it has read all of their entries. Which
// item a query is in changes no bit of its result.
class PagedAttention {
    static constexpr int kShortRun = kQueryBlock / 3;
    static constexpr size_t kCached = 512 << 10;  // bytes that a core's own cache holds beside other things

public:
    PagedAttention(const Kernels& k, const AttentionPass& pass, int threads)
        : k(k), p(pass), kv(pass.kv), threads(threads), group(pass.heads / pass.kv.kv_heads) {
        const int enough = 4 * threads;
        length = kQueryBlock;
        if (threads > 1 && count(false) < enough) length = kShortRun;
        int longest = 1;
        for (int s = 0; s < p.sequences; s++) longest = max(longest, p.query_lens[s] * group);
        length = min(length, (longest + 15) / 16 * 16);  // partial maxima of two items share no cache line
        const int whole = count(false), with_splits = count(true);
        share_splits = threads > 1 && whole < enough && with_splits > whole;
        items = share_splits ? with_splits : whole;
        const bool keeps_busy = items / kv.kv_heads >= 2 * threads;
        const bool fits = 2 * kKvSplit * kv.kv_heads * kv.entry_bytes() <= kCached;
        together = length <= kShortRun && keeps_busy && fits ? kv.kv_heads : 1;
    }

    void lay_out(Workspace& space) {
        sequences = space.take<Sequence>(p.sequences);
        softmax = space.take<float>((size_t)threads * together * softmax_size());
        own_maxima = space.take<float>((size_t)threads * together * length);
        own_items = space.take<AttentionItem>((size_t)threads * together);
        scratch = space.take<float>((size_t)threads * attention_scratch(kv.head_dim));
        if (!share_splits) return;
        partial_maxima = space.take<float>((size_t)items * length);
        partial_rows = space.take<float>((size_t)items * softmax_size());
    }

    void fill() {
        int row = 0, item = 0;
        for (int s = 0; s < p.sequences; s++) {
            sequences[s] = {row, p.query_lens[s], p.context_lens[s], runs_of(s), splits_of(s), item,
                            p.slot_table + (size_t)p.table_rows[s] * p.table_stride};
            row += p.query_lens[s];
            item += runs_of(s) * kv.kv_heads * (share_splits ? splits_of(s) : 1);
        }
    }

    // Keys and values are written; all members call it, and it ends with all of them done.
    void run(const Member& member, const AttentionLayer& layer) {
        member.take_turns(items / together, [&](int turn) { attend(member, layer, turn * together); });
        member.sync();
        if (!share_splits) return;
        merge_splits(member, layer);
        member.sync();
    }

private:
    struct Sequence {
        int row, queries, context, runs, splits, first_item;
        const int32_t* slots;
    };

    int runs_of(int s) const { return (p.query_lens[s] * group + length - 1) / length; }
    int splits_of(int s) const { return (p.context_lens[s] + kKvSplit - 1) / kKvSplit; }
    int count(bool with_splits) const {
        int items = 0;
        for (int s = 0; s < p.sequences; s++) items += runs_of(s) * kv.kv_heads * (with_splits ? splits_of(s) : 1);
        return items;
    }
    size_t softmax_size() const { return (size_t)length * attention_row(kv.head_dim); }

    const Sequence& sequence_of(int item) const {
        int low = 0, high = p.sequences - 1;
        while (low < high) {
            const int middle = (low + high + 1) / 2;
            if (sequences[middle].first_item <= item)
                low = middle;
            else
                high = middle - 1;
        }
        return sequences[low];
    }

    void describe(AttentionItem& item, const Sequence& s, const AttentionLayer& layer, int run, int kv_head) const {
        const size_t first = kv.entry(layer.layer, 0, kv_head);
        item.key = kv.key + first * kv.entry_bytes(), item.value = kv.value + first * kv.entry_bytes();
        item.slot_stride = kv.kv_heads * kv.entry_bytes();
        item.key_scale = kv.scale(kv.key_scales, layer.layer, first);
        item.value_scale = kv.scale(kv.value_scales, layer.layer, first);
        item.scale_stride = kv.dtype == kKvInt8 ? kv.kv_heads : 0;
        item.head_dim = kv.head_dim, item.scale = p.scale, item.dtype = kv.dtype;
        item.slots = s.slots, item.context = s.context, item.count = 0;
        const int end = min(s.queries * group, (run + 1) * length);
        for (int i = run * length; i < end; i++) {
            const int token = i / group, position = s.context - s.queries + token, q = item.count++;
            const size_t row = s.row + token, at = (size_t)(kv_head * group + i % group) * kv.head_dim;
            item.query[q] = layer.query + row * layer.query_stride + at;
            item.out[q] = layer.out + row * p.heads * kv.head_dim + at;
            item.first[q] = layer.window > 0 ? max(0, position + 1 - layer.window) : 0;
            item.last[q] = layer.causal ? position + 1 : s.context;
        }
    }

    // Items [index, index + together): as many KV heads.
    void attend(const Member& member, const AttentionLayer& layer, int index) {
        const Sequence& s = sequence_of(index);
        const int splits = share_splits ? s.splits : 1, local = index - s.first_item;
        const int kv_head = local % kv.kv_heads, split = local / kv.kv_heads % splits, run = local / kv.kv_heads / splits;
        const size_t own = (size_t)member.index * together;
        float* maxima = share_splits ? partial_maxima + (size_t)index * length : own_maxima + own * length;
        float* rows = share_splits ? partial_rows + index * softmax_size() : softmax + own * softmax_size();
        AttentionItem* mine = own_items + own;
        for (int h = 0; h < together; h++) describe(mine[h], s, layer, run, kv_head + h);
        for (int q = 0; q < together * length; q++) maxima[q] = -INFINITY;
        std::memset(rows, 0, sizeof(float) * together * softmax_size());
        int first = split, last = split + 1;
        if (!share_splits) {  // queries go by position
            first = mine->first[0] / kKvSplit;
            last = (mine->last[mine->count - 1] + kKvSplit - 1) / kKvSplit;
        }
        const int at_once = together > 1 ? 1 : last - first;
        for (int from = first; from < last; from += at_once) {
            if (together > 1) fetch(s, layer.layer, from);
            for (int h = 0; h < together; h++)
                k.attend(mine[h], from, from + at_once, maxima + h * length, rows + h * softmax_size(),
                         scratch + member.index * attention_scratch(kv.head_dim));
        }
        if (share_splits) return;
        for (int h = 0; h < together; h++) finish(mine[h], rows + h * softmax_size());
    }

    void finish(const AttentionItem& item, const float* rows) const {
        for (int q = 0; q < item.count; q++) k.finish(rows + q * attention_row(kv.head_dim), kv.head_dim, item.out[q]);
    }

    // Reads what a split has of all heads, in the order of memory, so that it is in the cache when heads are taken one by
    // one: what lies apart comes at half the speed.
    void fetch(const Sequence& s, int layer, int split) const {
        const size_t bytes = kv.kv_heads * kv.entry_bytes(), base = kv.entry(layer, 0, 0) * kv.entry_bytes();
        for (const char* pool : {kv.key, kv.value})
            for (int p = split * kKvSplit; p < min((split + 1) * kKvSplit, s.context); p++) {
                const volatile char* entry = pool + base + s.slots[p] * bytes;
                for (size_t line = 0; line < bytes; line += 64) (void)entry[line];
            }
    }

    void merge_splits(const Member& member, const AttentionLayer& layer) {
        int claimed = 0;
        for (int n = 0; n < p.sequences; n++) {
            const Sequence& s = sequences[n];
            for (int i = 0; i < s.runs * kv.kv_heads; i++) {
                if (claimed++ % member.threads != member.index) continue;
                const int run = i / kv.kv_heads, kv_head = i % kv.kv_heads;
                AttentionItem item;
                describe(item, s, layer, run, kv_head);
                const size_t stride = attention_row(kv.head_dim);
                float *rows = softmax + (size_t)member.index * together * softmax_size(), maxima[kQueryBlock];
                for (int q = 0; q < item.count; q++) maxima[q] = -INFINITY;
                std::memset(rows, 0, sizeof(float) * item.count * stride);
                for (int split = 0; split < s.splits; split++) {
                    const int index = s.first_item + (run * s.splits + split) * kv.kv_heads + kv_head;
                    const size_t at = (size_t)index * length;
                    k.merge(item.count, maxima, rows, partial_maxima + at, partial_rows + at * stride, kv.head_dim);
                }
                finish(item, rows);
            }
        }
    }

    const Kernels& k;
    const AttentionPass p;
    const KvPool& kv;
    const int threads, group;
    int length;  // of a run, in queries
    bool share_splits;
    int items, together;  // KV heads that a thread takes one after another, split by split
    Sequence* sequences = nullptr;
    AttentionItem* own_items = nullptr;
    float *softmax = nullptr, *own_maxima = nullptr, *scratch = nullptr, *partial_maxima = nullptr, *partial_rows = nullptr;
};

// One layer by itself: the keys and values of the pass's tokens go to their slots, then the queries attend.
struct LayerAttention {
    const LayerAttentionCall& c;
    const int threads;
    const Kernels& k = kernels();
    const AttentionPass pass = {c.heads, c.scale, c.sequences, c.query_lens, c.context_lens, c.table_rows,
                                c.slot_table, c.table_stride, c.kv};
    PagedAttention attention{k, pass, threads};

    void lay_out(Workspace& space) { attention.lay_out(space); }
    void fill() { attention.fill(); }

    void run(const Member& member) {
        const unsigned before = k.enter();
        const int kv_heads = c.kv.kv_heads, head_dim = c.kv.head_dim;
        int first, last;
        member.share(c.tokens * kv_heads, first, last);
        for (int i = first; i < last; i++) {
            const size_t at = (size_t)i * head_dim;
            write_entry(k, c.kv, c.layer, c.out_slots[i / kv_heads], i % kv_heads, c.key + at, c.value + at);
        }
        member.sync();
        attention.run(member, {c.query, (size_t)c.heads * head_dim, c.out, c.layer, c.window, c.causal != 0});
        k.leave(before);
    }
};

}  // namespace
