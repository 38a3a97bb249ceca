// A whole forward pass of a Llama-shaped model in one call.
#pragma once

#include "kernels.h"

// (python) Pointers that are null switch their part off. Norm weights are float32, as they multiply.
struct Layer {
    Weight q, k, v, o, gate, up, down;
    const float *input_norm, *mlp_norm;              // before attention, before the MLP
    const float *attention_out_norm, *mlp_out_norm;  // on what is added back (Gemma), or null
    const float *q_norm, *k_norm;                    // on each head, or null
    const float *cos, *sin;                          // [max_positions][head_dim / 2]
    int32_t window;                                  // positions a query sees, itself included; 0: all
    int32_t causal;                                  // also where the batch is not
};

// (python)
struct Model {
    int32_t num_layers, hidden, heads, kv_heads, head_dim, intermediate, activation;  // 0 SiLU, 1 GELU tanh
    int32_t max_positions;
    float eps, attention_scale, embedding_scale;
    const Layer* layers;
    const float* final_norm;
    Weight embedding, head;
    // Of a drafter that chooses its tokens: the target's id of each of the head's rows, null where that is the row. With
    // a successor head, what a token says about the next: successor [hidden][hidden], 0 rows: there is none.
    const int64_t* token_ids;
    const float* successor_norm;
    Weight successor;
};

// (python) Fields as in backends/forward.py.
struct Batch {
    int32_t tokens, sequences, outputs, num_captures, causal;
    int64_t table_stride;
    const int64_t *ids, *positions, *out_slots;
    const int64_t* logits_rows;                                      // [outputs]
    const int32_t *query_lens, *context_lens, *table_rows;           // [sequences]
    const int32_t *slot_table, *capture_layers;                      // [.][table_stride], [num_captures]
    KvPool kv;
    float* logits;                                                   // [outputs][head.rows], or null
    int64_t* chosen;  // [outputs], the best token, or null; -1 where logits are not finite
    float* chances;   // [outputs], its probability, or null
    float* captures;                                                 // [num_captures][tokens][hidden]
};

// (python) A DFlash drafter's context pass: kv is k and v of every layer, one below the other.
struct ContextModel {
    int32_t layers, kv_heads, head_dim, max_positions;
    float eps;
    int32_t reserved;
    Weight fc, kv;
    const float *hidden_norm, *k_norms;  // [fc.rows], [layers][head_dim]
    const float *cos, *sin;              // [max_positions][head_dim / 2]
};

// (python)
struct ContextRows {
    int32_t rows;
    const float* features;             // [rows][fc.columns]
    const int64_t *positions, *slots;  // [rows]
    KvPool kv;
};

// (python) Attention of one layer to the cache, once the keys and values of the pass's tokens are there. Other fields are
// as in Batch; kv may have keys for values (a latent cache).
struct LayerAttentionCall {
    int32_t tokens, sequences, heads, layer, window, causal;
    float scale;
    int64_t table_stride;
    const int64_t* out_slots;
    const int32_t *query_lens, *context_lens, *table_rows, *slot_table;
    const float *query, *key, *value;  // [tokens][heads or kv_heads][head_dim]
    KvPool kv;
    float* out;  // [tokens][heads][head_dim]
};

// (python) Rows of one sequence in a pass over layers with recurrent state: positions from `start` on. Its stores are
// those from first_store on, in order of their chunks. is_certain: none of them is a draft.
struct StateSpan {
    int32_t table_row, first_row, rows, start, is_certain, first_store, stores, reserved;
};

// (python) Where the state at the end of the chunk-th chunk that a span touches goes: `to` in layer 0, and so many floats
// further in each next layer.
struct StateStore {
    int64_t chunk, layer_stride;
    float* to;
};

// (python) Linear attention of one layer; tensors as in backends/linear_attention.py and backends/state_pool.py.
struct RecurrenceCall {
    int32_t spans, layer, heads, key_heads, key_dim, value_dim, delta_rule, reserved;
    const StateSpan* span;
    const StateStore* store;
    const float *query, *rows;  // [T][key_heads][key_dim], [T][sum of row_parts]
    const float* recurrent;     // of this layer
    float *recent, *out;        // of this layer, [T][heads][value_dim]
};

// (python) A causal depthwise convolution: row r has tap t at inputs[tap_rows[t][r]].
struct ConvolutionCall {
    int32_t rows, taps, channels, reserved;
    const int64_t* tap_rows;             // [taps][rows]
    const float *inputs, *weight, *bias;  // [.][channels], [taps][channels], [channels] or null
    float* out;                          // [rows][channels]
};

enum StepStatus { kDone, kBadToken, kBadPosition, kBadSlot, kBadLength, kNoMemory };

StepStatus run_step(const Model& model, const Batch& batch);
StepStatus run_context(const ContextModel& model, const ContextRows& rows);
StepStatus run_attention(const LayerAttentionCall& call);
StepStatus run_recurrence(const RecurrenceCall& call);
StepStatus run_convolution(const ConvolutionCall& call);

// x [rows][columns] float32 to out [rows][weight.rows], bias added.
StepStatus run_linear(const Weight& weight, const float* x, int rows, float* out);

// The same, each row with the matrix of its expert: `first` is expert 0's, the next ones follow `stride` bytes after
// one another. counts [experts]: so many rows of x, one after another, go to each; there is at least one row.
StepStatus run_linear_by_expert(const Weight& first, int64_t stride, const int32_t* counts, int experts, const float* x,
                                float* out);
