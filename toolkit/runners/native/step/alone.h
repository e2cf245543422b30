// A linear by itself, outside of any model's step.
#pragma once

#include "ops.h"

namespace tk {

// Rows x [count, cols] by `w`, to [count, 16 * tiles], by so many threads, which begin and end here. `turned`: the matrix is, by
// Ops::hadamard, and rows are before they are multiplied.
void linear_alone(const Ops& ops, const Matrix& w, bool turned, const float* x, int64_t count, float* to, int threads);

}  // namespace tk
