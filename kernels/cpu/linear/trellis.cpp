// Linears of weights that are looked up by streams of 2, 3 or 4 bits a weight (Matrix::trellis): some tiles are expanded to 8-bit codes in
// the core's cache, and multiplied there as those are.
#include "linear/trellis.h"

#include "linear/trellis_tables.h"
#if defined(__AVX512F__)
#include "linear/trellis_vbmi.h"
#endif
#if defined(__AVX2__)
#include "linear/trellis_avx2.h"
#define TK_BYTES
#elif defined(TK_NEON)
#include "linear/trellis_neon.h"
#define TK_BYTES
#endif

namespace tk {
namespace TK_ISA {
namespace {

#if !defined(TK_BYTES)
// Values, plus 128, of two weights by the 8 + BITS bits that they are looked up by.
template <int BITS>
struct Pairs {
    static constexpr uint32_t PLACES = 1 << (8 + BITS);
    uint16_t at[PLACES];

    Pairs() {
        const int8_t* table = trellis_table(BITS);
        for (uint32_t i = 0; i < PLACES; i++) at[i] = uint16_t((table[i & 255] + 128) | (table[i >> BITS] + 128) << 8);
    }
};

// Eight columns of 16 rows: `bits` bytes of each row, whose last byte before them is in `before`. Codes as of 8 bits: two times 64 bytes.
template <int BITS>
TK_INLINE void expand_columns(const uint8_t* codes, const uint8_t* before, int64_t ld_before, const Pairs<BITS>& pairs, uint8_t* out) {
    for (int64_t r = 0; r < LANES; r++) {
        uint16_t low, high = 0;  // not the whole at once, which would read behind it, or what was just stored
        memcpy(&low, codes + r * BITS, 2);
        if (BITS == 4) memcpy(&high, codes + r * BITS + 2, 2);
        if (BITS == 3) high = codes[r * BITS + 2];
        const uint64_t row = uint64_t(low | uint32_t(high) << 16) << 8 | before[r * ld_before];
        for (int half = 0; half < 2; half++) {
            const auto pair = [&](int i) { return uint32_t(pairs.at[row >> (BITS * (4 * half + 2 * i + 1)) & (Pairs<BITS>::PLACES - 1)]); };
            const uint32_t four = pair(0) | pair(1) << 16;
            memcpy(out + 64 * half + 4 * r, &four, 4);
        }
    }
}

template <int BITS>
void expand_group_bytes(const uint8_t* codes, const uint8_t* before, int64_t columns, uint8_t* out) {
    static const Pairs<BITS> pairs;
    expand_columns<BITS>(codes, before, 1, pairs, out);
    for (int64_t k = 8; k < columns; k += 8) {
        codes += 16 * BITS;
        out += 128;
        expand_columns<BITS>(codes, codes - 16 * BITS + BITS - 1, BITS, pairs, out);
    }
}
#endif

typedef void (*ExpandGroup)(const uint8_t*, const uint8_t*, int64_t, uint8_t*);

ExpandGroup expander(int32_t bits) {
#if defined(__AVX512F__)
    if (has_vbmi()) return bits == 2 ? expand_group_vbmi<2> : bits == 3 ? expand_group_vbmi<3> : expand_group_vbmi<4>;
#endif
    return bits == 2 ? expand_group_bytes<2> : bits == 3 ? expand_group_bytes<3> : expand_group_bytes<4>;
}

constexpr int64_t TILES = 2;  // expanded at a time: as many as all kernels take together
constexpr int64_t AHEAD = 16384;  // bytes that are fetched ahead, into the second-level cache: what is at work fills the first one

Matrix as_bytes(const Matrix& w) {
    Matrix out = w;
    if (w.trellis) out.bits = 8;
    out.trellis = 0;
    return out;
}

// What tiles of a matrix are expanded to; of one that is no trellis, beside one in a gated pair, themselves.
struct Expanded {
    Matrix w;
    uint8_t* data;
    ExpandGroup expand;

    Expanded(const Matrix& from, uint8_t* room) : w(as_bytes(from)), data(room), expand(expander(from.bits)) {}
    void tiles(const Matrix& from, int64_t tile, int64_t count) {
        w.rows = count * LANES;
        const uint8_t* at = from.data + tile * from.tile_bytes();
        w.data = from.trellis ? data : at;
        if (!from.trellis) return;
        uint8_t* out = data;
        for (int64_t g = 0; g < count * from.groups(); g++, at += from.group_bytes(), out += w.group_bytes()) {
            for (int64_t i = 0; i < from.group_bytes(); i += 64) fetch_to_l2(at + AHEAD + i);
            memcpy(out, at, 32);
            expand(at + from.header_bytes(), at + 32, from.group, out + w.header_bytes());
        }
    }
};

int64_t room_bytes(const Matrix& w) { return TILES * as_bytes(w).tile_bytes(); }

Store store_at(const Store& to, int64_t tile, bool first) {
    Store part = to;
    part.out += tile * LANES;
    if (part.bias) part.bias += tile * LANES;
    if (part.bias_up) part.bias_up += tile * LANES;
    if (!first) part.laters = 0;
    return part;
}

}  // namespace

int64_t trellis_scratch(const Ops& ops, const Matrix& w) { return 64 + 2 * room_bytes(w) + ops.linear_scratch(as_bytes(w)); }

void linear_trellis(const Ops& ops, const Matrix& w, const Rows& in, int64_t count, int64_t t0, int64_t t1, const Store& to, void* scratch) {
#if defined(__AVX512F__)
    if (count <= FEW_ROWS && has_vbmi()) return linear_few(w, in, count, t0, t1, to);
#endif
    uint8_t* room = aligned(scratch);
    Expanded part(w, room);
    for (int64_t tile = t0; tile < t1; tile += TILES) {
        const int64_t n = t1 - tile < TILES ? t1 - tile : TILES;
        part.tiles(w, tile, n);
        ops.linear(part.w, in, count, 0, n, store_at(to, tile, tile == t0), room + room_bytes(w));
    }
}

void gated_trellis(const Ops& ops, const Matrix& gate, const Matrix& up, const Rows& in, int64_t count, int64_t t0, int64_t t1,
                   const Store& to, void* scratch) {
#if defined(__AVX512F__)
    if (count <= FEW_ROWS && same_shape(gate, up) && has_vbmi()) return gated_few(gate, up, in, count, t0, t1, to);
#endif
    const int64_t each = room_bytes(gate) > room_bytes(up) ? room_bytes(gate) : room_bytes(up);
    uint8_t* room = aligned(scratch);
    Expanded a(gate, room), b(up, room + each);
    for (int64_t tile = t0; tile < t1; tile += TILES) {
        const int64_t n = t1 - tile < TILES ? t1 - tile : TILES;
        a.tiles(gate, tile, n);
        b.tiles(up, tile, n);
        ops.gated(a.w, b.w, in, count, 0, n, store_at(to, tile, tile == t0), room + 2 * each);
    }
}

void trellis_row(const Matrix& w, int64_t row, float scale, float* out) {
    const int64_t lane = row % LANES;
    const int8_t* table = trellis_table(w.bits);
    const uint8_t* at = w.data + row / LANES * w.tile_bytes();
    for (int64_t g = 0; g < w.groups(); g++, at += w.group_bytes()) {
        const uint8_t* codes = at + w.header_bytes() + lane * w.bits;
        uint32_t last = at[32 + lane];
        const float s = f16_to_float(((const uint16_t*)at)[lane]);
        for (int64_t k = 0; k < w.group; k += 8, codes += 16 * w.bits) {
            uint64_t bits = last;
            for (int i = 0; i < w.bits; i++) bits |= uint64_t(codes[i]) << (8 * i + 8);
            for (int j = 0; j < 8; j++) out[g * w.group + k + j] = float(table[bits >> (w.bits * (j + 1)) & 255]) * s * scale;
            last = codes[w.bits - 1];
        }
    }
}

}  // namespace TK_ISA
}  // namespace tk
