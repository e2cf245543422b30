// Linears of 4- and 8-bit weights for many tokens, two tiles by up to WIDE tokens at a time: a regime of linear/int.cpp, with the same
// numbers.
#pragma once

#include "ops_isa.h"
#if defined(__ARM_FEATURE_DOTPROD)
#include "linear/lanes.h"
#define TK_LANES  // 4-bit codes are multiplied as they are
#endif

namespace tk {
namespace TK_ISA {
namespace {

// Tokens of a block at most, and from how many on tiles are taken in pairs. Sums stay in registers.
#if defined(__AVX512F__)
constexpr int WIDE = 6, PAIRS_FROM = 9;
#elif defined(__AVXVNNI__)
constexpr int WIDE = 6, PAIRS_FROM = 5;
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr int WIDE = 5, PAIRS_FROM = 2;
#elif defined(TK_NEON)
constexpr int WIDE = 4, PAIRS_FROM = 3;
#else
constexpr int WIDE = 4, PAIRS_FROM = 6;
#endif
#if defined(TK_SHORT_SUMS)
constexpr bool PAIRS_OF_4_BITS = false;  // the narrow kernel, with codes of 15 at most, widens its sums half as often
#else
constexpr bool PAIRS_OF_4_BITS = true;
#endif

// 8-bit codes as the dot product takes them, and what it takes off each.
#if defined(TK_CENTRED)
typedef Centred Codes8;
constexpr int32_t OFF8 = 128;
TK_INLINE Codes8 codes8(B u) { return centred(u); }
#else
typedef B Codes8;
constexpr int32_t OFF8 = 0;
TK_INLINE Codes8 codes8(B u) { return u; }
#endif
// what is then still to take off, times the sum of the activations
template <bool MIN>
constexpr int32_t rest8() { return (MIN ? 0 : 128) - OFF8; }

// What blocks of tokens need of a pair of tiles, made once: scales and minima as floats, and what is added to 4-bit codes so
// that the byte is code - zero + 16; with TK_LANES the zeros, as int32.
struct Pair {
    const uint8_t* tile[2];
    float* scales;   // [groups][2][16]
    float* minima;   // [groups][2][16]
    uint8_t* shift;  // [groups][2][64]
    float* y;        // [2][WIDE][16]
};

// Fetches the pair that comes next, a share with each group of each block. A block's whole share at once would fill what waits for
// memory, and the products wait behind it: with two blocks (9 to 12 tokens) a step took as long as memory and products together.
struct PairAhead {
    TilesAhead first, second;

    PairAhead(const uint8_t* a, const uint8_t* b, const Matrix& w, int64_t blocks)
        : first(a, w.tile_bytes(), blocks * w.groups()), second(b, w.tile_bytes(), blocks * w.groups()) {}
    void step() {
        first.step();
        second.step();
    }
};

// `b` null = the pair has one tile; it then stands in both places.
Pair pair_of(const Matrix& w, const uint8_t* a, const uint8_t* b, void* scratch) {
    uint8_t* p = aligned(scratch);
    Pair out;
    out.tile[0] = a;
    out.tile[1] = b ? b : a;
    out.y = (float*)p;
    out.scales = (float*)(p + 2 * WIDE * 64);
    out.minima = out.scales + w.groups() * 32;
    out.shift = (uint8_t*)(out.minima + w.groups() * 32);
    for (int i = 0; i < 2; i++) {
        const uint8_t* h = out.tile[i];
        for (int64_t g = 0; g < w.groups(); g++, h += w.group_bytes()) {
            fstore(out.scales + g * 32 + i * 16, header_floats(h, w.dtype, 0));
            if (w.minima) fstore(out.minima + g * 32 + i * 16, header_floats(h, w.dtype, 1));
            else if (w.bits == 4) {
                const I zeros = load_u8(header_zeros(h, w.dtype));
#if defined(TK_LANES)
                bstore(out.shift + g * 128 + i * 64, zeros);
#else
                bstore(out.shift + g * 128 + i * 64, imul(isub(iset1(16), zeros), iset1(0x01010101)));
#endif
            }
        }
    }
    return out;
}

// what is added to (code - zero) before the dot product sees it
template <int BITS, bool MIN>
constexpr int32_t offset_of() { return BITS == 8 ? rest8<MIN>() : MIN ? 0 : 16; }

// The activations of 4 columns of every token, row by row: from every third row address arithmetic reaches the others.
template <int M, class Fn>
TK_INLINE void each_row(const int8_t* const* rows, int64_t lda, int64_t k, Fn&& f) {
    TK_EACH(t, M, f(t, bset4(rows[t / 3] + t % 3 * lda + k)););
}

// Integer part of one group of N tiles: d[n * M + t] += products of tile n and token t.
template <int M, int N>
TK_INLINE void block_dots8(const uint8_t* const* codes, int64_t group, const int8_t* const* rows, int64_t lda, I* d) {
    for (int64_t k = 0; k < group; k += 4) {
        Codes8 w[N];
        TK_EACH(n, N, w[n] = codes8(bload(codes[n] + k * 16)););
        each_row<M>(rows, lda, k, [&](auto t, B s) __attribute__((always_inline)) {
            TK_EACH(n, N, d[n * M + t] = dot4(d[n * M + t], w[n], s););
        });
    }
}

template <int M, int N, bool MIN>
TK_INLINE void block_dots4(const uint8_t* const* codes, const uint8_t* shift, int64_t group, const int8_t* const* rows,
                           int64_t lda, I* d) {
    B w[N], s[N];
    const auto step = [&](auto t, B a) __attribute__((always_inline)) {
        TK_EACH(n, N, d[n * M + t] = dot4(d[n * M + t], w[n], a););
    };
    TK_EACH(n, N, s[n] = MIN ? izero() : bload(shift + 64 * n););
    for (int64_t k = 0; k < group; k += 8) {
        TK_EACH(n, N, w[n] = low_nibbles(bload(codes[n] + k * 8)););
        if (!MIN) TK_EACH(n, N, w[n] = badd(w[n], s[n]););
        each_row<M>(rows, lda, k, step);
        TK_EACH(n, N, w[n] = high_nibbles(bload(codes[n] + k * 8)););
        if (!MIN) TK_EACH(n, N, w[n] = badd(w[n], s[n]););
        each_row<M>(rows, lda, k + 4, step);
    }
}

// y += the integer sums d of one group of N tiles and M tokens, scaled.
template <int M, int N, bool MIN>
TK_INLINE void add_scaled_sums(const I* d, const float* sa, const int32_t* sums, int64_t lds, const float* scales, const float* minima,
                               F* y) {
    F s[N];
    TK_EACH(n, N, s[n] = fload(scales + 16 * n););
    TK_EACH(t, M, {
        const F x = fset1(sa[t * lds]);
        TK_EACH(n, N, y[n * M + t] = fma(f_of(d[n * M + t]), fmul(s[n], x), y[n * M + t]););
        if (MIN) {
            const F sum = fset1(sa[t * lds] * float(sums[t * lds]));
            TK_EACH(n, N, y[n * M + t] = fma(fload(minima + 16 * n), sum, y[n * M + t]););
        }
    });
}

// M tokens by the 16 N rows of the tiles from `first` on; result in p.y.
template <int M, int N, int BITS, bool MIN>
TK_INLINE void block(const Matrix& w, const Pair& p, const Rows& in, int64_t t0, int first, PairAhead& next) {
    const int64_t groups = w.groups(), lda = in.ldq, group = w.group, bytes = w.group_bytes();
    constexpr int32_t offset = offset_of<BITS, MIN>();
    const uint8_t* codes[N];
    TK_EACH(n, N, codes[n] = p.tile[first + n] + w.header_bytes(););
    const int8_t* a = in.q + t0 * lda;
    const int32_t* sums = in.sum + t0 * in.lds;
    const float* sa = in.scale + t0 * in.lds;
    F y[N * M];
    TK_EACH(t, N * M, y[t] = fzero(););
    for (int64_t g = 0; g < groups; g++, a += group, sums++, sa++) {
        if (first == 0) next.step();
        I d[N * M];
        const uint8_t* shift = p.shift + g * 128 + first * 64;
#if defined(TK_LANES)
        const bool zeros = BITS == 4 && !MIN;
        const I each = zeros ? bload(shift) : iset1(offset);
        TK_EACH(t, M, d[t] = zeros || offset ? imul(each, iset1(-sums[t * in.lds])) : izero(););
        lane_dots<M, BITS>(codes[0], group, a, lda, d);
#else
        TK_EACH(t, M, {
            const I start = offset ? iset1(-offset * sums[t * in.lds]) : izero();
            TK_EACH(n, N, d[n * M + t] = start;);
        });
        const int8_t* rows[(M + 2) / 3];
        TK_EACH(r, (M + 2) / 3, rows[r] = a + r * 3 * lda;);
        if constexpr (BITS == 8) block_dots8<M, N>(codes, group, rows, lda, d);
        else block_dots4<M, N, MIN>(codes, shift, group, rows, lda, d);
#endif
        const float *scales = p.scales + g * 32 + first * 16, *minima = p.minima + g * 32 + first * 16;
        add_scaled_sums<M, N, MIN>(d, sa, sums, in.lds, scales, minima, y);
        TK_EACH(n, N, codes[n] += bytes;);
    }
    TK_EACH(t, M, TK_EACH(n, N, fstore(p.y + ((first + n) * WIDE + t) * 16, y[n * M + t]);););
}

// M tokens by both tiles: together where the registers hold that.
template <int M, int BITS, bool MIN>
void pair_block(const Matrix& w, const Pair& p, const Rows& in, int64_t t0, PairAhead& next) {
#if defined(__AVX512F__)
    block<M, 2, BITS, MIN>(w, p, in, t0, 0, next);
#else
    for (int i = 0; i < 2; i++) block<M, 1, BITS, MIN>(w, p, in, t0, i, next);
#endif
}

typedef void (*PairBlock)(const Matrix&, const Pair&, const Rows&, int64_t, PairAhead&);

template <int BITS, bool MIN>
PairBlock pair_for(int64_t m) {
    switch (m) {
        case 6: return pair_block<6, BITS, MIN>;
        case 5: return pair_block<5, BITS, MIN>;
        case 4: return pair_block<4, BITS, MIN>;
        case 3: return pair_block<3, BITS, MIN>;
        case 2: return pair_block<2, BITS, MIN>;
        default: return pair_block<1, BITS, MIN>;
    }
}

PairBlock pair_kernel(const Matrix& w, int64_t m) {
    if constexpr (PAIRS_OF_4_BITS)
        if (w.bits == 4) return w.minima ? pair_for<4, true>(m) : pair_for<4, false>(m);
    return w.minima ? pair_for<8, true>(m) : pair_for<8, false>(m);
}

bool in_pairs(const Matrix& w, int64_t count) { return count >= PAIRS_FROM && (w.bits == 8 || PAIRS_OF_4_BITS); }

void linear_pairs(const Matrix& w, const Rows& in, int64_t count, int64_t t0, int64_t t1, const Store& to, void* scratch) {
    const int64_t bytes = w.tile_bytes(), steps = (count + WIDE - 1) / WIDE;
    LaterAhead later(to, (t1 - t0) * steps);
    for (int64_t tile = t0; tile < t1; tile += 2) {
        const bool two = tile + 1 < t1;
        const uint8_t* data = w.data + tile * bytes;
        const Pair p = pair_of(w, data, two ? data + bytes : nullptr, scratch);
        PairAhead next(data + 2 * bytes, data + 3 * bytes, w, steps);
        for (int64_t t = 0, m; t < count; t += m) {
            m = block_at(t, count, WIDE);
            later.step(2);
            TilesAhead::results(to, t, m, tile);
            if (two) TilesAhead::results(to, t, m, tile + 1);
            pair_kernel(w, m)(w, p, in, t, next);
            for (int64_t i = 0; i < m; i++) {
                store_tile(to, t + i, tile, fload(p.y + i * 16));
                if (two) store_tile(to, t + i, tile + 1, fload(p.y + (WIDE + i) * 16));
            }
        }
    }
}

void gated_pairs(const Matrix& gate, const Matrix& up, const Rows& in, int64_t count, int64_t t0, int64_t t1,
                 const Store& to, void* scratch) {
    const int64_t bytes = gate.tile_bytes(), steps = (count + WIDE - 1) / WIDE;
    for (int64_t tile = t0; tile < t1; tile++) {
        const uint8_t *g = gate.data + tile * bytes, *u = up.data + tile * bytes;
        const Pair p = pair_of(gate, g, u, scratch);
        PairAhead next(g + bytes, u + bytes, gate, steps);
        for (int64_t t = 0, m; t < count; t += m) {
            m = block_at(t, count, WIDE);
            TilesAhead::results(to, t, m, tile);
            pair_kernel(gate, m)(gate, p, in, t, next);
            for (int64_t i = 0; i < m; i++)
                store_gated(to, t + i, tile, fload(p.y + i * 16), fload(p.y + (WIDE + i) * 16));
        }
    }
}

}  // namespace
}  // namespace TK_ISA
}  // namespace tk
