// The table of `amx`: that of AVX-512, but for linears of many tokens, and for what may add up in any order.
#include "amx/linear.h"
#include "amx/loose.h"
#include "amx/tiles.h"

namespace tk {
namespace avx512vnni {
extern const Ops table;
int64_t trellis_scratch(const Ops& ops, const Matrix& w);
void linear_trellis(const Ops& ops, const Matrix& w, const Rows& in, int64_t count, int64_t t0, int64_t t1, const Store& to, void* scratch);
void gated_trellis(const Ops& ops, const Matrix& gate, const Matrix& up, const Rows& in, int64_t count, int64_t t0, int64_t t1,
                   const Store& to, void* scratch);
}
namespace amx {

const Ops* table();

namespace {

const Ops& base = avx512vnni::table;

int64_t linear_scratch(const Matrix& w) {
    if (w.trellis) return avx512vnni::trellis_scratch(*table(), w);
    const int64_t bytes = w.format == INT ? tiled_scratch(w) : loose_scratch(w), others = base.linear_scratch(w);
    return bytes > others ? bytes : others;
}

void linear(const Matrix& w, const Rows& in, int64_t count, int64_t t0, int64_t t1, const Store& to, void* scratch) {
    if (w.trellis) return avx512vnni::linear_trellis(*table(), w, in, count, t0, t1, to, scratch);
    if (loose(w, w, in)) return linear_loose(w, in, count, t0, t1, to, scratch);
    (tiled(w, count) ? linear_tiled : base.linear)(w, in, count, t0, t1, to, scratch);
}

void gated(const Matrix& gate, const Matrix& up, const Rows& in, int64_t count, int64_t t0, int64_t t1, const Store& to,
           void* scratch) {
    if (gate.trellis || up.trellis) return avx512vnni::gated_trellis(*table(), gate, up, in, count, t0, t1, to, scratch);
    if (loose(gate, up, in)) return gated_loose(gate, up, in, count, t0, t1, to, scratch);
    (tiled(gate, count) && same_shape(gate, up) ? gated_tiled : base.gated)(gate, up, in, count, t0, t1, to, scratch);
}

int64_t int_products(int64_t rounds) {
    Tiles r(TILE_ROWS, TILE_BYTES);
    for (int64_t round = 0; round < rounds; round++) {
        r.multiply<0, 4, 6, true>();
        r.multiply<1, 4, 7, true>();
        r.multiply<2, 5, 6, true>();
        r.multiply<3, 5, 7, true>();
    }
    return rounds * 4 * 2 * TILE_ROWS * TILE_ROWS * TILE_BYTES;
}

Ops with_tiles() {
    Ops ops = base;
    ops.name = "amx";
    ops.linear_scratch = linear_scratch;
    ops.linear = linear;
    ops.gated = gated;
    ops.attn_tile = attn_tile;
    ops.int_products = int_products;
    return ops;
}

}  // namespace

// Made at the first call, not when the library is loaded: what copies it is compiled for processors that have tiles.
const Ops* table() {
    static const Ops made = with_tiles();
    return &made;
}

}  // namespace amx
}  // namespace tk
