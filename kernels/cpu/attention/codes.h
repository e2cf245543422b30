// Products of queries with keys, and of weights with values, that are codes of up to 8 bits: as integers.
//
// Codes lie as bytes, four of a lane side by side (KV_BYTES), as dot4 takes them. What they are multiplied by, a query or the
// weights of a tile's tokens, is rounded to integers of 16 bits relative to its largest number, an upper and a lower byte:
// x = factor * (256 * upper + lower), which errs by less than float products of codes of 8 bits do. Sums are exact, so they
// depend on no order.
#pragma once

#include "ops_isa.h"

namespace tk {
namespace TK_ISA {
namespace {

constexpr float MOST = 32639.0f;  // 256 * 127 + 127

// Factors of integers up to MOST: by which numbers up to `top` are multiplied. 0 where all are as good as 0.
TK_INLINE float to_integers(float top) { return top > 1e-30f ? MOST / top : 0.0f; }

// 16 integers to their upper and lower bytes.
TK_INLINE void store_bytes(I x, int8_t* upper, int8_t* lower) {
    const I high = isub(ishr(iadd(x, iset1((1 << 16) + 128)), 8), iset1(256));
    store_s8(upper, high);
    store_s8(lower, isub(x, ishl(high, 8)));
}

// The same of four times 16, the ones of weights: [KV_TILE] upper bytes, then lower ones.
TK_INLINE void store_weights(const I* x, int8_t* weights) {
    const B one = _mm512_packs_epi32(x[0], x[1]), two = _mm512_packs_epi32(x[2], x[3]), half = _mm512_set1_epi16(128);
    const B upper_one = _mm512_srai_epi16(_mm512_add_epi16(one, half), 8), upper_two = _mm512_srai_epi16(_mm512_add_epi16(two, half), 8);
    const B lower_one = _mm512_sub_epi16(one, _mm512_slli_epi16(upper_one, 8)), lower_two = _mm512_sub_epi16(two, _mm512_slli_epi16(upper_two, 8));
    // packing takes quarters of both operands in turn
    const B order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    bstore(weights, _mm512_permutexvar_epi32(order, _mm512_packs_epi16(upper_one, upper_two)));
    bstore(weights + KV_TILE, _mm512_permutexvar_epi32(order, _mm512_packs_epi16(lower_one, lower_two)));
}

TK_INLINE F joined(I upper, I lower) { return fma(f_of(upper), fset1(256.0f), f_of(lower)); }

// What `query_codes` writes behind the bytes of a query: its factor, and its sum.
struct QueryTail {
    float factor, sum;
};

TK_INLINE F score_of(I upper, I lower, const QueryTail& tail, F scale, F minimum) {
    return fma(fmul(joined(upper, lower), fset1(tail.factor)), scale, fmul(minimum, fset1(tail.sum)));
}

// M queries by N cells, into rows of scores.
template <int M, int N>
void scores_codes(const uint8_t* q, int64_t d, const void* const* cells, const uint8_t* const* params, float* s) {
    const int64_t row = query_bytes(KV_BYTES, false, d);
    I upper[M * N], lower[M * N];
    TK_EACH(i, M * N, upper[i] = lower[i] = izero(););
    for (int64_t i = 0; i < d; i += 4) {
        B k[N];
        TK_EACH(n, N, k[n] = bload((const uint8_t*)cells[n] + i * 16););
        TK_EACH(r, M, {
            const B a = bset4(q + r * row + i), b = bset4(q + r * row + d + i);
            TK_EACH(n, N, {
                upper[r * N + n] = dot4(upper[r * N + n], k[n], a);
                lower[r * N + n] = dot4(lower[r * N + n], k[n], b);
            });
        });
    }
    F scale[N], minimum[N];
    TK_EACH(n, N, load_f16_pairs(params[n], scale + n, minimum + n););
    TK_EACH(r, M, {
        QueryTail tail;
        memcpy(&tail, q + r * row + 2 * d, sizeof tail);
        TK_EACH(n, N, {
            const F score = score_of(upper[r * N + n], lower[r * N + n], tail, scale[n], minimum[n]);
            fstore(s + r * KV_TILE + n * 16, score);
        });
    });
}

// Of each row of weights: what its integers are multiplied by, and what the minima add to every column.
struct WeightTail {
    float factor, minima;
};

TK_INLINE F value_of(I upper, I lower, const WeightTail& tail) { return fma(joined(upper, lower), fset1(tail.factor), fset1(tail.minima)); }

// Probabilities of `rows` rows to weights of codes, [KV_TILE] upper bytes and as many lower ones, 0 behind the last cell up to a multiple
// of 64 tokens; of each row its tail takes the place of the first probabilities.
inline void weigh_codes(const KvTile& tile, int64_t rows, int64_t cells, float* s, int8_t* weights) {
    F scale[KV_CELLS], minimum[KV_CELLS], x[KV_CELLS];
    for (int64_t c = 0; c < cells; c++) load_f16_pairs(tile.vp[c], scale + c, minimum + c);
    for (int64_t r = 0; r < rows; r++, s += KV_TILE, weights += 2 * KV_TILE) {
        F top = fzero(), minima = fzero();
        for (int64_t c = 0; c < cells; c++) {
            const F p = fload(s + c * 16);
            minima = fma(p, minimum[c], minima);
            x[c] = fmul(p, scale[c]);
            top = fmax(x[c], top);
        }
        const float most = hmax(top);
        const F inverse = fset1(to_integers(most));
        for (int64_t c = 0; c < cells; c += 4) {
            I of[4];
            TK_EACH(i, 4, of[i] = c + i < cells ? i_of(fmul(x[c + i], inverse)) : izero(););
            store_weights(of, weights + c * 16);
        }
        const WeightTail tail{most / MOST, hsum(minima)};
        memcpy(s, &tail, sizeof tail);
    }
}

// M rows of weights by N groups of 16 columns of `tokens` values; s: see weigh_codes.
template <int M, int N>
void values_codes(const int8_t* weights, const KvTile& tile, int64_t d, int64_t col, int64_t tokens, const float* s, float* acc, int64_t ld) {
    I upper[M * N], lower[M * N];
    TK_EACH(i, M * N, upper[i] = lower[i] = izero(););
    for (int64_t t = 0; t < tokens; t += 4) {
        const uint8_t* v = (const uint8_t*)tile.v[t / 16] + t % 16 * d + col * 4;
        B k[N];
        TK_EACH(n, N, k[n] = bload(v + n * 64););
        TK_EACH(r, M, {
            const B a = bset4(weights + r * 2 * KV_TILE + t), b = bset4(weights + r * 2 * KV_TILE + KV_TILE + t);
            TK_EACH(n, N, {
                upper[r * N + n] = dot4(upper[r * N + n], k[n], a);
                lower[r * N + n] = dot4(lower[r * N + n], k[n], b);
            });
        });
    }
    TK_EACH(r, M, {
        WeightTail tail;
        memcpy(&tail, s + r * KV_TILE, sizeof tail);
        TK_EACH(n, N, fstore(acc + r * ld + col + n * 16, value_of(upper[r * N + n], lower[r * N + n], tail)););
    });
}

}  // namespace
}  // namespace TK_ISA
}  // namespace tk
