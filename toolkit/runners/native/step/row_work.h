// What one thread does to rows of activations: norms, quantization, linears.
#pragma once

#include <initializer_list>

#include "step/adapters.h"
#include "step/plan.h"
#include "step/workspace.h"

namespace tk {

// Rows `tiles` of the matrix, as one of their own.
Matrix part_of(Matrix m, Range tiles);

// What rows are, where linears are others for tokens of pictures.
struct Kinds {
    const uint8_t* seen = nullptr;  // of each row whether it is one; null = none is
    LowScratch* low = nullptr;
    const Adapter* const* adapters = nullptr;  // of each row; null = none has one
    AdapterTable* table = nullptr;
    int thread = 0, threads = 1;
};

class RowWork {
protected:
    // `round`, `loose`: see Rows; `linear_scratch`: of the widest linear.
    RowWork(const Ops& o, bool round, bool loose, uint8_t* linear_scratch, const Kinds& kinds = {})
        : ops(o), round_(round), loose_(loose), scratch_(linear_scratch), kinds_(kinds), adapters_(kinds.adapters),
          table_(kinds.table), own_(kinds.table && !kinds.table->threads.empty() ? &kinds.table->threads[size_t(kinds.thread)] : nullptr),
          thread_(kinds.thread), threads_(kinds.threads), serial_(table_ ? table_->lowered.serial() : 0) {}

    // `head`: whose weights, where heads have their own.
    void norm_row(const Norm& n, const float* from, float* out, int64_t head = 0) const;
    // Row t of `to` as linears read it, once: from `from`, normed where there is a norm; or from itself.
    void prepare_row(const Input& in, const Norm& norm, const float* from, InputBuffer& to, int64_t t) const;
    void quantize_row(const Input& in, InputBuffer& to, int64_t t) const;
    Rows rows_of(const InputBuffer& in, const Linear& l, int64_t first_row) const;
    void linear(const Linear& l, const InputBuffer& in, int64_t first_row, int64_t rows, Range tiles, Store to) const;
    // Output tiles `tiles` of a gated pair (or of a plain linear with its activation), the first of them at `out`.
    void gated(const Mlp& m, const InputBuffer& in, int64_t first_row, int64_t rows, Range tiles, float* out, int64_t ld) const;

    // Whether some rows have other linears than `l`, or than those of `m`.
    bool splits(const Linear& l) const { return kinds_.seen && l.seen; }
    bool splits(const Mlp& m) const { return kinds_.seen && m.routed(); }
    // Whether adapters change the linear for any of the rows.
    bool adapted(const Linear& l, int64_t first_row, int64_t rows) const;
    // Whether one of them reads floats beside it.
    bool reads_floats(const Linear& l, int64_t first_row, int64_t rows) const;
    const Change* change(const Linear& l, int64_t row) const {
        return adapters_ && adapters_[row] ? adapters_[row]->at(l.site) : nullptr;
    }
    // What a changed embedding adds for a token.
    void embed_low(const Change& c, int64_t id, float scale, float* x) const;
    // Of a matrix whose rows in `tiles` are taken from both sides, what a change of it adds to x W, x [count][rows of the tiles], and
    // to one row of y W^T. `width`: of the results, or of y.
    void add_back(const Change& c, const Rows& x, int64_t count, Range tiles, float* out, int64_t width) const;
    void add_part(const Change& c, const float* y, int64_t width, Range tiles, float* out) const;
    // While attention leaves memory idle, what adapters multiply the inputs of these linears by is fetched, for this thread's share of few
    // rows: in so many calls of `fetch_coming`. Null and absent linears have none.
    void expect(std::initializer_list<const Linear*> linears, int64_t rows, int64_t calls) const;
    void fetch_coming() const {
        if (adapters_) own_->coming.step();
    }
    // From now on rows have these adapters; what is made of them lies from row `shift` on. `before`: so many times more such rows
    // come in this run.
    void use_adapters(const Adapters& of, int64_t from = 0, int64_t shift = 0, uint64_t before = 0) {
        adapters_ = of.empty() ? nullptr : of.data() + from;
        shift_ = shift;
        serial_ = table_->lowered.serial() - before;
    }

    // Whether the rows are read as they are.
    bool plain(const Input& in) const { return in.keys.empty() && !in.norm.present() && (!kinds_.seen || in.more.empty()); }

    const Ops& ops;

private:
    // Runs of rows of one kind: body(first row, rows, whether they are tokens of pictures).
    template <class Body>
    void each_run(int64_t first_row, int64_t rows, Body&& body) const {
        const uint8_t* seen = kinds_.seen;
        for (int64_t row = first_row, end, last = first_row + rows; row < last; row = end) {
            for (end = row + 1; end < last && seen[end] == seen[row];) end++;
            body(row, end - row, seen[row] != 0);
        }
    }
    void one(const Linear& l, const InputBuffer& in, int64_t first_row, int64_t rows, Range tiles, Store to) const;
    void pair(const Linear& gate, const Linear& up, const Mlp& m, const InputBuffer& in, int64_t first_row, int64_t rows, Range tiles,
              float* out, int64_t ld) const;
    InputBuffer lowered(const Routed& r, const InputBuffer& in, int64_t first_row, int64_t rows, int which) const;
    void with_low(const Linear& l, const InputBuffer& in, int64_t first_row, int64_t rows, Range tiles, Store to, int which = 0) const;
    void pair_with_low(const Mlp& m, const InputBuffer& in, int64_t first_row, int64_t rows, Range tiles, float* out, int64_t ld) const;

    // adapted_rows.cpp
    template <class Body>
    void each_change(const Linear& l, int64_t first_row, int64_t rows, Body&& body) const;
    void lower(const Linear& l, const Change& c, const InputBuffer& in, int64_t row, int64_t end) const;
    void add_low(const Linear& l, const Change& c, int64_t row, int64_t end, Range tiles, Store to) const;
    void changed(const Linear& l, const InputBuffer& in, int64_t first_row, int64_t rows, Range tiles, Store to) const;
    void one_whole(const Linear& l, const Change& c, const InputBuffer& in, int64_t row, int64_t rows, Range tiles, Store to) const;
    void scaled(const Linear& l, const Change& c, const InputBuffer& in, int64_t row, int64_t end, Range tiles, Store to) const;
    void gated_changed(const Mlp& m, const InputBuffer& in, int64_t first_row, int64_t rows, Range tiles, float* out, int64_t ld) const;
    void bend(const Mlp& m, float* y, int64_t width) const;
    void join_halves(const Mlp& m, float* gate, float* y, int64_t width) const;

    const bool round_, loose_;
    uint8_t* const scratch_;
    const Kinds kinds_;
    const Adapter* const* adapters_;
    AdapterTable* const table_;
    AdapterTable::Scratch* const own_;
    const int thread_, threads_;
    int64_t shift_ = 0;
    uint64_t serial_ = 0;
};

}  // namespace tk
