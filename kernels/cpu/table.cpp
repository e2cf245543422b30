// The table of one instruction set.
#include "ops_isa.h"

namespace tk {
namespace TK_ISA {
namespace {

#define TK_TEXT_(x) #x
#define TK_TEXT(x) TK_TEXT_(x)

int64_t linear_scratch(const Matrix& w) { return w.format == INT ? linear_int_scratch(w) : linear_dense_scratch(w); }

void linear(const Matrix& w, const Rows& in, int64_t count, int64_t t0, int64_t t1, const Store& to, void* scratch) {
    (w.format == INT ? linear_int : linear_dense)(w, in, count, t0, t1, to, scratch);
}

void gated(const Matrix& gate, const Matrix& up, const Rows& in, int64_t count, int64_t t0, int64_t t1, const Store& to,
           void* scratch) {
    (gate.format == INT ? gated_int : gated_dense)(gate, up, in, count, t0, t1, to, scratch);
}

void matrix_row(const Matrix& w, int64_t row, float scale, float* out) {
    (w.format == INT ? int_row : dense_row)(w, row, scale, out);
}

}  // namespace

extern const Ops table;
const Ops table = {
    TK_TEXT(TK_ISA),
#if defined(TK_BF16_DOT)
    1,
#else
    0,
#endif
    linear_scratch, linear, gated, linear_back, matrix_row, quantize, round_rows, rms_norm, layer_norm, add_scaled, rope, hadamard, activate,
    multiply, to_bf16, kv_write, kv_cell, kv_load, key_cell, attn_tile, attn_merge, attn_finish, convolve, recur,
    row_max, at_least, sum_exp, scale_logits,
};

}  // namespace TK_ISA
}  // namespace tk
