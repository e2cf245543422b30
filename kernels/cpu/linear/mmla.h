// Linears of 4- and 8-bit weights for many tokens on ARM processors that multiply 2 x 8 by 8 x 2 bytes at once (i8mm): a regime of
// linear/int.cpp, with the same numbers. Sums stay as those products give them, two rows by two tokens, from the first group to the last.
// A panel of tokens is laid out in pairs for all tiles; a tile's codes, a few groups at a time, for all tokens of the panel.
#pragma once

#include "ops_isa.h"

namespace tk {
namespace TK_ISA {
namespace {

constexpr int64_t MMLA_FROM = 8;                    // tokens that are worth the layout
constexpr int64_t MMLA_PANEL = 96;                  // tokens that are laid out at a time
constexpr int64_t MMLA_PAIRS = MMLA_PANEL / 2;      // of tokens; in registers are
constexpr int64_t MMLA_BLOCK = 2;
constexpr int64_t MMLA_COLS = 512;                  // columns of a tile that are laid out at a time: in the first-level cache

bool in_mmla(const Matrix& w, int64_t count) { return count >= MMLA_FROM && w.group % 8 == 0; }

int64_t mmla_groups(const Matrix& w) { return w.group < MMLA_COLS ? MMLA_COLS / w.group : 1; }

struct Mmla {
    int8_t* x;             // [pairs][columns / 8][2 tokens][8]
    float *scale, *share;  // [pairs][groups][4]: of two tokens, twice; and times their sums, for minima
    int32_t* sum;          // [pairs][groups][4]: negative
    uint8_t* codes;        // [columns / 8][8 pairs of rows][2 rows][8]
    float *rows, *minima;  // [groups][8 pairs of rows][4]: scales of two rows, each twice; minima
    int32_t* zeros;        // the same of zeros
    float* y;              // [2 matrices][pairs][8 pairs of rows][4]

    static int64_t bytes(const Matrix& w) {
        const int64_t groups = mmla_groups(w);
        return 64 + MMLA_PANEL * w.cols + 3 * MMLA_PAIRS * w.groups() * 16 + groups * (w.group * 16 + 3 * 128) + 2 * MMLA_PAIRS * 128;
    }
    Mmla(const Matrix& w, void* scratch) {
        const int64_t groups = mmla_groups(w), each = MMLA_PAIRS * w.groups() * 4;
        y = (float*)aligned(scratch);
        rows = y + 2 * MMLA_PAIRS * 32;
        minima = rows + groups * 32;
        zeros = (int32_t*)(minima + groups * 32);
        codes = (uint8_t*)(zeros + groups * 32);
        scale = (float*)(codes + groups * w.group * 16);
        share = scale + each;
        sum = (int32_t*)(share + each);
        x = (int8_t*)(sum + each);
    }

    // Tokens [t0, t0 + n).
    void tokens(const Matrix& w, const Rows& in, int64_t t0, int64_t n) {
        int8_t* to = x;
        for (int64_t t = t0; t < t0 + n; t += 2) {
            const int64_t u = t + 1 < t0 + n ? t + 1 : t, at = (t - t0) / 2 * w.groups() * 4;  // of the last pair one may count for two
            const int8_t *a = in.q + t * in.ldq, *b = in.q + u * in.ldq;
            for (int64_t k = 0; k < w.cols; k += 8, to += 16) vst1q_s8(to, vcombine_s8(vld1_s8(a + k), vld1_s8(b + k)));
            for (int64_t g = 0; g < w.groups(); g++)
                for (int i = 0; i < 4; i++) {
                    const int64_t from = (i % 2 ? u : t) * in.lds + g;
                    scale[at + g * 4 + i] = in.scale[from];
                    share[at + g * 4 + i] = in.scale[from] * float(in.sum[from]);
                    sum[at + g * 4 + i] = -in.sum[from];
                }
        }
    }

    static void twice(float* to, F x) {
        const float32x4_t parts[4] = {x.a, x.b, x.c, x.d};
        for (int q = 0; q < 4; q++) {
            vst1q_f32(to + 8 * q, vzip1q_f32(parts[q], parts[q]));
            vst1q_f32(to + 8 * q + 4, vzip2q_f32(parts[q], parts[q]));
        }
    }

    // Groups [g0, g1) of a tile.
    void tile(const Matrix& w, const uint8_t* data, int64_t g0, int64_t g1) {
        const uint8_t* h = data + g0 * w.group_bytes();
        uint8_t* to = codes;
        for (int64_t g = 0; g < g1 - g0; g++, h += w.group_bytes()) {
            twice(rows + g * 32, header_floats(h, w.dtype, 0));
            if (w.minima) twice(minima + g * 32, header_floats(h, w.dtype, 1));
            else if (w.bits == 4) twice((float*)zeros + g * 32, as_f(load_u8(header_zeros(h, w.dtype))));
            const uint8_t* from = h + w.header_bytes();
            for (int64_t k = 0; k < w.group; k += 8, from += 16 * w.bits)
                for (int q = 0; q < 4; q++, to += 32) {
                    const uint8x16_t both = vld1q_u8(from + 16 * q);
                    const uint8x16_t low = w.bits == 4 ? vandq_u8(both, vdupq_n_u8(15)) : both;
                    const uint8x16_t high = w.bits == 4 ? vshrq_n_u8(both, 4) : vld1q_u8(from + 64 + 16 * q);
                    const uint32x4_t a = vreinterpretq_u32_u8(low), b = vreinterpretq_u32_u8(high);
                    vst1q_u8(to, vreinterpretq_u8_u32(vzip1q_u32(a, b)));
                    vst1q_u8(to + 16, vreinterpretq_u8_u32(vzip2q_u32(a, b)));
                }
        }
    }

    // One token's sums of a tile.
    F of(int64_t t, int which) const {
        const float* at = y + (which * MMLA_PAIRS + t / 2) * 32;
        float32x4_t part[4];
        for (int q = 0; q < 4; q++) {
            const float32x4_t a = vld1q_f32(at + 8 * q), b = vld1q_f32(at + 8 * q + 4);
            part[q] = t % 2 ? vuzp2q_f32(a, b) : vuzp1q_f32(a, b);
        }
        return {part[0], part[1], part[2], part[3]};
    }
};

// PAIRS pairs of tokens from the `first` one on by groups [g0, g1) of the tile at hand.
template <int PAIRS, int BITS, bool MIN>
void mmla_block(const Matrix& w, const Mmla& p, int64_t first, int64_t g0, int64_t g1, float* __restrict y) {
    const int64_t groups = w.groups(), group = w.group, ldx = w.cols * 2, lds = groups * 4;
    const int8_t* x = p.x + first * ldx + g0 * group * 2;
    const uint8_t* codes = p.codes;
    const float *rows = p.rows, *minima = p.minima, *scale = p.scale + first * lds + g0 * 4, *share = p.share + first * lds + g0 * 4;
    const int32_t *zeros = p.zeros, *sums = p.sum + first * lds + g0 * 4;
    for (int64_t g = g0; g < g1; g++, rows += 32, minima += 32, zeros += 32, scale += 4, share += 4, sums += 4) {
        int32x4_t d[PAIRS][8];
        if (MIN) {
            TK_EACH(r, 8, TK_EACH(i, PAIRS, d[i][r] = vdupq_n_s32(0);););
        } else {
            int32x4_t sum[PAIRS];
            TK_EACH(i, PAIRS, sum[i] = vld1q_s32(sums + i * lds););
            TK_EACH(r, 8, {
                const int32x4_t zero = BITS == 8 ? vdupq_n_s32(128) : vld1q_s32(zeros + 4 * r);
                TK_EACH(i, PAIRS, d[i][r] = vmulq_s32(zero, sum[i]););
            });
        }
        for (int64_t k = 0; k < group; k += 8, x += 16, codes += 128) {
            int8x16_t a[PAIRS];
            TK_EACH(i, PAIRS, a[i] = vld1q_s8(x + i * ldx););
            TK_EACH(r, 8, {
                const uint8x16_t c = vld1q_u8(codes + 16 * r);
                TK_EACH(i, PAIRS, d[i][r] = vusmmlaq_s32(d[i][r], c, a[i]););
            });
        }
        float32x4_t s[PAIRS], m[PAIRS];
        TK_EACH(i, PAIRS, s[i] = vld1q_f32(scale + i * lds););
        if (MIN) TK_EACH(i, PAIRS, m[i] = vld1q_f32(share + i * lds););
        TK_EACH(r, 8, {
            const float32x4_t row = vld1q_f32(rows + 4 * r);
            TK_EACH(i, PAIRS, {
                float* to = y + i * 32 + 4 * r;
                float32x4_t sum = g ? vld1q_f32(to) : vdupq_n_f32(0);
                sum = vfmaq_f32(sum, vcvtq_f32_s32(d[i][r]), vmulq_f32(row, s[i]));
                if (MIN) sum = vfmaq_f32(sum, vld1q_f32(minima + 4 * r), m[i]);
                vst1q_f32(to, sum);
            });
        });
    }
}

typedef void (*MmlaBlock)(const Matrix&, const Mmla&, int64_t, int64_t, int64_t, float*);

template <int PAIRS>
MmlaBlock mmla_for(const Matrix& w) {
    if (w.bits == 4) return w.minima ? mmla_block<PAIRS, 4, true> : mmla_block<PAIRS, 4, false>;
    return w.minima ? mmla_block<PAIRS, 8, true> : mmla_block<PAIRS, 8, false>;
}

// A panel of `n` tokens by one tile, sums in p.y; the tile behind it is fetched meanwhile.
void mmla_tile(const Matrix& w, Mmla& p, const uint8_t* data, int64_t n, int which) {
    const int64_t most = mmla_groups(w), groups = w.groups(), pairs = (n + 1) / 2, bytes = w.tile_bytes();
    TilesAhead next(data + bytes, bytes, (groups + most - 1) / most * ((pairs + MMLA_BLOCK - 1) / MMLA_BLOCK));
    for (int64_t g0 = 0; g0 < groups; g0 += most) {
        const int64_t g1 = g0 + most < groups ? g0 + most : groups;
        p.tile(w, data, g0, g1);
        for (int64_t i = 0, m; i < pairs; i += m) {
            m = block_at(i, pairs, MMLA_BLOCK);
            next.step();
            (m == 2 ? mmla_for<2> : mmla_for<1>)(w)(w, p, i, g0, g1, p.y + (which * MMLA_PAIRS + i) * 32);
        }
    }
}

// `up` null: a linear alone.
void linear_mmla(const Matrix& w, const Matrix* up, const Rows& in, int64_t count, int64_t t0, int64_t t1, const Store& to, void* scratch) {
    Mmla p(w, scratch);
    LaterAhead later(to, (t1 - t0) * ((count + MMLA_PANEL - 1) / MMLA_PANEL));
    for (int64_t t = 0, n; t < count; t += n) {
        n = block_at(t, count, MMLA_PANEL);
        p.tokens(w, in, t, n);
        for (int64_t tile = t0; tile < t1; tile++) {
            mmla_tile(w, p, w.data + tile * w.tile_bytes(), n, 0);
            if (up) mmla_tile(w, p, up->data + tile * w.tile_bytes(), n, 1);
            later.step(1);
            for (int64_t i = 0; i < n; i++) {
                if (up) store_gated(to, t + i, tile, p.of(i, 0), p.of(i, 1));
                else store_tile(to, t + i, tile, p.of(i, 0));
            }
        }
    }
}

}  // namespace
}  // namespace TK_ISA
}  // namespace tk
