// Linears of bfloat16 by tile registers, for callers who let sums be in any order.
#pragma once

#include "ops_isa.h"

namespace tk {
namespace TK_ISA {

// Whether a weight, or both of a gated pair, are multiplied so.
bool loose(const Matrix& w, const Matrix& other, const Rows& in);
int64_t loose_scratch(const Matrix& w);
void linear_loose(const Matrix& w, const Rows& in, int64_t count, int64_t t0, int64_t t1, const Store& to, void* scratch);
void gated_loose(const Matrix& gate, const Matrix& up, const Rows& in, int64_t count, int64_t t0, int64_t t1, const Store& to,
                 void* scratch);

}  // namespace TK_ISA
}  // namespace tk
