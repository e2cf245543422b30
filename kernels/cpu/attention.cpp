// Attention over one tile of 128 cached tokens, and the merging of tiles.
//
// A row's result is defined tile by tile: scores are single chains over head_dim, the softmax of a tile is taken alone,
// values are added in ascending order of tokens, tiles are merged in ascending order. Tiles start at multiples of 128 of
// the absolute position, so a row's bits depend neither on how prompts were cut into chunks nor on what else is in the
// batch. Source of the merging: Milakov & Gimelshein, "Online normalizer calculation for softmax" (2018).
//
// With few query rows the time is that of reading the cache. Scattered blocks of 16 KB are too short for the processor's
// prefetcher, so the tile that comes next is fetched line by line, in order of addresses, while this one is computed: into the
// second-level cache, for the first one does not hold two tiles.
#include "ops_isa.h"
#if defined(TK_READS_CODES)
#include "codes.h"
#endif
#if defined(__AMX_TILE__)
#include "loose_amx.h"
#endif

namespace tk {
namespace TK_ISA {
namespace {

constexpr float MASKED = -INFINITY;
constexpr float LOG2E = 1.44269504088896341f;
constexpr int64_t FEW_ROWS = 24;  // up to so many query rows reading the cache is a good part of the time

// 2^x for x <= 0: 2^n * p(r), |r| <= 1/2, the power added to the exponent's bits; relative error below 3e-7. Below -126 it
// stops falling. NaN stays NaN (see fexp).
TK_INLINE F fexp2(F x) {
    x = fmax(fset1(-126.0f), x);
    const I n = i_of(x);
    const F r = fsub(x, f_of(n));
    F p = fma(fset1(1.327647129e-03f), r, fset1(9.675541893e-03f));
    p = fma(p, r, fset1(5.550713092e-02f));
    p = fma(p, r, fset1(2.402212024e-01f));
    p = fma(p, r, fset1(6.931469440e-01f));
    p = fma(p, r, fset1(1.0f));
    return as_f(iadd(as_i(p), ishl(n, 23)));
}

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
constexpr bool DOT = true;

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
constexpr bool DOT = false;

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

TK_INLINE void store_probs(uint16_t* h, F a, F b) {
#if defined(__AVX512BF16__)
    _mm512_storeu_si512(h, (__m512i)_mm512_cvtne2ps_pbh(b, a));
#else
    store_bf16(h, a);
    store_bf16(h + 16, b);
#endif
}

// Cells of a row that it sees something of, and whether a cell is one that it does not see whole. WHOLE: the row sees all.
template <bool WHOLE>
struct Seen {
    int32_t lo, hi;
    int first() const { return WHOLE ? 0 : lo / 16; }
    int end() const { return WHOLE ? int(KV_CELLS) : (hi + 15) / 16; }
    TK_INLINE F keep(F x, int c, int32_t lo, int32_t hi, float other) {
        if (WHOLE || (c * 16 >= lo && hi >= c * 16 + 16)) return x;
        return keep_lanes(x, lo - c * 16, hi - c * 16, fset1(other));
    }
};

// Greatest score of a row, as the exponent of 2 that it stands for. Scores are capped in place where there is a cap.
template <bool WHOLE>
TK_INLINE float top_score(const AttnParams& p, Seen<WHOLE> seen, float* s) {
    F top = fset1(MASKED);
    for (int c = seen.first(); c < seen.end(); c++) {
        F v = fload(s + c * 16);
        if (p.softcap > 0.0f) {
            v = fmul(fset1(p.softcap * LOG2E), ftanh(fmul(v, fset1(p.scale / p.softcap))));
            fstore(s + c * 16, v);
        }
        top = fmax(Seen<WHOLE>::keep(v, c, seen.lo, seen.hi, MASKED), top);
    }
    return p.softcap > 0.0f ? hmax(top) : hmax(top) * (p.scale * LOG2E);
}

// Scores of one row to probabilities relative to its greatest, and their sum; lanes that it does not see become 0.
template <bool WHOLE>
TK_INLINE float weigh(const AttnParams& p, Seen<WHOLE> seen, float top, float* s, uint16_t* h) {
    const F scale = fset1(p.softcap > 0.0f ? 1.0f : p.scale * LOG2E), base = fset1(-top);
    F total = fzero();
    for (int c = 0; c < KV_CELLS; c += 2) {
        F v[2] = {fzero(), fzero()};
        TK_EACH(i, 2, {
            if (WHOLE || (c + i >= seen.first() && c + i < seen.end())) {
                v[i] = fexp2(fma(fload(s + (c + i) * 16), scale, base));
                v[i] = Seen<WHOLE>::keep(v[i], c + i, seen.lo, seen.hi, 0.0f);
                total = fadd(total, v[i]);
            }
        });
        if (DOT && p.type == KV_BF16) {
            store_probs(h + c * 16, v[0], v[1]);
        } else {
            fstore(s + c * 16, v[0]);
            fstore(s + c * 16 + 16, v[1]);
        }
    }
    return hsum(total);
}

// What ALiBi adds to the scores of one row.
void raise(const AttnParams& p, int64_t r, int first, int end, float* s) {
    static const float lanes[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int c = first; c < end; c++) {
        float v[16];
        fstore(v, fadd(fload(lanes), fset1(float(p.from[r] + c * 16))));
        auto rounded = [](float x) { return bf16_to_float(float_to_bf16(x)); };
        for (float& x : v) x = p.rounded != 0.0f ? p.rounded * rounded(p.slope[r] * rounded(x)) : p.slope[r] * (p.both ? -std::fabs(x) : x);
        fstore(s + c * 16, fadd(fload(s + c * 16), fload(v)));
    }
}

// All rows' greatest scores first, then the exponentials: so rows do not wait for each other's long chains.
void softmax_rows(const AttnParams& p, int64_t rows, const int32_t* lo, const int32_t* hi, float* s, uint16_t* h,
                  const AttnState& out) {
    auto whole = [&](int64_t r) { return lo[r] == 0 && hi[r] == KV_TILE; };
    for (int64_t r = 0; r < rows; r++) {
        float* row = s + r * KV_TILE;
        if (p.slope && hi[r] > lo[r]) raise(p, r, lo[r] / 16, (hi[r] + 15) / 16, row);
        if (whole(r)) out.m[r] = top_score(p, Seen<true>{0, KV_TILE}, row);
        else out.m[r] = hi[r] > lo[r] ? top_score(p, Seen<false>{lo[r], hi[r]}, row) : MASKED;
    }
    for (int64_t r = 0; r < rows; r++) {
        float* row = s + r * KV_TILE;
        uint16_t* probs = h + r * KV_TILE;
        if (whole(r)) {
            out.l[r] = weigh(p, Seen<true>{0, KV_TILE}, out.m[r], row, probs);
        } else if (hi[r] > lo[r]) {
            out.l[r] = weigh(p, Seen<false>{lo[r], hi[r]}, out.m[r], row, probs);
        } else {
            out.l[r] = 0.0f;
            memset(row, 0, KV_TILE * 4);
            memset(probs, 0, KV_TILE * 2);
        }
    }
}

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
    for (int64_t r = 0; r < rows;) r = score_codes(p, tile, q, r, rows, cells, s);
    int8_t* weights = (int8_t*)(s + rows * KV_TILE);
    softmax_rows(p, rows, lo, hi, s, (uint16_t*)weights, out);
    weigh_codes(tile, rows, cells, s, weights);
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
#if defined(__AMX_TILE__)
    if (p.loose && p.type == KV_BF16) {
        uint16_t* probs = (uint16_t*)(scratch + (rows + 15) / 16 * 16 * KV_TILE);
        scores_loose(p, tile, (const uint16_t*)q, rows, cells, s);
        softmax_rows(p, rows, lo, hi, s, probs, out);
        return values_loose(p, tile, probs, rows, last, out.acc);
    }
#endif
#if defined(TK_READS_CODES)
    if (p.type == KV_BYTES) return attend_codes(p, tile, (const uint8_t*)q, rows, lo, hi, last, cells, out, s);
#endif
    uint16_t* h = (uint16_t*)(scratch + rows * KV_TILE);
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
