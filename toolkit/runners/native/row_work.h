// What one thread does to rows of activations: norms, quantization, linears.
#pragma once

#include "plan.h"
#include "workspace.h"

namespace tk {

// Rows `tiles` of the matrix, as one of their own.
Matrix part_of(Matrix m, Range tiles);

class RowWork {
protected:
    // `round`, `loose`: see Rows; `linear_scratch`: of the widest linear.
    RowWork(const Ops& o, bool round, bool loose, uint8_t* linear_scratch) : ops(o), round_(round), loose_(loose), scratch_(linear_scratch) {}

    // `head`: whose weights, where heads have their own.
    void norm_row(const Norm& n, const float* from, float* out, int64_t head = 0) const;
    // Row t of `to` as linears read it: from `from`, normed where there is a norm.
    void prepare_row(const Input& in, const Norm& norm, const float* from, InputBuffer& to, int64_t t) const;
    void quantize_row(const Input& in, InputBuffer& to, int64_t t) const;
    Rows rows_of(const InputBuffer& in, const Linear& l, int64_t first_row) const;
    void linear(const Linear& l, const InputBuffer& in, int64_t first_row, int64_t rows, Range tiles, Store to) const;
    // Output tiles `tiles` of a gated pair (or of a plain linear with its activation), the first of them at `out`.
    void gated(const Mlp& m, const InputBuffer& in, int64_t first_row, int64_t rows, Range tiles, float* out, int64_t ld) const;

    const Ops& ops;

private:
    const bool round_, loose_;
    uint8_t* const scratch_;
};

}  // namespace tk
