// What one thread does to rows of activations: norms, quantization, linears.
#pragma once

#include "step/plan.h"
#include "step/workspace.h"

namespace tk {

// Rows `tiles` of the matrix, as one of their own.
Matrix part_of(Matrix m, Range tiles);

// What rows are, where linears are others for tokens of pictures.
struct Kinds {
    const uint8_t* seen = nullptr;  // of each row whether it is one; null = none is
    LowScratch* low = nullptr;
};

class RowWork {
protected:
    // `round`, `loose`: see Rows; `linear_scratch`: of the widest linear.
    RowWork(const Ops& o, bool round, bool loose, uint8_t* linear_scratch, const Kinds& kinds = {})
        : ops(o), round_(round), loose_(loose), scratch_(linear_scratch), kinds_(kinds) {}

    // `head`: whose weights, where heads have their own.
    void norm_row(const Norm& n, const float* from, float* out, int64_t head = 0) const;
    // Row t of `to` as linears read it: from `from`, normed where there is a norm.
    void prepare_row(const Input& in, const Norm& norm, const float* from, InputBuffer& to, int64_t t) const;
    void quantize_row(const Input& in, InputBuffer& to, int64_t t) const;
    Rows rows_of(const InputBuffer& in, const Linear& l, int64_t first_row) const;
    void linear(const Linear& l, const InputBuffer& in, int64_t first_row, int64_t rows, Range tiles, Store to) const;
    // Output tiles `tiles` of a gated pair (or of a plain linear with its activation), the first of them at `out`.
    void gated(const Mlp& m, const InputBuffer& in, int64_t first_row, int64_t rows, Range tiles, float* out, int64_t ld) const;

    // Whether some rows have other linears than `l`, or than those of `m`.
    bool splits(const Linear& l) const { return kinds_.seen && l.seen; }
    bool splits(const Mlp& m) const { return kinds_.seen && m.routed(); }

    // Whether the rows are read as they are.
    bool plain(const Input& in) const { return in.keys.empty() && (!kinds_.seen || in.more.empty()); }

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

    const bool round_, loose_;
    uint8_t* const scratch_;
    const Kinds kinds_;
};

}  // namespace tk
