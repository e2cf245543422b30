// One thread's view of a running step.
#pragma once

#include <utility>
#include <vector>

#include "profile.h"
#include "step.h"
#include "workspace.h"

namespace tk {

struct Range {
    int64_t first, last;
};

// Which rows leave the layers and who asked for them: (row, index of the request), sorted.
struct Plan {
    std::vector<int64_t> rows;  // flat tokens; those with logits first
    int64_t logit_rows = 0;
    float* hidden = nullptr;  // [rows][hidden_ld], after the final norm
    std::vector<int64_t> hidden_row;
    std::vector<std::pair<int64_t, int64_t>> samples, logits, targets;
};

class Run {
public:
    Run(Model& m, const StepArrays& i, const StepResults& o, Plan& pl, const std::vector<int64_t>& s,
        const std::vector<QueryBlock>& b, int64_t f, int64_t c, int index)
        : model(m), p(m.program), ops(*m.ops), w(*m.work), in(i), out(o), plan(pl), seq_of(s), blocks(b), first(f), count(c),
          thread(index), threads(m.pool.size()), own(m.work->threads[size_t(index)]) {}

    void layers();
    void heads();

private:
    Range mine(int64_t n, int64_t unit = 1) const;
    int64_t pair_unit() const { return count > SMALL ? 2 : 1; }
    void tick(Phase phase) const {
        if (thread == 0 && model.profile) model.profile->tick(phase);
    }
    void sync(Phase phase) const {
        model.pool.barrier();
        tick(phase);
    }

    // Inputs of linears: normed and quantized rows, in this thread's buffer or the shared one.
    void prepare_row(const Input& in, const Norm& norm, const float* from, InputBuffer& to, int64_t t) const;
    void quantize_row(const Input& in, InputBuffer& to, int64_t t) const;
    const InputBuffer& prepare(const Input& in, const Norm& norm, const float* from, int64_t ld, int64_t rows);
    const InputBuffer& prepare_mid(const Input& in, int64_t rows);
    void linear(const Linear& l, const InputBuffer& in, int64_t first_row, int64_t rows, Range tiles, Store to) const;
    Store residual(const Sublayer& s) const;
    void add_post(const Sublayer& s, int64_t rows);

    void embed();
    void mlp(const Sublayer& s);

    // attention.cpp
    void attention(const Sublayer& s);
    void project(const Attention& a, const InputBuffer& x);
    void turn_and_store(const Attention& a, int64_t t);
    int64_t position_of(int64_t seq, int64_t flat) const { return in.seq_lens[seq] - (in.cu_seqlens[seq + 1] - flat); }
    Range tiles_of(const Attention& a, int64_t seq, int64_t t0, int64_t t1) const;
    void load_tile(const Attention& a, int64_t seq, int64_t head, int64_t tile, Range tokens, KvTile* to);
    void attend_tile(const Attention& a, int64_t seq, int64_t head, int64_t t0, int64_t t1, int64_t tile, const AttnState& to);
    void attend_block(const Attention& a, const QueryBlock& b, int64_t head);
    void attend_split(const Attention& a);
    void merge_split(const Attention& a);
    void finish_rows(const Attention& a, int64_t head, int64_t t, const AttnState& s, int64_t row, float* to);
    const uint8_t* query(const Attention& a, int64_t head, int64_t t) const;

    // moe.cpp
    void moe(const Sublayer& s);
    void route(const Moe& m, const InputBuffer& x);
    void gather_pairs(const Moe& m, const InputBuffer& x);
    void experts(const Moe& m);
    void shared_expert(const Moe& m, const InputBuffer& x);
    void combine(const Sublayer& s);

    // sampling.cpp
    void finish_row(int64_t row, float* logits);
    void sample(int64_t i, const float* raw);

    Model& model;
    Program& p;
    const Ops& ops;
    Workspace& w;
    const StepArrays& in;
    const StepResults& out;
    Plan& plan;
    const std::vector<int64_t>& seq_of;  // of the chunk's tokens
    const std::vector<QueryBlock>& blocks;
    const int64_t first, count;  // the chunk's flat tokens
    const int thread, threads;
    ThreadScratch& own;
};

}  // namespace tk
