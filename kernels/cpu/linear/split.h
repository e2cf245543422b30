// Linears of 4-bit weights for many tokens, where products of small bytes add up in 16 bits (TK_SHORT_SUMS): a regime of
// linear/int.cpp, with the same numbers.
//
// The codes of some groups of a tile are split once for a panel of tokens, as many as stay in the first-level cache. Zeros are
// taken off in float32, which is exact as long as a group's sums stay below 2^24 (in_split).
#pragma once

#include "ops_isa.h"

namespace tk {
namespace TK_ISA {
namespace {

constexpr int DEEP = 6;                    // tokens of a block at most: their sums, a step's codes and two products fill 16 registers
constexpr int64_t SPLIT_FROM = 3 * DEEP;  // tokens that are worth the splitting

bool in_split(const Matrix& w, int64_t count) {
    return w.bits == 4 && w.group % 32 == 0 && int64_t(w.group) * 15 * 127 < 1 << 24 && count >= SPLIT_FROM;
}

constexpr int64_t SPLIT_COLS = 1024;       // whose codes are split at a time
constexpr int64_t PANEL = 16 * DEEP;       // tokens that they are split for

// Groups [g0, g1) of a tile.
struct Split {
    const uint8_t* header;  // of group g0
    int64_t g0, g1;
    uint8_t* codes;  // [cols / 4][16 rows][4]
    float* low;      // [groups][16]: zeros or minima
    float* y;        // [PANEL][16] sums so far
};

TK_INLINE int64_t groups_at_once(const Matrix& w) { return w.group < SPLIT_COLS ? SPLIT_COLS / w.group : 1; }

int64_t split_bytes(const Matrix& w) { return groups_at_once(w) * (w.group * 16 + 64) + PANEL * 64; }

int64_t split_scratch(const Matrix& w) { return w.bits == 4 ? 64 + 2 * split_bytes(w) : 0; }

Split split(const Matrix& w, const uint8_t* tile, int64_t g0, uint8_t* scratch) {
    const int64_t most = groups_at_once(w), g1 = g0 + most < w.groups() ? g0 + most : w.groups();
    uint8_t* codes = scratch + PANEL * 64;
    const Split out{tile + g0 * w.group_bytes(), g0, g1, codes, (float*)(codes + most * w.group * 16), (float*)scratch};
    const uint8_t* h = out.header;
    for (int64_t g = 0; g < g1 - g0; g++, h += w.group_bytes()) {
        fstore(out.low + g * 16, w.minima ? header_floats(h, w.dtype, 1) : f_of(load_u8(header_zeros(h, w.dtype))));
        const uint8_t* from = h + w.header_bytes();
        for (int64_t k = 0; k < w.group; k += 8, from += 64, codes += 128) {
            const B x = bload(from);
            bstore(codes, low_nibbles(x));
            bstore(codes + 64, high_nibbles(x));
        }
    }
    return out;
}

// Sums of products of 32 columns and M tokens. 8 times 2 of 15 * 127 fit 16 bits.
template <int M>
TK_INLINE void short_sums(const uint8_t* codes, const int8_t* a, int64_t lda, H* h) {
    const int8_t* rows[(M + 2) / 3];  // from every third one address arithmetic reaches the others
    TK_EACH(r, (M + 2) / 3, rows[r] = a + r * 3 * lda;);
    TK_EACH(j, 8, {
        const B c = bload(codes + 64 * j);
        TK_EACH(t, M, {
            const int8_t* at = rows[t / 3] + t % 3 * lda + 4 * j;
            h[t] = j ? hdot_at(h[t], c, at) : hdot_at(c, at);
        });
    });
}

// M tokens from t0 on; their sums stand in the panel from `at` on.
template <int M, bool MIN>
void deep(const Matrix& w, const Split& s, const Rows& in, int64_t t0, int64_t at) {
    const int64_t lda = in.ldq, lds = in.lds;
    const uint8_t *header = s.header, *codes = s.codes;
    const float *low = s.low, *scale = in.scale + t0 * lds + s.g0;
    const int32_t* sum = in.sum + t0 * lds + s.g0;
    const int8_t* a = in.q + t0 * lda + s.g0 * w.group;
    F y[M];
    TK_EACH(t, M, y[t] = s.g0 ? fload(s.y + (at + t) * 16) : fzero(););
    for (int64_t g = s.g0; g < s.g1; g++, header += w.group_bytes(), low += 16, scale++, sum++) {
        H h[M];
        I d[M];
        const auto next = [&]() __attribute__((always_inline)) {
            short_sums<M>(codes, a, lda, h);
            codes += 512, a += 32;
        };
        next();
        if (w.group == 32) {
            TK_EACH(t, M, d[t] = widen(h[t]););
        } else {  // the last columns' sums need not go to memory, where the others have to wait for them
            I before[M];
            TK_EACH(t, M, before[t] = widen(h[t]););
            for (int64_t k = 64; k < w.group; k += 32) {
                next();
                TK_EACH(t, M, before[t] = widen(before[t], h[t]););
            }
            next();
            TK_EACH(t, M, d[t] = widen(before[t], h[t]););
        }
        const F x = header_floats(header, w.dtype, 0), b = fload(low);
        TK_EACH(t, M, {
            const F sa = fset1(scale[t * lds]), total = f_of(iset1(sum[t * lds]));
            F exact = f_of(d[t]);
            if (!MIN) exact = fnma(b, total, exact);
            y[t] = fma(exact, fmul(x, sa), y[t]);
            if (MIN) y[t] = fma(b, fmul(sa, total), y[t]);
        });
    }
    TK_EACH(t, M, fstore(s.y + (at + t) * 16, y[t]););
}

template <int M = DEEP>
void deep_for(const Matrix& w, const Split& s, const Rows& in, int64_t t0, int64_t at, int64_t m) {
    if constexpr (M > 1)
        if (m < M) return deep_for<M - 1>(w, s, in, t0, at, m);
    (w.minima ? deep<M, true> : deep<M, false>)(w, s, in, t0, at);
}

// Tiles [t0, t1) of one matrix, or with `up` of a gated pair of one shape.
void linear_split(const Matrix& w, const Matrix* up, const Rows& in, int64_t count, int64_t t0, int64_t t1, const Store& to,
                  void* scratch) {
    uint8_t* room = aligned(scratch);
    uint8_t* other = room + split_bytes(w);
    const int64_t bytes = w.tile_bytes(), most = groups_at_once(w), parts = (w.groups() + most - 1) / most;
    for (int64_t tile = t0; tile < t1; tile++) {
        const uint8_t *x = w.data + tile * bytes, *z = up ? up->data + tile * bytes : x;
        const int64_t steps = (count + DEEP - 1) / DEEP * parts;
        TilesAhead next(x + bytes, bytes, steps), next_up(z + bytes, up ? bytes : 0, steps);
        for (int64_t first = 0, n; first < count; first += n) {
            n = block_at(first, count, PANEL);
            for (int64_t g = 0; g < w.groups(); g += most) {
                const Split a = split(w, x, g, room), b = up ? split(w, z, g, other) : a;
                for (int64_t t = 0, m; t < n; t += m) {
                    m = block_at(t, n, DEEP);
                    next.step();
                    next_up.step();
                    TilesAhead::results(to, first + t, g == 0 ? m : 0, tile);
                    deep_for(w, a, in, first + t, t, m);
                    if (up) deep_for(w, b, in, first + t, t, m);
                }
            }
            const float *y = (const float*)room, *y_up = (const float*)other;
            for (int64_t t = 0; t < n; t++) {
                if (up) store_gated(to, first + t, tile, fload(y + t * 16), fload(y_up + t * 16));
                else store_tile(to, first + t, tile, fload(y + t * 16));
            }
        }
    }
}

}  // namespace
}  // namespace TK_ISA
}  // namespace tk
