// The arrays of one step as they cross the boundary (toolkit/runners/step.py), and what comes back.
#pragma once

#include <cstdint>

namespace tk {

struct StepArrays {
    int64_t tokens, seqs, rows, groups;  // T, S, N, G
    int64_t axes;                        // positions of a token: 1 or 3
    const int32_t* token_ids;
    const int32_t* from_previous;
    const int32_t* positions;  // [axes, T]
    const int32_t* reach;      // [T] the place behind the last that a token sees; null = each sees up to itself
    const int32_t* types;      // [T] which row of Program::types is added; null = the first
    const int32_t* cu_seqlens;
    const int32_t* seq_lens;
    const int32_t* const* block_tables;
    const int64_t* table_width;
    const int64_t* const* slot_mapping;
    const int8_t* rope_set;
    const int32_t* rope_length;  // [T] by which ropes turn that have `ntk`, 0 = as trained; null = by rope_set
    const int32_t* adapter;      // [S] slot of each sequence's adapter, -1 = none; null = none has one
    const int32_t* sample_index;
    int64_t logits_size;
    const int32_t* logits_index;
    int64_t hidden_size;
    const int32_t* hidden_index;
    int64_t aux_size;
    const int32_t* aux_index;  // flat tokens whose residual stream comes back …
    int64_t aux_sublayers_size;
    const int32_t* aux_sublayers;  // … before each of these sublayers; their number: behind the last
    int64_t target_size;
    const int32_t* target_index;
    const int32_t* target_ids;
    int64_t routes_size;
    const int32_t* routes_index;  // flat tokens whose chosen experts come back
    int64_t embeds_size;
    const float* embeds;  // [E, hidden and as much for each of the deep branches]
    const int32_t* embed_index;
    int64_t fills;  // keys and values of all layers are made of `embeds`, and nothing else is computed
    int64_t routed_size;
    const int32_t* routed;  // flat tokens that have linears of pictures
    int64_t rows_size;  // of new pictures
    const float* picture_rows;  // [rows_size, hidden]
    int64_t new_size;
    const int32_t* new_pictures;  // [new_size, 2] number and rows
    int64_t gone_size;
    const int32_t* gone;  // numbers of pictures
    int64_t views_size;
    const int32_t* views;     // [views_size, 2] first token and the one behind the last
    const int32_t* view_ptr;  // [views_size + 1]
    int64_t seen_size;
    const int32_t* seen;  // numbers of pictures
    const int64_t* copies_size;
    const int32_t* const* copies;
    // sampling
    const float* temperature;
    const int32_t* top_k;
    const float* top_p;
    const float* min_p;
    const float* repetition;
    const float* presence;
    const float* frequency;
    const uint64_t* seed;
    const int64_t* position;
    int64_t history_size;
    const int32_t* history_ptr;
    const int32_t* history_ids;
    const int32_t* history_count;
    int64_t bias_size;
    const int32_t* bias_ptr;
    const int32_t* bias_ids;
    const float* bias_values;
    const int32_t* logprobs;
    const int32_t* grammar;
};

struct StepResults {
    int64_t top_width;
    int32_t* tokens;        // [N]
    float* logprob;         // [N]
    int32_t* top_ids;       // [N, top_width]
    float* top_logprobs;    // [N, top_width]
    float* logits;          // [logits_size, vocab]
    float* hidden;          // [hidden_size, hidden]
    float* aux;             // [aux_size, aux_sublayers_size, hidden]
    float* target_logprobs; // [target_size]
    uint16_t* routes;       // [routes_size, mixtures, the most that one chooses] heaviest first; NO_EXPERT fills
    int32_t* bad;           // [N] 1 where no token can be drawn: the logits or the row's parameters are no numbers to draw by
};

constexpr uint16_t NO_EXPERT = 0xffff;
constexpr int64_t MOST_AUX = 8;  // sublayers before which the stream comes back

struct Program;

// Every index of the step against the program and its cache. Raises Error naming the array.
void check_step(const Program& p, const StepArrays& in, const StepResults& out, int64_t previous);

}  // namespace tk
