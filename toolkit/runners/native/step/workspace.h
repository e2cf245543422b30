// Buffers of a step and the thread-private part of them, sized for the widest layer and one chunk of tokens.
#pragma once

#include <vector>

#include "step/plan.h"
#include "step/program.h"

namespace tk {

// Memory that is zero, page-aligned and touched lazily.
class Pages {
public:
    Pages() = default;
    explicit Pages(int64_t bytes);
    ~Pages();
    Pages(Pages&& o) noexcept;
    Pages& operator=(Pages&& o) noexcept;
    uint8_t* data() const { return data_; }
    int64_t size() const { return size_; }
    template <class T>
    T* at(int64_t offset) const { return reinterpret_cast<T*>(data_ + offset); }

private:
    uint8_t* data_ = nullptr;
    int64_t size_ = 0;
};

// One input in the forms that linears read: floats and up to MAX_KEYS quantizations.
struct InputBuffer {
    float* x = nullptr;
    int64_t ldx = 0;
    int8_t* q[MAX_KEYS] = {};
    float* scale[MAX_KEYS] = {};
    int32_t* sum[MAX_KEYS] = {};
    int64_t ldq = 0, lds = 0;

    Rows rows(const Linear& l, int64_t t = 0) const {
        Rows r;
        r.x = x + t * ldx;
        r.ldx = ldx;
        r.q = q[l.slot] + t * ldq;
        r.ldq = ldq;
        r.scale = scale[l.slot] + t * lds;
        r.sum = sum[l.slot] + t * lds;
        r.lds = lds;
        return r;
    }
};

constexpr int64_t STRIPE = 256;       // columns of a gated product that are quantized together, at most
constexpr int64_t LOGIT_BYTES = 16 << 20;  // buffer of logits rows (at least 8 rows)

// Query rows with their running state, and the tile in compute form.
struct AttnScratch {
    int64_t rows;
    AttnState running, part;
    int32_t *lo, *hi, *from;
    float* slope;
    float* scores;
    uint8_t *keys, *values;  // loaded cells
    float* row;              // [dpad]
};

// What products of low rank need: x[i] is a(x) of rows [first, last) by `of` (null = of nothing), [CHUNK][ld]; `gate` one half of a
// gated product, [CHUNK][STRIPE].
struct LowScratch {
    struct Rows {
        float* x = nullptr;
        const Routed* of = nullptr;
        Range rows{0, 0};
    };
    Rows made[2];
    int64_t ld = 0;
    float* gate = nullptr;
};

struct ThreadScratch {
    LowScratch low;
    uint8_t* linear;
    float* stripe;        // [CHUNK][STRIPE]
    InputBuffer in, mid;  // SMALL rows
    AttnScratch attention;
    float* head_row;  // [max dpad]
    float *keep, *weight;  // [CHUNK], of a head's state by token
    float* logits;    // [vocab padded], where a row is changed before sampling
    int32_t* ids;     // [vocab padded], of those that are likely enough to be drawn
};

struct ExpertRows {
    std::vector<int32_t> expert;    // [tokens * top_k] ascending within a token
    std::vector<float> weight;      // [tokens * top_k]
    std::vector<int32_t> start;     // [experts + 1] into pairs
    std::vector<int32_t> pair;      // pair index (token * top_k + k) by expert
    std::vector<int32_t> place;     // inverse of pair
    std::vector<int32_t> active;    // experts with rows
    std::vector<const Adapter*> adapters;  // of pairs by expert; empty where no token has one
};

// Memory taken piece by piece, zero and touched lazily, that goes back together.
class Arena {
protected:
    template <class T>
    T* take(int64_t count) {
        // a line more, so that vector loads at the end of an array stay inside
        pages_.emplace_back(count * int64_t(sizeof(T)) + 128);
        return reinterpret_cast<T*>(pages_.back().data());
    }
    InputBuffer input(int64_t rows, int64_t width);

private:
    std::vector<Pages> pages_;
};

struct Workspace : Arena {
    Workspace(const Program& p, const Ops& ops, int threads);

    int64_t gathered;  // bytes that ranks hand each other at once, at most
    int64_t hidden_ld, qkv_ld, spread_ld, vocab_ld, logit_rows, moe_pairs, router_ld, moe_width;
    float *x, *tmp, *block = nullptr, *qkv, *logits, *router;
    float* spread = nullptr;  // [CHUNK][spread_ld], what all heads of latent attention give, before it becomes values, or what a convolution gives
    int64_t queries_ld;  // numbers of a token's queries in the layer that has most
    uint8_t* queries;    // of each part of the chunk, or of all: [kv_head][token][per_kv][dpad], float or bfloat16
    InputBuffer in, mid, pairs_in, pairs_mid;
    InputBuffer beside;  // what an MLP beside experts reads where it is not what they read
    int64_t given_ld = 0;
    float* given = nullptr;  // [CHUNK][given_ld], what layers are given of tokens
    float* pairs_out;
    std::vector<float*> cos, sin;  // a rope: [CHUNK][rotary / 2]
    uint8_t* dummy_cell;           // zeros
    std::vector<ThreadScratch> threads;

    Pages partial_pages, hidden_pages;
    float* partials(int64_t floats);    // grows partial_pages
    float* hidden_rows(int64_t rows);   // [rows][hidden_ld]

    ExpertRows experts;
};

}  // namespace tk
