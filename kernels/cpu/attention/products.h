// Products of queries with keys, and of probabilities with values, over one tile: in floats or, where the processor has them, as dot
// products of bfloat16. Codes of 8 bits are multiplied as they are; what they stand for is reckoned in before and after.
//
// With few query rows the time is that of reading the cache. Scattered blocks of 16 KB are too short for the processor's
// prefetcher, so the tile that comes next is fetched line by line, in order of addresses, while this one is computed: into the
// second-level cache, for the first one does not hold two tiles.
#pragma once

#include "ops_isa.h"

namespace tk {
namespace TK_ISA {
namespace {

#if defined(TK_BF16_DOT)
constexpr bool DOT = true;  // of bfloat16 alone: what values are multiplied by is rounded to it, too
#else
constexpr bool DOT = false;
#endif

// Query rows whose sums stay in registers beside a step's operands, by how many cells (scores) or groups of 16 columns (values).
#if defined(__AVX512F__)
constexpr int SCORE_ROWS = 8, VALUE_ROWS = 4;
constexpr int cells_beside(int) { return 2; }
constexpr int groups_beside(int) { return 4; }
constexpr int fewer(int rows) { return rows == 8 ? 4 : rows - 1; }
#else
constexpr int SCORE_ROWS = 6, VALUE_ROWS = 6;
constexpr int cells_beside(int rows) { return rows <= 2 ? 2 : 1; }
constexpr int groups_beside(int rows) { return rows <= 2 ? 4 / rows : 1; }
constexpr int fewer(int rows) { return rows - 1; }
#endif

// Cells that are read later, one after the other, as one run of lines: so many are fetched at each step of the product over as many
// cells as are multiplied together.
struct Ahead {
    const uint8_t *first, *second;
    int64_t bytes;  // of a cell
    template <int LINES>
    void step(int64_t i) const {
        const uint8_t* p = i * LINES * 64 < bytes ? first + i * LINES * 64 : second + (i * LINES * 64 - bytes);
        TK_EACH(j, LINES, fetch_to_l2(p + j * 64););
    }
};

constexpr int bytes_of(int type) { return type == KV_F32 ? 4 : type == KV_BF16 ? 2 : 1; }

// ---- scores: M rows of floats by N cells. Of codes: their products alone, which `unfold` turns into scores.
template <int M, int N, int TYPE, bool AHEAD>
void scores_wide(const float* q, int64_t d, const void* const* cells, const Ahead& ahead, float* s) {
    constexpr int STEP = TYPE == KV_INT8 ? 4 : 2;
    F y[M * N];
    TK_EACH(i, M * N, y[i] = fzero(););
    for (int64_t i = 0; i < d; i += STEP) {
        if (AHEAD) ahead.step<N * bytes_of(TYPE) * STEP / 4>(i / STEP);
        TK_EACH(j, STEP, {
            F k[N];
            TK_EACH(n, N, {
                const uint8_t* cell = (const uint8_t*)cells[n] + i * 16 * bytes_of(TYPE);
                if (TYPE == KV_INT8) k[n] = f_of(load_u8(cell + j * 16));
                else if (TYPE == KV_BF16) k[n] = load_half<j % 2>(cell);
                else k[n] = fload((const float*)cell + j * 16);
            });
            TK_EACH(r, M, {
                const F x = fset1(q[r * d + i + j]);
                TK_EACH(n, N, y[r * N + n] = fma(k[n], x, y[r * N + n]););
            });
        });
    }
    TK_EACH(r, M, TK_EACH(n, N, fstore(s + r * KV_TILE + n * 16, y[r * N + n]);););
}

// ---- values: M rows by N groups of 16 columns, `tokens` of them; begin[r] is added to the sums of row r
template <int M, int N, int TYPE, bool AHEAD>
void values_wide(const float* p, const float* begin, const KvTile& tile, int64_t d, int64_t col, int64_t tokens, float* acc, int64_t ld) {
    constexpr int BYTES = bytes_of(TYPE), RUN = TYPE == KV_BF16 ? 2 : 1;  // tokens whose elements alternate
    F y[M * N];
    TK_EACH(r, M, TK_EACH(n, N, y[r * N + n] = TYPE == KV_INT8 ? fset1(begin[r]) : fzero();););
    for (int64_t t = 0; t < tokens; t += 2) {
        const int64_t at = (t % 16 * d + col * RUN) * BYTES;
        const uint8_t* v = (const uint8_t*)tile.v[t / 16] + at;
        if (AHEAD) {
            const uint8_t* next = (const uint8_t*)tile.next->v[t / 16] + at;
            if (TYPE == KV_INT8) {  // two rows are fewer lines than groups of columns: these take turns
                for (int64_t i = col * 4 / N; i < 2 * d; i += d * 4 / N) fetch_to_l2(next - col + i);
            } else {
                TK_EACH(n, N, fetch_to_l2(next + 64 * n););
                if (TYPE == KV_F32) TK_EACH(n, N, fetch_to_l2(next + d * 4 + 64 * n););
            }
        }
        const bool two = t + 1 < tokens;
        TK_EACH(j, 2, TK_EACH(n, N, {
            if (j && !two) return;
            F w;
            if (TYPE == KV_INT8) w = f_of(load_u8(v + j * d + 16 * n));
            else w = TYPE == KV_BF16 ? load_half<j>(v + 64 * n) : fload((const float*)v + j * d + 16 * n);
            TK_EACH(r, M, y[r * N + n] = fma(w, fset1(p[r * KV_TILE + t + j]), y[r * N + n]););
        }););
    }
    TK_EACH(r, M, TK_EACH(n, N, fstore(acc + r * ld + col + 16 * n, y[r * N + n]);););
}

#if defined(TK_BF16_DOT)
template <int M, int N, bool AHEAD>
void scores_dot(const uint16_t* q, int64_t d, const void* const* cells, const Ahead& ahead, float* s) {
    F y[M * N];
    TK_EACH(i, M * N, y[i] = fzero(););
    for (int64_t i = 0; i < d; i += 2) {
        I k[N];
        TK_EACH(n, N, k[n] = bload((const uint8_t*)cells[n] + i * 32););
        if (AHEAD) ahead.step<N>(i / 2);
        TK_EACH(r, M, {
            const I x = bset4(q + r * d + i);
            TK_EACH(n, N, y[r * N + n] = dot_bf16(y[r * N + n], k[n], x););
        });
    }
    TK_EACH(r, M, TK_EACH(n, N, fstore(s + r * KV_TILE + n * 16, y[r * N + n]);););
}

template <int M, int N, bool AHEAD>
void values_dot(const uint16_t* p, const KvTile& tile, int64_t d, int64_t col, int64_t tokens, float* acc, int64_t ld) {
    F y[M * N];
    TK_EACH(i, M * N, y[i] = fzero(););
    for (int64_t t = 0; t < tokens; t += 2) {
        const int64_t at = (t % 16 / 2 * d + col) * 4;
        const uint8_t* v = (const uint8_t*)tile.v[t / 16] + at;
        I w[N];
        TK_EACH(n, N, w[n] = bload(v + 64 * n););
        if (AHEAD) TK_EACH(n, N, fetch_to_l2((const uint8_t*)tile.next->v[t / 16] + at + 64 * n););
        TK_EACH(r, M, {
            const I x = bset4(p + r * KV_TILE + t);
            TK_EACH(n, N, y[r * N + n] = dot_bf16(y[r * N + n], w[n], x););
        });
    }
    TK_EACH(r, M, TK_EACH(n, N, fstore(acc + r * ld + col + 16 * n, y[r * N + n]);););
}
#else
template <int M, int N, bool AHEAD>
void scores_dot(const uint16_t*, int64_t, const void* const*, const Ahead&, float*) {}
template <int M, int N, bool AHEAD>
void values_dot(const uint16_t*, const KvTile&, int64_t, int64_t, int64_t, float*, int64_t) {}
#endif

template <int M, bool AHEAD>
void score_rows(const AttnParams& p, const KvTile& tile, const void* q, int64_t r, int64_t cells, float* s) {
    constexpr int N = cells_beside(M);
    for (int64_t c = 0; c < cells; c += N) {
        const void* k[2] = {tile.k[c], tile.k[c + 1 < cells ? c + 1 : c]};
        float* to = s + r * KV_TILE + c * 16;
        Ahead a{nullptr, nullptr, p.dpad * 16 * bytes_of(p.type)};
        if (AHEAD) a.first = (const uint8_t*)tile.next->k[c], a.second = (const uint8_t*)tile.next->k[c + N - 1];
        const float* wide = (const float*)q + r * p.dpad;
        if (p.type == KV_F32) scores_wide<M, N, KV_F32, AHEAD>(wide, p.dpad, k, a, to);
        else if (DOT) scores_dot<M, N, AHEAD>((const uint16_t*)q + r * p.dpad, p.dpad, k, a, to);
        else if (p.type == KV_BF16) scores_wide<M, N, KV_BF16, AHEAD>(wide, p.dpad, k, a, to);
        else scores_wide<M, N, KV_INT8, AHEAD>(wide, p.dpad, k, a, to);
    }
}

template <int M, int N, bool AHEAD>
void value_cols(const AttnParams& p, const KvTile& tile, const float* s, const uint16_t* h, int64_t r, int64_t col,
                int64_t tokens, float* acc) {
    const float *wide = s + r * KV_TILE, *begin = (const float*)h + r;
    float* to = acc + r * p.vpad;
    if (p.type == KV_F32) values_wide<M, N, KV_F32, AHEAD>(wide, begin, tile, p.dpad, col, tokens, to, p.vpad);
    else if (DOT) values_dot<M, N, AHEAD>(h + r * KV_TILE, tile, p.dpad, col, tokens, to, p.vpad);
    else if (p.type == KV_BF16) values_wide<M, N, KV_BF16, AHEAD>(wide, begin, tile, p.dpad, col, tokens, to, p.vpad);
    else values_wide<M, N, KV_INT8, AHEAD>(wide, begin, tile, p.dpad, col, tokens, to, p.vpad);
}

template <int M, bool AHEAD>
void value_rows(const AttnParams& p, const KvTile& tile, const float* s, const uint16_t* h, int64_t r, int64_t tokens,
                float* acc) {
    constexpr int N = groups_beside(M);
    int64_t col = 0;
    for (; col + 16 * N <= p.vpad; col += 16 * N) value_cols<M, N, AHEAD>(p, tile, s, h, r, col, tokens, acc);
    for (; N > 1 && col < p.vpad; col += 16) value_cols<M, 1, AHEAD>(p, tile, s, h, r, col, tokens, acc);
}

// x = code * scale + minimum, summed with weights: scale * (sum of weighted codes) + minimum * (sum of weights).

// Products of queries and codes to scores.
void unfold_scores(const AttnParams& p, const KvTile& tile, const float* q, int64_t rows, int64_t cells, float* s) {
    F scale[KV_CELLS], minimum[KV_CELLS];
    for (int64_t c = 0; c < cells; c++) load_f16_pairs(tile.kp[c], scale + c, minimum + c);
    for (int64_t r = 0; r < rows; r++) {
        F sum = fzero();
        for (int64_t i = 0; i < p.dpad; i += 16) sum = fadd(sum, fload(q + r * p.dpad + i));
        const F all = fset1(hsum(sum));
        float* row = s + r * KV_TILE;
        for (int64_t c = 0; c < cells; c++) fstore(row + c * 16, fma(scale[c], fload(row + c * 16), fmul(minimum[c], all)));
    }
}

// Probabilities to weights of codes, and what the minima add to every column of a row.
void fold_weights(const KvTile& tile, int64_t rows, int64_t cells, float* s, float* begin) {
    F scale[KV_CELLS], minimum[KV_CELLS];
    for (int64_t c = 0; c < cells; c++) load_f16_pairs(tile.vp[c], scale + c, minimum + c);
    for (int64_t r = 0; r < rows; r++) {
        F sum = fzero();
        float* row = s + r * KV_TILE;
        for (int64_t c = 0; c < cells; c++) {
            const F w = fload(row + c * 16);
            sum = fma(w, minimum[c], sum);
            fstore(row + c * 16, fmul(w, scale[c]));
        }
        begin[r] = hsum(sum);
    }
}

// A block of the rows from r on, of M at most; returns the row behind it. The first one of few rows also fetches the next tile.
template <bool AHEAD, int M = SCORE_ROWS>
int64_t score_some(const AttnParams& p, const KvTile& tile, const void* q, int64_t r, int64_t rows, int64_t cells, float* s) {
    if constexpr (M > 1)
        if (rows - r < M) return score_some<AHEAD, fewer(M)>(p, tile, q, r, rows, cells, s);
    score_rows<M, AHEAD>(p, tile, q, r, cells, s);
    return r + M;
}

template <bool AHEAD, int M = VALUE_ROWS>
int64_t value_some(const AttnParams& p, const KvTile& tile, const float* s, const uint16_t* h, int64_t r, int64_t rows,
                   int64_t tokens, float* acc) {
    if constexpr (M > 1)
        if (rows - r < M) return value_some<AHEAD, fewer(M)>(p, tile, s, h, r, rows, tokens, acc);
    value_rows<M, AHEAD>(p, tile, s, h, r, tokens, acc);
    return r + M;
}

}  // namespace
}  // namespace TK_ISA
}  // namespace tk
