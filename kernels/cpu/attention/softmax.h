// The softmax of one tile: scores of each row to probabilities relative to its greatest, with the cap, ALiBi, and what a row sees.
#pragma once

#include "attention/products.h"

namespace tk {
namespace TK_ISA {
namespace {

constexpr float MASKED = -INFINITY;
constexpr float LOG2E = 1.44269504088896341f;

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

// What ALiBi, or a bias by position, adds to the scores of one row.
void raise(const AttnParams& p, int64_t r, int first, int end, float* s) {
    if (p.bias) {
        for (int c = first; c < end; c++) fstore(s + c * 16, fadd(fload(s + c * 16), fload(p.bias + p.from[r] + c * 16)));
        return;
    }
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
        if ((p.slope || p.bias) && hi[r] > lo[r]) raise(p, r, lo[r] / 16, (hi[r] + 15) / 16, row);
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

}  // namespace
}  // namespace TK_ISA
}  // namespace tk
