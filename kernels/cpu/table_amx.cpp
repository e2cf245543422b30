// The table of `amx`: that of AVX-512, but for linears of many tokens.
#include "linear_amx.h"

namespace tk {
namespace avx512vnni {
extern const Ops table;
}
namespace amx {
namespace {

const Ops& base = avx512vnni::table;

int64_t linear_scratch(const Matrix& w) {
    const int64_t a = base.linear_scratch(w), b = tiled_scratch(w);
    return a > b ? a : b;
}

void linear(const Matrix& w, const Rows& in, int64_t count, int64_t t0, int64_t t1, const Store& to, void* scratch) {
    (tiled(w, count) ? linear_tiled : base.linear)(w, in, count, t0, t1, to, scratch);
}

void gated(const Matrix& gate, const Matrix& up, const Rows& in, int64_t count, int64_t t0, int64_t t1, const Store& to,
           void* scratch) {
    (tiled(gate, count) && same_shape(gate, up) ? gated_tiled : base.gated)(gate, up, in, count, t0, t1, to, scratch);
}

Ops with_tiles() {
    Ops ops = base;
    ops.name = "amx";
    ops.linear_scratch = linear_scratch;
    ops.linear = linear;
    ops.gated = gated;
    return ops;
}

}  // namespace

extern const Ops table;
const Ops table = with_tiles();  // when the library is loaded, the other table being a constant

}  // namespace amx
}  // namespace tk
