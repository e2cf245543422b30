// Linears of 4-bit weights for many tokens, on processors whose units for products also split codes (Intel's have two for all that
// is 512 bits wide): a regime of linear/int.cpp, with the same numbers. The codes of a pair of tiles are split once for a panel of
// tokens, and lie in the first-level cache.
#pragma once

#include "linear/pairs.h"

namespace tk {
namespace TK_ISA {
namespace {

constexpr int64_t READY_FROM = 3 * WIDE;    // tokens that are worth the splitting
constexpr int64_t READY_PANEL = 43 * WIDE;  // that it is done for, at most: those whose
constexpr int64_t READY_INPUTS = 1 << 20;   // bytes of inputs stay in the second-level cache while the tiles pass by
constexpr int64_t READY_COLS = 512, READY_GROUP = 1024;  // columns that are split at a time; the widest group

bool in_ready(const Matrix& w, int64_t count) {
    return w.bits == 4 && count >= READY_FROM && w.group <= READY_GROUP && w.group % 8 == 0 && !few_places();
}

int64_t ready_groups(const Matrix& w) { return w.group < READY_COLS ? READY_COLS / w.group : 1; }

// Some groups of two tiles.
struct Ready {
    uint8_t* codes[2];  // [columns / 4][16 rows][4], less their zeros, plus 16; or as they are beside minima
    float* scales;      // [groups][2][16]
    float* minima;      // [groups][2][16]
    float* y;           // [blocks][2][WIDE][16] sums so far

    static int64_t bytes(const Matrix& w) {
        const int64_t groups = ready_groups(w);
        return 64 + 2 * groups * w.group * 16 + 2 * groups * 128 + READY_PANEL / WIDE * 2 * WIDE * 64;
    }
    Ready(const Matrix& w, void* scratch) {
        const int64_t groups = ready_groups(w);
        codes[0] = aligned(scratch);
        codes[1] = codes[0] + groups * w.group * 16;
        scales = (float*)(codes[1] + groups * w.group * 16);
        minima = scales + groups * 32;
        y = minima + groups * 32;
    }
    // Groups [g0, g1) of the tiles.
    void split(const Matrix& w, const uint8_t* const* tiles, int64_t g0, int64_t g1) {
        for (int i = 0; i < 2; i++) {
            const uint8_t* h = tiles[i] + g0 * w.group_bytes();
            uint8_t* to = codes[i];
            for (int64_t g = 0; g < g1 - g0; g++, h += w.group_bytes()) {
                fstore(scales + g * 32 + i * 16, header_floats(h, w.dtype, 0));
                B more = izero();
                if (w.minima) fstore(minima + g * 32 + i * 16, header_floats(h, w.dtype, 1));
                else more = imul(isub(iset1(16), load_u8(header_zeros(h, w.dtype))), iset1(0x01010101));
                const uint8_t* from = h + w.header_bytes();
                for (int64_t k = 0; k < w.group; k += 8, from += 64, to += 128) {
                    const B both = bload(from);
                    bstore(to, badd(low_nibbles(both), more));
                    bstore(to + 64, badd(high_nibbles(both), more));
                }
            }
        }
    }
};

// M tokens from t0 on by groups [g0, g1) of both tiles; sums in y, new ones where g0 is 0.
template <int M, bool MIN>
void ready_block(const Matrix& w, const Ready& p, const Rows& in, int64_t t0, int64_t g0, int64_t g1, float* sums_so_far, PairAhead& next) {
    const int64_t lda = in.ldq, group = w.group;
    const uint8_t* codes[2] = {p.codes[0], p.codes[1]};
    const int8_t* a = in.q + t0 * lda + g0 * group;
    const int32_t* sums = in.sum + t0 * in.lds + g0;
    const float *sa = in.scale + t0 * in.lds + g0, *scales = p.scales, *minima = p.minima;
    F y[2 * M];
    TK_EACH(i, 2 * M, y[i] = g0 ? fload(sums_so_far + i * 16) : fzero(););
    for (int64_t g = g0; g < g1; g++, a += group, sums++, sa++, scales += 32, minima += 32) {
        next.step();
        I d[2 * M];
        TK_EACH(t, M, d[t] = d[M + t] = MIN ? izero() : iset1(-16 * sums[t * in.lds]););
        const int8_t* rows[(M + 2) / 3];
        TK_EACH(r, (M + 2) / 3, rows[r] = a + r * 3 * lda;);
        block_dots8<M, 2>(codes, group, rows, lda, d);
        add_scaled_sums<M, 2, MIN>(d, sa, sums, in.lds, scales, minima, y);
        TK_EACH(n, 2, codes[n] += group * 16;);
    }
    TK_EACH(i, 2 * M, fstore(sums_so_far + i * 16, y[i]););
}

typedef void (*ReadyBlock)(const Matrix&, const Ready&, const Rows&, int64_t, int64_t, int64_t, float*, PairAhead&);

ReadyBlock ready_kernel(const Matrix& w, int64_t m) {
    switch (m) {
        case 6: return w.minima ? ready_block<6, true> : ready_block<6, false>;
        case 5: return w.minima ? ready_block<5, true> : ready_block<5, false>;
        case 4: return w.minima ? ready_block<4, true> : ready_block<4, false>;
        case 3: return w.minima ? ready_block<3, true> : ready_block<3, false>;
        case 2: return w.minima ? ready_block<2, true> : ready_block<2, false>;
        default: return w.minima ? ready_block<1, true> : ready_block<1, false>;
    }
}

// A panel's tokens by two tiles: done(token, sums of the first one, of the second), and before it soon(first token, how many).
template <class Soon, class Done>
void ready_pair(const Matrix& w, Ready& p, const uint8_t* const* tiles, const Rows& in, int64_t count, PairAhead& next, Soon&& soon,
                Done&& done) {
    const int64_t most = ready_groups(w), groups = w.groups();
    for (int64_t g0 = 0; g0 < groups; g0 += most) {
        const int64_t g1 = g0 + most < groups ? g0 + most : groups;
        p.split(w, tiles, g0, g1);
        float* y = p.y;
        for (int64_t t = 0, m; t < count; t += m, y += 2 * WIDE * 16) {
            m = block_at(t, count, WIDE);
            if (g1 == groups) soon(t, m);
            ready_kernel(w, m)(w, p, in, t, g0, g1, y, next);
            if (g1 == groups)
                for (int64_t i = 0; i < m; i++) done(t + i, fload(y + i * 16), fload(y + (m + i) * 16));
        }
    }
}

// body(tokens of a panel, how many, their store, blocks)
template <class Body>
void each_ready_panel(const Matrix& w, const Rows& in, int64_t count, const Store& to, Body&& body) {
    const int64_t fit = READY_INPUTS / w.cols / WIDE * WIDE, most = fit < READY_FROM ? READY_FROM : fit < READY_PANEL ? fit : READY_PANEL;
    for (int64_t t = 0, n; t < count; t += n) {
        n = block_at(t, count, most);
        Store part = to.from(t);
        if (t) part.laters = 0;
        body(in.from(t), n, part, (n + WIDE - 1) / WIDE);
    }
}

void linear_ready(const Matrix& w, const Rows& in, int64_t count, int64_t t0, int64_t t1, const Store& to, void* scratch) {
    const int64_t bytes = w.tile_bytes();
    Ready p(w, scratch);
    each_ready_panel(w, in, count, to, [&](const Rows& rows, int64_t n, const Store& part, int64_t blocks) {
        LaterAhead later(part, (t1 - t0) * blocks);
        for (int64_t tile = t0; tile < t1; tile += 2) {
            const bool two = tile + 1 < t1;
            const uint8_t *data = w.data + tile * bytes, *tiles[2] = {data, two ? data + bytes : data};
            PairAhead next(data + 2 * bytes, data + 3 * bytes, w, blocks);
            const auto soon = [&](int64_t t, int64_t m) {
                later.step(2);
                TilesAhead::results(part, t, m, tile);
                if (two) TilesAhead::results(part, t, m, tile + 1);
            };
            ready_pair(w, p, tiles, rows, n, next, soon, [&](int64_t t, F a, F b) __attribute__((always_inline)) {
                store_tile(part, t, tile, a);
                if (two) store_tile(part, t, tile + 1, b);
            });
        }
    });
}

void gated_ready(const Matrix& gate, const Matrix& up, const Rows& in, int64_t count, int64_t t0, int64_t t1, const Store& to,
                 void* scratch) {
    const int64_t bytes = gate.tile_bytes();
    Ready p(gate, scratch);
    each_ready_panel(gate, in, count, to, [&](const Rows& rows, int64_t n, const Store& part, int64_t blocks) {
        for (int64_t tile = t0; tile < t1; tile++) {
            const uint8_t* tiles[2] = {gate.data + tile * bytes, up.data + tile * bytes};
            PairAhead next(tiles[0] + bytes, tiles[1] + bytes, gate, blocks);
            const auto soon = [&](int64_t t, int64_t m) { TilesAhead::results(part, t, m, tile); };
            ready_pair(gate, p, tiles, rows, n, next, soon,
                       [&](int64_t t, F a, F b) __attribute__((always_inline)) { store_gated(part, t, tile, a, b); });
        }
    });
}

}  // namespace
}  // namespace TK_ISA
}  // namespace tk
