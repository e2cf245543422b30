// A draft head (EAGLE-3) behind its join: one layer, and a vocabulary of its own. A row is of a token and of the state before it, joined
// or the head's own; rows of one text attend to all its rows before them.
#pragma once

#include "step/row_work.h"
#include "system/pool.h"

namespace tk {

constexpr int64_t DRAFT_ROWS = 128;  // rows that go through the layer together, at most
constexpr int64_t DRAFT_TEXTS = 16;  // texts whose logits are held at once

struct DraftProgram {
    int64_t hidden;
    int64_t heads, kv_heads, head_dim, dpad;
    bool norm_before_residual;  // the layer adds to the normed state
    bool norm_output;           // the state that the next row is given is normed
    bool bf16;                  // products of bfloat16
    Norm word_norm, state_norm, q_norm, k_norm, mlp_norm, last_norm;
    Linear q, k, v, o, vocabulary;
    Input in, out, last_in;
    Mlp mlp;
    Vector freq;
    float factor;
    CellLayout cell;
};

DraftProgram parse_draft(const char* names, const double* values, int64_t count, const TensorRecord* tensors, int64_t tensors_size,
                         bool bf16_dot);

// One call as it crosses the boundary.
struct DraftArrays {
    int64_t rows, texts;
    const float *words, *states;  // [rows][hidden]: embeddings, and the states before them
    // Of texts: how many of the rows, one text behind the other; the place of the first, by which it turns; how many the cache has
    // before it.
    const int64_t *counts, *places, *lengths;
    uint8_t *const *keys, *const *values;  // of texts: cells of 16 rows, in each one part a head, with room for these rows
    float* out;                            // [texts][hidden]: of the last row what the next is given
    int64_t* best;                         // [texts]: the likeliest of the head's ids,
    float* sure;                           // and its chance
};

class DraftHead {
public:
    DraftHead(DraftProgram program, const Ops* ops, int threads);
    // Raises Error where the arrays cannot be.
    void step(const DraftArrays& in);

    struct Row {
        int64_t text, at;  // at: which of the text's rows
        bool last;         // of those of this call
    };
    struct Scratch : Arena {
        Scratch(const DraftProgram& p, const Ops& ops);
        uint8_t* linear;
        float *row, *scores, *cos, *sin;
        AttnState running, part;
        int32_t *lo, *hi;
    };
    struct Shared : Arena {
        explicit Shared(const DraftProgram& p);
        InputBuffer in, out, mlp, mid, last;
        float *x, *qkv, *logits;
        int64_t x_ld, qkv_ld, logits_ld;
        uint8_t* queries;  // [kv_heads][DRAFT_ROWS][heads / kv_heads]
    };

    const DraftProgram program;
    const Ops* ops;
    Pool pool;
    Shared shared;
    std::vector<Scratch> scratch;
    std::vector<Row> rows;  // of the call under way
};

}  // namespace tk
