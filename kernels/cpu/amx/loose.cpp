// Linears with bfloat16 weights for callers who let sums be in any order (Rows::loose), on AMX: products of 16 rows by 32 columns by
// 16 outputs in tile registers. The order is one for any number of rows.
//
// Two tiles of weights, their columns in pairs, by 32 rows at a time.
#include "amx/loose.h"

#include "amx/registers.h"

namespace tk {
namespace TK_ISA {
namespace {

constexpr int64_t BLOCK = 32;    // rows of a block: two tiles
constexpr int64_t NEAR = 3 << 19;  // bytes of inputs that stay in the second-level cache while weights pass by
constexpr int64_t SPACE = 64;    // bytes behind a row, so that rows never lie a power of two apart

TK_INLINE int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// Rows of a panel, of so many bytes each.
TK_INLINE int64_t panel_of(int64_t bytes) {
    const int64_t blocks = NEAR / bytes / BLOCK;
    return BLOCK * (blocks > 5 ? 5 : blocks < 1 ? 1 : blocks);
}


// Registers 0-3 hold sums, 4 and 5 rows, 6 and 7 weights.
void configure() {
    TileConfig c;
    for (int i = 0; i < 8; i++) c.bytes[i] = 64, c.rows[i] = 16;
    load_config(c);
}

void zero_tiles() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

// Sums of two tiles of rows by two of weights, [2][2][16][16].
void store_tiles(void* to) {
    uint8_t* p = (uint8_t*)to;
    _tile_stored(0, p, 64);
    _tile_stored(1, p + 1024, 64);
    _tile_stored(2, p + 2048, 64);
    _tile_stored(3, p + 3072, 64);
}

TK_INLINE const uint8_t* sums_of(const uint8_t* stored, int64_t token, int n) {
    return stored + token / 16 * 2048 + n * 1024 + token % 16 * 64;
}

struct HalfScratch {
    uint16_t* rows;      // [panel][ld]
    uint8_t* weights[2]; // columns in pairs
    float* y;            // [2][2][16][16]
    int64_t ld, panel;   // ld: in numbers

    HalfScratch(const Matrix& w, void* p) : ld(round_up(w.cols, 32) + SPACE / 2), panel(panel_of(2 * ld)) {
        rows = (uint16_t*)aligned(p);
        weights[0] = (uint8_t*)(rows + panel * ld);
        weights[1] = weights[0] + round_up(w.cols, 32) * 32;
        y = (float*)(weights[1] + round_up(w.cols, 32) * 32);
    }
    static int64_t bytes(const Matrix& w) {
        const int64_t ld = round_up(w.cols, 32) + SPACE / 2;
        return 64 + (panel_of(2 * ld) + BLOCK) * ld * 2 + 4096;
    }
};

void pair_columns(const Matrix& w, const uint8_t* tile, uint8_t* out) {
    int64_t k = 0;
    for (; k + 2 <= w.cols; k += 2) bstore(out + k * 32, zip_halves(bload(tile + k * 32)));
    if (k < w.cols) bstore(out + k * 32, load_u16((const uint16_t*)tile + k * 16)), k += 2;
    for (; k < round_up(w.cols, 32); k += 2) bstore(out + k * 32, izero());
}

void round_rows(const Matrix& w, const Rows& in, int64_t t0, int64_t count, HalfScratch& s) {
    for (int64_t t = 0; t < count; t++) {
        const float* x = in.x + (t0 + t) * in.ldx;
        uint16_t* to = s.rows + t * s.ld;
        int64_t k = 0;
        for (; k + 16 <= w.cols; k += 16) store_bf16(to + k, fload(x + k));
        for (; k < w.cols; k++) to[k] = float_to_bf16(x[k]);
        for (; k < s.ld; k++) to[k] = 0;
    }
    memset(s.rows + count * s.ld, 0, size_t(round_up(count, 16) - count) * size_t(s.ld) * 2);
}

void half_block(const Matrix& w, const HalfScratch& s, int64_t row, bool second) {
    written();
    zero_tiles();
    const uint16_t* a = s.rows + row * s.ld;
    const int64_t ld = s.ld * 2;
    for (int64_t k = 0; k < w.cols; k += 32) {
        _tile_loadd(4, a + k, ld);
        _tile_loadd(6, s.weights[0] + k * 32, 64);
        _tile_loadd(7, s.weights[1] + k * 32, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (!second) continue;
        _tile_loadd(5, a + 16 * s.ld + k, ld);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    store_tiles(s.y);
}

template <class Body>
void half_pair(const Matrix& w, HalfScratch& s, int64_t count, const uint8_t* const* tiles, const uint8_t* const* next, Body&& body) {
    for (int n = 0; n < 2; n++) pair_columns(w, tiles[n], s.weights[n]);
    const int64_t steps = (count + BLOCK - 1) / BLOCK;
    TilesAhead first(next[0], w.tile_bytes(), steps), second(next[1], w.tile_bytes(), steps);
    for (int64_t t = 0; t < count; t += BLOCK) {
        const int64_t tokens = count - t < BLOCK ? count - t : BLOCK;
        first.step();
        second.step();
        half_block(w, s, t, tokens > 16);
        for (int64_t i = 0; i < tokens; i++)
            body(t + i, fload((const float*)sums_of((const uint8_t*)s.y, i, 0)), fload((const float*)sums_of((const uint8_t*)s.y, i, 1)));
    }
}

template <class Body>
void half_panels(const Matrix& w, HalfScratch& s, const Rows& in, int64_t count, Body&& body) {
    configure();
    for (int64_t t = 0; t < count; t += s.panel) {
        const int64_t n = count - t < s.panel ? count - t : s.panel;
        round_rows(w, in, t, n, s);
        body(t, n);
    }
    _tile_release();
}

}  // namespace

bool loose(const Matrix& w, const Matrix& other, const Rows& in) {
    return in.loose && in.round && w.format == DENSE && w.dtype == BF16 && other.format == DENSE && other.dtype == BF16;
}

int64_t loose_scratch(const Matrix& w) { return w.format == DENSE && w.dtype == BF16 ? HalfScratch::bytes(w) : 0; }

void linear_loose(const Matrix& w, const Rows& in, int64_t count, int64_t t0, int64_t t1, const Store& to, void* scratch) {
    const int64_t bytes = w.tile_bytes();
    HalfScratch s(w, scratch);
    half_panels(w, s, in, count, [&](int64_t first, int64_t n) {
        for (int64_t tile = t0; tile < t1; tile += 2) {
            const bool both = tile + 1 < t1;
            const uint8_t* data = w.data + tile * bytes;
            const uint8_t* tiles[2] = {data, both ? data + bytes : data};
            const uint8_t* next[2] = {data + 2 * bytes, data + 3 * bytes};
            half_pair(w, s, n, tiles, next, [&](int64_t t, F a, F b) __attribute__((always_inline)) {
                store_tile(to, first + t, tile, a);
                if (both) store_tile(to, first + t, tile + 1, b);
            });
        }
    });
}

void gated_loose(const Matrix& gate, const Matrix& up, const Rows& in, int64_t count, int64_t t0, int64_t t1, const Store& to,
                 void* scratch) {
    const int64_t bytes = gate.tile_bytes();
    HalfScratch s(gate, scratch);
    half_panels(gate, s, in, count, [&](int64_t first, int64_t n) {
        for (int64_t tile = t0; tile < t1; tile++) {
            const uint8_t* tiles[2] = {gate.data + tile * bytes, up.data + tile * bytes};
            const uint8_t* next[2] = {tiles[0] + bytes, tiles[1] + bytes};
            half_pair(gate, s, n, tiles, next, [&](int64_t t, F a, F b) __attribute__((always_inline)) { store_gated(to, first + t, tile, a, b); });
        }
    });
}

}  // namespace TK_ISA
}  // namespace tk
