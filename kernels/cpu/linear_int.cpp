// Linear with 4- and 8-bit group-quantized weights and int8 activations.
//
// For an output row r, a token t and group g of columns, the integer D = sum (code - zero) * a is exact; then
//     p = scale_w[r,g] * scale_a[t,g];  y = fma(float(D), p, y);  with minima also y = fma(min[r,g], scale_a * sum_a, y)
// in ascending g. Both regimes below run exactly that, so their results are equal bit for bit:
//   narrow   few tokens: stream a tile, split nibbles in registers, use each code for up to 8 tokens at once; with plain AVX2 and
//            4 bits any number of tokens
//   pairs    many tokens: two tiles by up to 6 tokens, integer and float sums both in registers; codes are split again for
//            each block of tokens, which costs nothing beside the products. What comes next is fetched meanwhile.
// The unsigned operand of the dot product is the weight (code, or code - zero + 16), the signed one the activation.
#include "ops_isa.h"

namespace tk {
namespace TK_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int NARROW = 8, WIDE = 6, PAIRS_FROM = 9;
#elif defined(__AVXVNNI__)
constexpr int NARROW = 4, WIDE = 6, PAIRS_FROM = 5;
#elif defined(TK_NEON)
constexpr int NARROW = 2, WIDE = 4, PAIRS_FROM = 3;  // more, and sums leave the 32 registers of 16 bytes
#else
constexpr int NARROW = 5, WIDE = 4, PAIRS_FROM = 6;
#endif
#if defined(TK_SHORT_SUMS)
constexpr bool PAIRS_OF_4_BITS = false;  // the narrow kernel, with codes of 15 at most, widens its sums half as often
#else
constexpr bool PAIRS_OF_4_BITS = true;
#endif
constexpr int64_t AHEAD = 6144;  // bytes that the narrow kernel prefetches ahead

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

// One group of one tile for M tokens: integer part.
template <int M>
TK_INLINE void group_dots4(const uint8_t* codes, int64_t group, const int8_t* a, int64_t lda, I* d) {
#if defined(TK_SHORT_SUMS)
    TK_EACH(t, M, d[t] = izero(););
    for (int64_t k = 0; k < group;) {
        H sums[M];
        TK_EACH(t, M, sums[t] = izero(););
        const int64_t end = k + 32 < group ? k + 32 : group;  // 8 times 2 products of 15 * 127 fit 16 bits
        for (; k < end; k += 8) {
            __builtin_prefetch(codes + k * 8 + AHEAD);
            const B w = bload(codes + k * 8), low = low_nibbles(w), high = high_nibbles(w);
            TK_EACH(t, M, {
                sums[t] = hdot(sums[t], low, bset4(a + t * lda + k));
                sums[t] = hdot(sums[t], high, bset4(a + t * lda + k + 4));
            });
        }
        TK_EACH(t, M, d[t] = widen(d[t], sums[t]););
    }
#else
    I even[M], odd[M];
    TK_EACH(t, M, even[t] = odd[t] = izero(););
    for (int64_t k = 0; k < group; k += 8) {
        __builtin_prefetch(codes + k * 8 + AHEAD);
        const B w = bload(codes + k * 8), low = low_nibbles(w), high = high_nibbles(w);
        TK_EACH(t, M, {
            even[t] = dot4(even[t], low, bset4(a + t * lda + k));
            odd[t] = dot4(odd[t], high, bset4(a + t * lda + k + 4));
        });
    }
    TK_EACH(t, M, d[t] = iadd(even[t], odd[t]););
#endif
}

template <int M>
TK_INLINE void group_dots8(const uint8_t* codes, int64_t group, const int8_t* a, int64_t lda, I* d) {
    I even[M], odd[M];
    TK_EACH(t, M, even[t] = odd[t] = izero(););
    for (int64_t k = 0; k < group; k += 8) {
        const uint8_t* p = codes + k * 16;
        __builtin_prefetch(p + AHEAD);
        __builtin_prefetch(p + AHEAD + 64);
        const Codes8 w0 = codes8(bload(p)), w1 = codes8(bload(p + 64));
        TK_EACH(t, M, {
            even[t] = dot4(even[t], w0, bset4(a + t * lda + k));
            odd[t] = dot4(odd[t], w1, bset4(a + t * lda + k + 4));
        });
    }
    TK_EACH(t, M, d[t] = iadd(even[t], odd[t]););
}

template <int M, int BITS, bool MIN>
void narrow_tile(const Matrix& w, const uint8_t* tile, const Rows& in, int64_t t0, F* out) {
    const int64_t groups = w.groups(), step = w.group_bytes(), header = w.header_bytes();
    F y[M];
    TK_EACH(t, M, y[t] = fzero(););
    for (int64_t g = 0; g < groups; g++, tile += step) {
        I d[M];
        const int8_t* a = in.q + t0 * in.ldq + g * w.group;
        if (BITS == 4) group_dots4<M>(tile + header, w.group, a, in.ldq, d);
        else group_dots8<M>(tile + header, w.group, a, in.ldq, d);
        const F s = header_floats(tile, w.dtype, 0);
        F low = fzero();
        I zero = izero();
        if (MIN) low = header_floats(tile, w.dtype, 1);
        if (BITS == 8) zero = iset1(rest8<MIN>());
        else if (!MIN) zero = load_u8(header_zeros(tile, w.dtype));
        TK_EACH(t, M, {
            const float sa = in.scale[(t0 + t) * in.lds + g];
            const int32_t sum = in.sum[(t0 + t) * in.lds + g];
            if (BITS == 8 ? rest8<MIN>() != 0 : !MIN) d[t] = isub(d[t], imul(zero, iset1(sum)));
            y[t] = fma(f_of(d[t]), fmul(s, fset1(sa)), y[t]);
            if (MIN) y[t] = fma(low, fset1(sa * float(sum)), y[t]);
        });
    }
    TK_EACH(t, M, out[t] = y[t];);
}

typedef void (*NarrowTile)(const Matrix&, const uint8_t*, const Rows&, int64_t, F*);

template <int BITS, bool MIN>
NarrowTile narrow_for(int64_t m) {
    switch (m) {
        case 1: return narrow_tile<1, BITS, MIN>;
        case 2: return narrow_tile<2, BITS, MIN>;
        case 3: return narrow_tile<3, BITS, MIN>;
        case 4: return narrow_tile<4, BITS, MIN>;
        case 5: return narrow_tile<5, BITS, MIN>;
#if defined(__AVX512F__)
        case 6: return narrow_tile<6, BITS, MIN>;
        case 7: return narrow_tile<7, BITS, MIN>;
        case 8: return narrow_tile<8, BITS, MIN>;
#endif
    }
    return nullptr;
}

NarrowTile narrow_kernel(const Matrix& w, int64_t m) {
    if (w.bits == 4) return w.minima ? narrow_for<4, true>(m) : narrow_for<4, false>(m);
    return w.minima ? narrow_for<8, true>(m) : narrow_for<8, false>(m);
}

// ------------------------------------------------------------------------------------------------ pairs of tiles

// What blocks of tokens need of a pair of tiles, made once: scales and minima as floats, and what is added to 4-bit codes so
// that the byte is code - zero + 16.
struct Pair {
    const uint8_t* tile[2];
    float* scales;   // [groups][2][16]
    float* minima;   // [groups][2][16]
    uint8_t* shift;  // [groups][2][64]
    float* y;        // [2][WIDE][16]
};

TK_INLINE uint8_t* aligned(void* p) { return (uint8_t*)(((uintptr_t)p + 63) & ~(uintptr_t)63); }

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
            else if (w.bits == 4)
                bstore(out.shift + g * 128 + i * 64,
                       imul(isub(iset1(16), load_u8(header_zeros(h, w.dtype))), iset1(0x01010101)));
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

// M tokens by the 16 N rows of the tiles from `first` on; result in p.y.
template <int M, int N, int BITS, bool MIN>
TK_INLINE void block(const Matrix& w, const Pair& p, const Rows& in, int64_t t0, int first) {
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
        I d[N * M];
        TK_EACH(t, M, {
            const I start = offset ? iset1(-offset * sums[t * in.lds]) : izero();
            TK_EACH(n, N, d[n * M + t] = start;);
        });
        const int8_t* rows[(M + 2) / 3];
        TK_EACH(r, (M + 2) / 3, rows[r] = a + r * 3 * lda;);
        if constexpr (BITS == 8) block_dots8<M, N>(codes, group, rows, lda, d);
        else block_dots4<M, N, MIN>(codes, p.shift + g * 128 + first * 64, group, rows, lda, d);
        const float *scales = p.scales + g * 32 + first * 16, *minima = p.minima + g * 32 + first * 16;
        F s[N];
        TK_EACH(n, N, s[n] = fload(scales + 16 * n););
        TK_EACH(t, M, {
            const F x = fset1(sa[t * in.lds]);
            TK_EACH(n, N, y[n * M + t] = fma(f_of(d[n * M + t]), fmul(s[n], x), y[n * M + t]););
            if (MIN) {
                const F sum = fset1(sa[t * in.lds] * float(sums[t * in.lds]));
                TK_EACH(n, N, y[n * M + t] = fma(fload(minima + 16 * n), sum, y[n * M + t]););
            }
        });
        TK_EACH(n, N, codes[n] += bytes;);
    }
    TK_EACH(t, M, TK_EACH(n, N, fstore(p.y + ((first + n) * WIDE + t) * 16, y[n * M + t]);););
}

// M tokens by both tiles: together where the registers hold that.
template <int M, int BITS, bool MIN>
void pair_block(const Matrix& w, const Pair& p, const Rows& in, int64_t t0) {
#if defined(__AVX512F__)
    block<M, 2, BITS, MIN>(w, p, in, t0, 0);
#else
    for (int i = 0; i < 2; i++) block<M, 1, BITS, MIN>(w, p, in, t0, i);
#endif
}

typedef void (*PairBlock)(const Matrix&, const Pair&, const Rows&, int64_t);

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
    for (int64_t tile = t0; tile < t1; tile += 2) {
        const bool two = tile + 1 < t1;
        const uint8_t* data = w.data + tile * bytes;
        const Pair p = pair_of(w, data, two ? data + bytes : nullptr, scratch);
        TilesAhead next(data + 2 * bytes, 2 * bytes, steps);
        for (int64_t t = 0, m; t < count; t += m) {
            m = block_at(t, count, WIDE);
            next.step();
            TilesAhead::results(to, t, m, tile);
            if (two) TilesAhead::results(to, t, m, tile + 1);
            pair_kernel(w, m)(w, p, in, t);
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
        TilesAhead next_gate(g + bytes, bytes, steps), next_up(u + bytes, bytes, steps);
        for (int64_t t = 0, m; t < count; t += m) {
            m = block_at(t, count, WIDE);
            next_gate.step();
            next_up.step();
            TilesAhead::results(to, t, m, tile);
            pair_kernel(gate, m)(gate, p, in, t);
            for (int64_t i = 0; i < m; i++)
                store_gated(to, t + i, tile, fload(p.y + i * 16), fload(p.y + (WIDE + i) * 16));
        }
    }
}

}  // namespace

int64_t linear_int_scratch(const Matrix& w) { return 128 + 2 * WIDE * 64 + w.groups() * 384; }

void linear_int(const Matrix& w, const Rows& in, int64_t count, int64_t t0, int64_t t1, const Store& to, void* scratch) {
    if (in_pairs(w, count)) return linear_pairs(w, in, count, t0, t1, to, scratch);
    for (int64_t tile = t0; tile < t1; tile++)
        for (int64_t t = 0; t < count; t += NARROW) {
            const int64_t m = count - t < NARROW ? count - t : NARROW;
            F y[NARROW];
            narrow_kernel(w, m)(w, w.data + tile * w.tile_bytes(), in, t, y);
            for (int64_t i = 0; i < m; i++) store_tile(to, t + i, tile, y[i]);
        }
}

void gated_int(const Matrix& gate, const Matrix& up, const Rows& in, int64_t count, int64_t t0, int64_t t1,
               const Store& to, void* scratch) {
    if (in_pairs(gate, count) && same_shape(gate, up)) return gated_pairs(gate, up, in, count, t0, t1, to, scratch);
    for (int64_t tile = t0; tile < t1; tile++)
        for (int64_t t = 0; t < count; t += NARROW) {
            const int64_t m = count - t < NARROW ? count - t : NARROW;
            F g[NARROW], u[NARROW];
            narrow_kernel(gate, m)(gate, gate.data + tile * gate.tile_bytes(), in, t, g);
            narrow_kernel(up, m)(up, up.data + tile * up.tile_bytes(), in, t, u);
            for (int64_t i = 0; i < m; i++) store_gated(to, t + i, tile, g[i], u[i]);
        }
}

void int_row(const Matrix& w, int64_t row, float scale, float* out) {
    const int64_t lane = row % LANES;
    const uint8_t* tile = w.data + row / LANES * w.tile_bytes();
    for (int64_t g = 0; g < w.groups(); g++, tile += w.group_bytes()) {
        float s[16], low[16];
        fstore(s, header_floats(tile, w.dtype, 0));
        if (w.minima) fstore(low, header_floats(tile, w.dtype, 1));
        const int32_t zero = w.bits == 8 ? 128 : header_zeros(tile, w.dtype)[lane];
        const uint8_t* codes = tile + w.header_bytes();
        for (int64_t k = 0; k < w.group; k++) {
            int32_t c;
            if (w.bits == 8) c = codes[k / 4 * 64 + lane * 4 + k % 4];
            else c = (codes[k / 8 * 64 + lane * 4 + k % 4] >> (k % 8 >= 4 ? 4 : 0)) & 15;
            const float v = w.minima ? float(c) * s[lane] + low[lane] : float(c - zero) * s[lane];
            out[g * w.group + k] = v * scale;
        }
    }
}

}  // namespace TK_ISA
}  // namespace tk
