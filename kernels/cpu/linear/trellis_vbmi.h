// Trellis codes on processors that permute bytes of whole registers (AVX-512 VBMI): a multishift cuts the windows of four columns out of the
// rows' bytes, and two permutations look 64 of them up. The functions that need it are compiled for it one by one: the instruction set
// of the file is also that of processors without.
#pragma once

#include "linear/trellis_tables.h"
#include "ops_isa.h"

namespace tk {
namespace TK_ISA {
namespace {

#define TK_VBMI __attribute__((target("avx512vbmi")))

bool has_vbmi() {
    static const bool has = __builtin_cpu_supports("avx512vbmi");
    return has;
}

// The table, plus 128, and which bytes the windows of four columns are cut from, four a row: of the codes of eight columns, or behind them of
// those of the eight before. `spread` puts the rows' bytes before a group where those would have them.
struct Cuts {
    uint8_t bytes[2][64], shifts[2][64], spread[64] = {}, table[256];
    explicit Cuts(int bits) {
        for (int i = 0; i < 256; i++) table[i] = uint8_t(trellis_table(bits)[i] + 128);
        for (int half = 0; half < 2; half++) {
            const int skip = bits == 4 && half ? 2 : 0;  // bytes of a row that lie before its second half's windows
            for (int r = 0; r < 16; r++)
                for (int i = 0; i < 4; i++) {
                    const int byte = skip + i - 1;
                    bytes[half][4 * r + i] = uint8_t(byte < 0 ? 64 + r * bits + bits - 1 : r * bits + (byte < bits ? byte : 0));
                    shifts[half][4 * r + i] = uint8_t(r % 2 * 32 + bits * (4 * half + i + 1) - 8 * skip);
                }
        }
        for (int r = 0; r < 16; r++) spread[r * bits + bits - 1] = uint8_t(r);
    }
};

// The same in registers.
template <int BITS>
struct Decoder {
    B table[4], from[2], shift[2], spread;

    TK_VBMI static inline Decoder make() {
        static const Cuts cuts(BITS);
        return {{bload(cuts.table), bload(cuts.table + 64), bload(cuts.table + 128), bload(cuts.table + 192)},
                {bload(cuts.bytes[0]), bload(cuts.bytes[1])},
                {bload(cuts.shifts[0]), bload(cuts.shifts[1])},
                bload(cuts.spread)};
    }
    // The bytes before a group, as if they were the last ones of eight columns.
    TK_VBMI inline __attribute__((always_inline)) B before(const uint8_t* bytes) const {
        return _mm512_permutexvar_epi8(spread, _mm512_castsi128_si512(_mm_loadu_si128((const __m128i*)bytes)));
    }
    // Codes of eight columns.
    TK_VBMI static inline B load(const uint8_t* codes) {
        constexpr __mmask64 WHOLE = BITS == 4 ? ~0ull : (1ull << (16 * BITS % 64)) - 1;
        return _mm512_maskz_loadu_epi8(WHOLE, codes);
    }
    // Four of the eight as 8-bit codes.
    TK_VBMI inline __attribute__((always_inline)) B half(int which, B now, B old) const {
        const B places = _mm512_multishift_epi64_epi8(shift[which], _mm512_permutex2var_epi8(now, from[which], old));
        const B low = _mm512_permutex2var_epi8(table[0], places, table[1]), high = _mm512_permutex2var_epi8(table[2], places, table[3]);
        return _mm512_mask_mov_epi8(low, _mm512_movepi8_mask(places), high);
    }
};

template <int BITS>
TK_VBMI void expand_group_vbmi(const uint8_t* codes, const uint8_t* before, int64_t columns, uint8_t* out) {
    const Decoder<BITS> d = Decoder<BITS>::make();
    B old = d.before(before);
    for (int64_t k = 0; k < columns; k += 8, codes += 16 * BITS, out += 128) {
        const B now = d.load(codes);
        bstore(out, d.half(0, now, old));
        bstore(out + 64, d.half(1, now, old));
        old = now;
    }
}

// Few tokens: codes go from registers into products, with the numbers of linear/int.cpp's 8-bit codes.
constexpr int FEW_ROWS = 4;

// M tokens by two tiles: out[n * M + t]. `ahead`: so many bytes behind each tile stands what is read next.
template <int BITS, int M>
TK_VBMI void few_rows(const Matrix& w, const uint8_t* const* tiles, int64_t ahead, const Rows& in, LaterAhead& later, F* out) {
    const Decoder<BITS> c = Decoder<BITS>::make();
    const int64_t lda = in.ldq;
    const uint8_t* at[2] = {tiles[0], tiles[1]};
    const int8_t* a = in.q;
    F y[2 * M];
    TK_EACH(i, 2 * M, y[i] = fzero(););
    for (int64_t g = 0; g < w.groups(); g++) {
        I d[2 * M];
        TK_EACH(i, 2 * M, d[i] = izero(););
        B old[2] = {c.before(at[0] + 32), c.before(at[1] + 32)};
        const uint8_t* codes[2] = {at[0] + w.header_bytes(), at[1] + w.header_bytes()};
        for (int n = 0; n < 2; n++)
            for (int64_t i = 0; i < w.group_bytes(); i += 64) fetch_to_l2(at[n] + ahead + i);
        later.step(2);
        for (int64_t k = 0; k < w.group; k += 8, a += 8) {
            const B now[2] = {c.load(codes[0]), c.load(codes[1])};
            const B even[2] = {c.half(0, now[0], old[0]), c.half(0, now[1], old[1])};
            const B odd[2] = {c.half(1, now[0], old[0]), c.half(1, now[1], old[1])};
            TK_EACH(t, M, {
                const B x = bset4(a + t * lda), z = bset4(a + t * lda + 4);
                TK_EACH(n, 2, d[n * M + t] = dot4(dot4(d[n * M + t], even[n], x), odd[n], z););
            });
            for (int n = 0; n < 2; n++) {
                old[n] = now[n];
                codes[n] += 16 * BITS;
            }
        }
        TK_EACH(n, 2, {
            const F s = header_floats(at[n], F16, 0);
            TK_EACH(t, M, {
                const int32_t sum = in.sum[t * in.lds + g];
                const F exact = f_of(isub(d[n * M + t], imul(iset1(128), iset1(sum))));
                y[n * M + t] = fma(exact, fmul(s, fset1(in.scale[t * in.lds + g])), y[n * M + t]);
            });
            at[n] += w.group_bytes();
        });
    }
    TK_EACH(i, 2 * M, out[i] = y[i];);
}

typedef void (*FewRows)(const Matrix&, const uint8_t* const*, int64_t, const Rows&, LaterAhead&, F*);

template <int BITS>
FewRows few_for(int64_t count) {
    return count == 1 ? few_rows<BITS, 1> : count == 2 ? few_rows<BITS, 2> : count == 3 ? few_rows<BITS, 3> : few_rows<BITS, 4>;
}

FewRows few_kernel(const Matrix& w, int64_t count) { return (w.bits == 2 ? few_for<2> : w.bits == 3 ? few_for<3> : few_for<4>)(count); }

void linear_few(const Matrix& w, const Rows& in, int64_t count, int64_t t0, int64_t t1, const Store& to) {
    const int64_t bytes = w.tile_bytes();
    const FewRows run = few_kernel(w, count);
    LaterAhead later(to, (t1 - t0) * w.groups());
    for (int64_t tile = t0; tile < t1; tile += 2) {
        const bool two = tile + 1 < t1;
        const uint8_t *data = w.data + tile * bytes, *tiles[2] = {data, two ? data + bytes : data};
        F y[2 * FEW_ROWS];
        run(w, tiles, 2 * bytes, in, later, y);
        for (int64_t t = 0; t < count; t++) {
            store_tile(to, t, tile, y[t]);
            if (two) store_tile(to, t, tile + 1, y[count + t]);
        }
    }
}

void gated_few(const Matrix& gate, const Matrix& up, const Rows& in, int64_t count, int64_t t0, int64_t t1, const Store& to) {
    const int64_t bytes = gate.tile_bytes();
    const FewRows run = few_kernel(gate, count);
    LaterAhead none(to, 0);
    for (int64_t tile = t0; tile < t1; tile++) {
        const uint8_t* tiles[2] = {gate.data + tile * bytes, up.data + tile * bytes};
        F y[2 * FEW_ROWS];
        run(gate, tiles, bytes, in, none, y);
        for (int64_t t = 0; t < count; t++) store_gated(to, t, tile, y[t], y[count + t]);
    }
}

}  // namespace
}  // namespace TK_ISA
}  // namespace tk
