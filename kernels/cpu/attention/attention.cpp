// Attention over one tile of 128 cached tokens, and the merging of tiles.
//
// A row's result is defined tile by tile: scores are single chains over head_dim, the softmax of a tile is taken alone,
// values are added in ascending order of tokens, tiles are merged in ascending order. Tiles start at multiples of 128 of
// the absolute position, so a row's bits depend neither on how prompts were cut into chunks nor on what else is in the
// batch. Source of the merging: Milakov & Gimelshein, "Online normalizer calculation for softmax" (2018).
#include "attention/products.h"
#include "attention/softmax.h"
#if defined(TK_READS_CODES)
#include "attention/codes.h"
#endif
#if defined(__AMX_TILE__)
#include "amx/attention.h"
#endif

namespace tk {
namespace TK_ISA {
namespace {

constexpr int64_t FEW_ROWS = 24;  // up to so many query rows reading the cache is a good part of the time
constexpr int64_t BY_TILES = 12;  // rows from which codes are multiplied by tile registers where there are any

#if defined(TK_READS_CODES)
// The rows from r on, M of them or fewer; returns the row behind them.
template <int M = 4>
int64_t score_codes(const AttnParams& p, const KvTile& tile, const uint8_t* q, int64_t r, int64_t rows, int64_t cells, float* s) {
    if constexpr (M > 1)
        if (rows - r < M) return score_codes<M - 1>(p, tile, q, r, rows, cells, s);
    const uint8_t* of = q + r * query_bytes(KV_BYTES, false, p.dpad);
    float* to = s + r * KV_TILE;
    int64_t c = 0;
    for (; c + 2 <= cells; c += 2) scores_codes<M, 2>(of, p.dpad, tile.k + c, tile.kp + c, to + c * 16);
    if (c < cells) scores_codes<M, 1>(of, p.dpad, tile.k + c, tile.kp + c, to + c * 16);
    return r + M;
}

template <int M = 4>
int64_t value_codes(const AttnParams& p, const KvTile& tile, const int8_t* w, int64_t r, int64_t rows, int64_t tokens, const float* s, float* acc) {
    if constexpr (M > 1)
        if (rows - r < M) return value_codes<M - 1>(p, tile, w, r, rows, tokens, s, acc);
    constexpr int N = M == 4 ? 2 : 4;
    w += r * 2 * KV_TILE, s += r * KV_TILE, acc += r * p.vpad;
    int64_t col = 0;
    for (; col + 16 * N <= p.vpad; col += 16 * N) values_codes<M, N>(w, tile, p.dpad, col, tokens, s, acc, p.vpad);
    for (; col < p.vpad; col += 16) values_codes<M, 1>(w, tile, p.dpad, col, tokens, s, acc, p.vpad);
    return r + M;
}

void attend_codes(const AttnParams& p, const KvTile& tile, const uint8_t* q, int64_t rows, const int32_t* lo, const int32_t* hi,
                  int64_t tokens, int64_t cells, const AttnState& out, float* s) {
    int8_t* weights = (int8_t*)(s + rows * KV_TILE);
#if defined(__AMX_TILE__)
    const bool tiles = rows >= BY_TILES;
    if (tiles) scores_of_codes(p, tile, q, rows, cells, s);
    else
#endif
        for (int64_t r = 0; r < rows;) r = score_codes(p, tile, q, r, rows, cells, s);
    softmax_rows(p, rows, lo, hi, s, (uint16_t*)weights, out);
    weigh_codes(tile, rows, cells, s, weights);
#if defined(__AMX_TILE__)
    if (tiles) return values_of_codes(p, tile, weights, rows, cells, s, (uint8_t*)(s + 2 * rows * KV_TILE), out.acc);
#endif
    for (int64_t r = 0; r < rows;) r = value_codes(p, tile, weights, r, rows, tokens, s, out.acc);
}
#endif

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
#if defined(TK_READS_CODES)
    if (p.type == KV_BYTES) return attend_codes(p, tile, (const uint8_t*)q, rows, lo, hi, last, cells, out, s);
#endif
    uint16_t* h = (uint16_t*)(scratch + rows * KV_TILE);
#if defined(__AMX_TILE__)
    if (p.type == KV_BF16) {
        scores_tiles(p, tile, (const uint16_t*)q, rows, last, s);
        softmax_rows(p, rows, lo, hi, s, h, out);
        return values_tiles(p, tile, h, rows, last, (uint8_t*)(h + rows * KV_TILE), out.acc);
    }
#endif
    const bool ahead = tile.next && rows <= FEW_ROWS;
    int64_t r = ahead ? score_some<true>(p, tile, q, 0, rows, cells, s) : 0;
    while (r < rows) r = score_some<false>(p, tile, q, r, rows, cells, s);
    const bool codes = !DOT && p.type == KV_INT8;
    if (codes) unfold_scores(p, tile, (const float*)q, rows, cells, s);
    softmax_rows(p, rows, lo, hi, s, h, out);
    if (codes) fold_weights(tile, rows, cells, s, (float*)h);
    r = ahead ? value_some<true>(p, tile, s, h, 0, rows, last, out.acc) : 0;
    while (r < rows) r = value_some<false>(p, tile, s, h, r, rows, last, out.acc);
}

// Factors 2^(a - max) and 2^(b - max) of 16 rows, and the maxima.
TK_INLINE void merge_factors(F a, F b, float* m, float* x, float* y) {
    const F top = fmax(a, b);
    fstore(m, top);
    fstore(x, fexp2(fsub(a, top)));
    fstore(y, fexp2(fsub(b, top)));
}

void attn_merge(int64_t d, int64_t rows, const AttnState& into, const AttnState& part) {
    float m[16], x[16], y[16];
    for (int64_t r = 0; r < rows; r++) {
        const int64_t j = r % 16;
        if (j == 0) merge_factors(fload(into.m + r), fload(part.m + r), m, x, y);  // what lies behind the last row is of no use
        if (part.m[r] == MASKED) continue;
        float *a = into.acc + r * d, *b = part.acc + r * d;
        if (into.m[r] == MASKED) {
            into.m[r] = part.m[r];
            into.l[r] = part.l[r];
            memcpy(a, b, size_t(d) * 4);
            continue;
        }
        const F u = fset1(x[j]), v = fset1(y[j]);
        for (int64_t i = 0; i < d; i += 16) fstore(a + i, fma(fload(b + i), v, fmul(fload(a + i), u)));
        into.m[r] = m[j];
        into.l[r] = into.l[r] * x[j] + part.l[r] * y[j];
    }
}

void attn_finish(int64_t d, float m, float l, const float* acc, const float* sink, float* out) {
    float weight = 1.0f;
    if (sink) {
        const float s = *sink * LOG2E;
        float top[16], x[16], y[16];
        merge_factors(fset1(m), fset1(s), top, x, y);
        weight = x[0];
        l = l * x[0] + y[0];
    }
    const F w = fset1(l > 0.0f ? weight / l : 0.0f);
    for (int64_t i = 0; i < d; i += 16) fstore(out + i, fmul(fload(acc + i), w));
}

}  // namespace TK_ISA
}  // namespace tk
