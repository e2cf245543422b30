// Linears by products of tiles (linear.cpp), beside those of AVX-512 that the table of `amx` has for everything else.
#pragma once

#include "ops_isa.h"

namespace tk {
namespace TK_ISA {

// Whether `count` tokens are multiplied with this weight by tiles.
bool tiled(const Matrix& w, int64_t count);
int64_t tiled_scratch(const Matrix& w);
void linear_tiled(const Matrix& w, const Rows& in, int64_t count, int64_t t0, int64_t t1, const Store& to, void* scratch);
// Both weights of one shape: `same_shape`.
void gated_tiled(const Matrix& gate, const Matrix& up, const Rows& in, int64_t count, int64_t t0, int64_t t1, const Store& to,
                 void* scratch);

}  // namespace TK_ISA
}  // namespace tk
