// Linears of trellis codes by those of 8-bit codes, which `ops` has.
#pragma once

#include "ops_isa.h"

namespace tk {
namespace TK_ISA {

int64_t trellis_scratch(const Ops& ops, const Matrix& w);
void linear_trellis(const Ops& ops, const Matrix& w, const Rows& in, int64_t count, int64_t t0, int64_t t1, const Store& to, void* scratch);
void gated_trellis(const Ops& ops, const Matrix& gate, const Matrix& up, const Rows& in, int64_t count, int64_t t0, int64_t t1,
                   const Store& to, void* scratch);
void trellis_row(const Matrix& w, int64_t row, float scale, float* out);

}  // namespace TK_ISA
}  // namespace tk
