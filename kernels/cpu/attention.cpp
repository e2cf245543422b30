// Attention over one tile of 128 cached tokens, and the merging of tiles.
//
// A row's result is defined tile by tile: scores are single chains over head_dim, the softmax of a tile is taken alone,
// values are added in ascending order of tokens, tiles are merged in ascending order. Tiles start at multiples of 128 of
// the absolute position, so a row's bits depend neither on how prompts were cut into chunks nor on what else is in the
// batch. Source of the merging: Milakov & Gimelshein, "Online normalizer calculation for softmax" (2018).
#include "ops_isa.h"

namespace tk {
namespace TK_ISA {
namespace {

constexpr float MASKED = -INFINITY;

// ---- scores: M rows by 2 cells
template <int M>
void scores_f32(const float* q, int64_t d, const void* c0, const void* c1, float* s) {
    F a[M], b[M];
    TK_EACH(r, M, a[r] = b[r] = fzero(););
    for (int64_t i = 0; i < d; i++) {
        const F k0 = fload((const float*)c0 + i * 16), k1 = fload((const float*)c1 + i * 16);
        TK_EACH(r, M, {
            const F x = fset1(q[r * d + i]);
            a[r] = fma(k0, x, a[r]);
            b[r] = fma(k1, x, b[r]);
        });
    }
    TK_EACH(r, M, {
        fstore(s + r * KV_TILE, a[r]);
        fstore(s + r * KV_TILE + 16, b[r]);
    });
}

// ---- values: M rows by N groups of 16 columns, `tokens` of them
template <int M, int N>
void values_f32(const float* p, const void* const* cells, int64_t d, int64_t col, int64_t tokens, float* acc) {
    F y[M * N];
    TK_EACH(i, M * N, y[i] = fzero(););
    for (int64_t t = 0; t < tokens; t++) {
        const float* v = (const float*)cells[t / 16] + t % 16 * d + col;
        F w[N];
        TK_EACH(n, N, w[n] = fload(v + 16 * n););
        TK_EACH(r, M, {
            const F x = fset1(p[r * KV_TILE + t]);
            TK_EACH(n, N, y[r * N + n] = fma(w[n], x, y[r * N + n]););
        });
    }
    TK_EACH(r, M, TK_EACH(n, N, fstore(acc + r * d + col + 16 * n, y[r * N + n]);););
}

#if defined(__AVX512BF16__)
// acc += products of pairs of bfloat16 (assembly for the reason given in simd.h)
TK_INLINE F dot_bf16(F acc, I a, I b) {
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
    return acc;
}

template <int M>
void scores_bf16(const uint16_t* q, int64_t d, const void* c0, const void* c1, float* s) {
    F a[M], b[M];
    TK_EACH(r, M, a[r] = b[r] = fzero(););
    for (int64_t i = 0; i < d; i += 2) {
        const I k0 = bload((const uint8_t*)c0 + i * 32), k1 = bload((const uint8_t*)c1 + i * 32);
        TK_EACH(r, M, {
            const I x = bset4(q + r * d + i);
            a[r] = dot_bf16(a[r], k0, x);
            b[r] = dot_bf16(b[r], k1, x);
        });
    }
    TK_EACH(r, M, {
        fstore(s + r * KV_TILE, a[r]);
        fstore(s + r * KV_TILE + 16, b[r]);
    });
}

template <int M, int N>
void values_bf16(const uint16_t* p, const void* const* cells, int64_t d, int64_t col, int64_t tokens, float* acc) {
    F y[M * N];
    TK_EACH(i, M * N, y[i] = fzero(););
    for (int64_t t = 0; t < tokens; t += 2) {
        const uint8_t* v = (const uint8_t*)cells[t / 16] + (t % 16 / 2 * d + col) * 4;
        I w[N];
        TK_EACH(n, N, w[n] = bload(v + 64 * n););
        TK_EACH(r, M, {
            const I x = bset4(p + r * KV_TILE + t);
            TK_EACH(n, N, y[r * N + n] = dot_bf16(y[r * N + n], w[n], x););
        });
    }
    TK_EACH(r, M, TK_EACH(n, N, fstore(acc + r * d + col + 16 * n, y[r * N + n]);););
}
#else
template <int M>
void scores_bf16(const uint16_t*, int64_t, const void*, const void*, float*) {}
template <int M, int N>
void values_bf16(const uint16_t*, const void* const*, int64_t, int64_t, int64_t, float*) {}
#endif

template <int M>
void score_rows(const AttnParams& p, const KvTile& tile, const void* q, int64_t r, int64_t cells, float* s) {
    for (int64_t c = 0; c < cells; c += 2) {
        const int64_t next = c + 1 < cells ? c + 1 : c;
        float* to = s + r * KV_TILE + c * 16;
        if (p.bf16) scores_bf16<M>((const uint16_t*)q + r * p.dpad, p.dpad, tile.k[c], tile.k[next], to);
        else scores_f32<M>((const float*)q + r * p.dpad, p.dpad, tile.k[c], tile.k[next], to);
    }
}

template <int M, int N>
void value_cols(const AttnParams& p, const KvTile& tile, const float* s, const uint16_t* h, int64_t r, int64_t col,
                int64_t tokens, float* acc) {
    if (p.bf16) values_bf16<M, N>(h + r * KV_TILE, tile.v, p.dpad, col, tokens, acc + r * p.dpad);
    else values_f32<M, N>(s + r * KV_TILE, tile.v, p.dpad, col, tokens, acc + r * p.dpad);
}

template <int M>
void value_rows(const AttnParams& p, const KvTile& tile, const float* s, const uint16_t* h, int64_t r, int64_t tokens,
                float* acc) {
    int64_t col = 0;
    for (; col + 64 <= p.dpad; col += 64) value_cols<M, 4>(p, tile, s, h, r, col, tokens, acc);
    for (; col < p.dpad; col += 16) value_cols<M, 1>(p, tile, s, h, r, col, tokens, acc);
}

TK_INLINE void store_probs(uint16_t* h, F a, F b) {
#if defined(__AVX512BF16__)
    _mm512_storeu_si512(h, (__m512i)_mm512_cvtne2ps_pbh(b, a));
#else
    float v[32];
    fstore(v, a);
    fstore(v + 16, b);
    for (int i = 0; i < 32; i++) h[i] = float_to_bf16(v[i]);
#endif
}

// Scores of one row to probabilities relative to the tile's maximum; lanes outside [lo, hi) become 0.
void softmax_row(const AttnParams& p, int64_t cells, int32_t lo, int32_t hi, float* s, uint16_t* h, float* m, float* l) {
    F v[KV_CELLS];
    F top = fset1(MASKED);
    for (int64_t c = 0; c < KV_CELLS; c++) {
        v[c] = fset1(MASKED);
        if (c * 16 + 16 <= lo || c * 16 >= hi || c >= cells) continue;
        v[c] = fmul(fload(s + c * 16), fset1(p.scale));
        if (p.softcap > 0.0f) v[c] = fmul(fset1(p.softcap), ftanh(fdiv(v[c], fset1(p.softcap))));
        if (lo > c * 16 || hi < c * 16 + 16) v[c] = keep_lanes(v[c], lo - int(c * 16), hi - int(c * 16), fset1(MASKED));
        top = fmax(v[c], top);
    }
    *m = hmax(top);
    const F base = fset1(*m);
    F total = fzero();
    for (int64_t c = 0; c < KV_CELLS; c += 2) {
        for (int64_t i = c; i < c + 2; i++) {
            if (i * 16 + 16 <= lo || i * 16 >= hi || i >= cells) v[i] = fzero();
            else v[i] = keep_lanes(fexp(fsub(v[i], base)), lo - int(i * 16), hi - int(i * 16), fzero());
            total = fadd(total, v[i]);
        }
        if (p.bf16) {
            store_probs(h + c * 16, v[c], v[c + 1]);
        } else {
            fstore(s + c * 16, v[c]);
            fstore(s + c * 16 + 16, v[c + 1]);
        }
    }
    *l = hsum(total);
}

}  // namespace

void attn_tile(const AttnParams& p, const KvTile& tile, const void* q, int64_t rows, const int32_t* lo,
               const int32_t* hi, const AttnState& out, float* scratch) {
    int32_t last = 0;
    for (int64_t r = 0; r < rows; r++)
        if (hi[r] > last && hi[r] > lo[r]) last = hi[r];
    if (last == 0) {
        for (int64_t r = 0; r < rows; r++) out.m[r] = MASKED, out.l[r] = 0.0f;
        return;
    }
    const int64_t cells = (last + 15) / 16;
    float* s = scratch;
    uint16_t* h = (uint16_t*)(scratch + rows * KV_TILE);
    int64_t r = 0;
    for (; r + 8 <= rows; r += 8) score_rows<8>(p, tile, q, r, cells, s);
    for (; r + 3 <= rows; r += 3) score_rows<3>(p, tile, q, r, cells, s);
    for (; r < rows; r++) score_rows<1>(p, tile, q, r, cells, s);
    for (r = 0; r < rows; r++) {
        if (hi[r] <= lo[r]) {
            out.m[r] = MASKED, out.l[r] = 0.0f;
            memset(s + r * KV_TILE, 0, KV_TILE * 4);
            memset(h + r * KV_TILE, 0, KV_TILE * 2);
        } else {
            softmax_row(p, cells, lo[r], hi[r], s + r * KV_TILE, h + r * KV_TILE, out.m + r, out.l + r);
        }
    }
    r = 0;
    for (; r + 4 <= rows; r += 4) value_rows<4>(p, tile, s, h, r, last, out.acc);
    for (; r + 3 <= rows; r += 3) value_rows<3>(p, tile, s, h, r, last, out.acc);
    for (; r < rows; r++) value_rows<1>(p, tile, s, h, r, last, out.acc);
}

void attn_merge(int64_t d, int64_t rows, const AttnState& into, const AttnState& part) {
    for (int64_t r = 0; r < rows; r++) {
        if (part.m[r] == MASKED) continue;
        float *a = into.acc + r * d, *b = part.acc + r * d;
        if (into.m[r] == MASKED) {
            into.m[r] = part.m[r];
            into.l[r] = part.l[r];
            memcpy(a, b, size_t(d) * 4);
            continue;
        }
        const float m = into.m[r] > part.m[r] ? into.m[r] : part.m[r];
        float e[32];
        fstore(e, fexp(fset1(into.m[r] - m)));
        fstore(e + 16, fexp(fset1(part.m[r] - m)));
        const F x = fset1(e[0]), y = fset1(e[16]);
        for (int64_t i = 0; i < d; i += 16) fstore(a + i, fma(fload(b + i), y, fmul(fload(a + i), x)));
        into.m[r] = m;
        into.l[r] = into.l[r] * e[0] + part.l[r] * e[16];
    }
}

void attn_finish(int64_t d, float m, float l, const float* acc, const float* sink, float* out) {
    float weight = 1.0f;
    if (sink) {
        const float top = m > *sink ? m : *sink;
        float e[32];
        fstore(e, fexp(fset1(m - top)));
        fstore(e + 16, fexp(fset1(*sink - top)));
        weight = e[0];
        l = l * e[0] + e[16];
    }
    const F w = fset1(l > 0.0f ? weight / l : 0.0f);
    for (int64_t i = 0; i < d; i += 16) fstore(out + i, fmul(fload(acc + i), w));
}

}  // namespace TK_ISA
}  // namespace tk
