// States of fixed size: the causal convolution of channels and the recurrence of a head's matrix, over tokens of one sequence.
#include "ops_isa.h"

namespace tk {
namespace TK_ISA {

namespace {

// State row i as the token leaves it, and what it adds to y, and to what the next token's key will find (`follow`).
template <bool follow>
TK_INLINE void pass(const StateRun& r, int64_t t, const F (&m)[2], F (&y)[2], F (&found)[2]) {
    const float *key = r.key + t * r.ld, *query = r.query + t * r.ld, *next = key + (follow ? r.ld : 0);
    const F keep = fset1(r.keep[t]);
    for (int64_t i = 0; i < r.rows; i++) {
        float* s = r.state + i * STATE_COLS;
        const F k = fset1(key[i]), q = fset1(query[i]);
        const F a = fma(k, m[0], fmul(fload(s), keep)), b = fma(k, m[1], fmul(fload(s + 16), keep));
        fstore(s, a);
        fstore(s + 16, b);
        y[0] = fma(q, a, y[0]);
        y[1] = fma(q, b, y[1]);
        if (!follow) continue;
        const F n = fset1(next[i]);
        found[0] = fma(n, a, found[0]);
        found[1] = fma(n, b, found[1]);
    }
}

}  // namespace

// Rows of the state are read once a token: what the next key finds in it is summed up while this one's are written.
void recur(const StateRun& r) {
    F found[2] = {fzero(), fzero()};
    for (int64_t i = 0; r.delta && i < r.rows; i++) {
        const F k = fset1(r.key[i]);
        found[0] = fma(k, fload(r.state + i * STATE_COLS), found[0]);
        found[1] = fma(k, fload(r.state + i * STATE_COLS + 16), found[1]);
    }
    const int64_t low = r.cols < 16 ? r.cols : 16, high = r.cols - low;
    for (int64_t t = 0; t < r.tokens; t++) {
        const float* value = r.value + t * r.ldv;
        F m[2] = {load_part(value, low), load_part(value + 16, high)}, y[2] = {fzero(), fzero()}, next[2] = {fzero(), fzero()};
        for (int j = 0; j < 2; j++) {
            if (r.delta) m[j] = fsub(m[j], fmul(fset1(r.keep[t]), found[j]));
            m[j] = fmul(fset1(r.weight[t]), m[j]);
        }
        if (r.delta && t + 1 < r.tokens) pass<true>(r, t, m, y, next);
        else pass<false>(r, t, m, y, next);
        found[0] = next[0];
        found[1] = next[1];
        store_part(r.out + t * r.ldo, low, y[0]);
        store_part(r.out + t * r.ldo + 16, high, y[1]);
    }
}

void convolve(const ConvRun& r) {
    const int64_t before = r.kernel - 1;
    auto row = [&](int64_t t) { return t < 0 ? r.tail + (before + t) * r.ld_tail : r.x + t * r.ldx; };
    for (int64_t t = 0; t < r.tokens; t++)
        for (int64_t c = 0; c < r.channels; c += 16) {
            const int64_t n = r.channels - c;
            F y = fzero();
            for (int64_t k = 0; k < r.kernel; k++) y = fma(load_part(r.w + k * r.ldw + c, n), load_part(row(t - before + k) + c, n), y);
            if (r.bias) y = fadd(y, load_part(r.bias + c, n));
            store_part(r.out + t * r.ldo + c, n, r.silu ? apply_activation(y, SILU) : y);
        }
    for (int64_t i = 0; i < before; i++) memcpy(r.tail + i * r.ld_tail, row(r.tokens - before + i), size_t(r.channels) * 4);
}

}  // namespace TK_ISA
}  // namespace tk
