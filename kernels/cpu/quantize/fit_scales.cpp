// Scales and lows of groups of floats by a search over candidates. See FitRun; the candidates of quantize.py of toolkit/artifacts/gguf.
//
// A lane is a group: 16 groups are turned first, so that every sum is down the lanes, in the order of the group's columns.
#include "ops_isa.h"

namespace tk {
namespace TK_ISA {
namespace {

constexpr int64_t WIDEST = 32;  // columns of a group
constexpr float HUGE_ERROR = 3.402823466e38f;

struct Turned {
    float x[WIDEST * 16], w[WIDEST * 16], wx[WIDEST * 16], code[WIDEST * 16];
};

// all bits of the lanes where x < y; of NaN either
TK_INLINE I less(F x, F y) { return isub(izero(), iand(ishr(as_i(fsub(x, y)), 31), iset1(1))); }
TK_INLINE F pick(I mask, F yes, F no) {
    return as_f(ior(iand(mask, as_i(yes)), iand(isub(iset1(-1), mask), as_i(no))));
}
// x / y, and 0 where y is 0
TK_INLINE F quotient(F x, F y) { return as_f(iand(less(fzero(), fabs(y)), as_i(fdiv(x, y)))); }
// to a whole number from low to high; NaN to low
TK_INLINE F code_of(F x, F low, F high) { return f_of(i_of(fmin(fmax(x, low), high))); }

void turn_groups(const FitRun& r, int64_t g0, int64_t count, Turned& t) {
    for (int64_t k = 0; k < r.group; k++)
        for (int64_t i = 0; i < 16; i++) {
            const int64_t at = (g0 + (i < count ? i : 0)) * r.group + k;
            t.x[k * 16 + i] = r.x[at];
            t.w[k * 16 + i] = r.w[at];
        }
    for (int64_t k = 0; k < r.group * 16; k += 16) fstore(t.wx + k, fmul(fload(t.w + k), fload(t.x + k)));
}

// x = code * scale, codes -half … half - 1: the value of largest magnitude is tried near -half, and near half - 1.
F fit_symmetric(const FitRun& r, const Turned& t) {
    F peak = fzero();
    for (int64_t k = 0; k < r.group; k++) {
        const F x = fload(t.x + 16 * k);
        peak = pick(less(fabs(peak), fabs(x)), x, peak);
    }
    const F low = fset1(-float(r.levels)), high = fset1(float(r.levels - 1));
    F best = fset1(-1.0f), scale = fzero();
    for (int step = -9; step < 10; step++) {
        const F inverse = quotient(fset1(float(-(r.levels + 0.1 * step))), peak);
        F xl = fzero(), ll = fzero();
        for (int64_t k = 0; k < r.group * 16; k += 16) {
            const F code = code_of(fmul(fload(t.x + k), inverse), low, high);
            xl = fma(fload(t.wx + k), code, xl);
            ll = fma(fmul(fload(t.w + k), code), code, ll);
        }
        const F gain = fmax(quotient(fmul(xl, xl), ll), fset1(-1.0f));  // what the squared error falls by; NaN is no gain
        const I better = less(best, gain);
        best = pick(better, gain, best);
        scale = pick(better, quotient(xl, ll), scale);
    }
    return scale;
}

// x = code * scale + low, codes 0 … top: scale and low by weighted least squares for the codes of each candidate.
F fit_affine(const FitRun& r, Turned& t, F* lowest) {
    const int64_t end = r.group * 16;
    F low = fload(t.x), high = low, total = fzero(), sum_x = fzero();
    for (int64_t k = 0; k < end; k += 16) {
        const F x = fload(t.x + k);
        low = fmin(low, x);
        high = fmax(high, x);
        total = fadd(total, fload(t.w + k));
        sum_x = fadd(sum_x, fload(t.wx + k));
    }
    if (r.negative) low = fmin(low, fzero());
    const F width = fsub(high, low), top = fset1(float(r.levels));
    F best = fset1(HUGE_ERROR), best_scale = fdiv(width, top), best_low = low;
    for (int step = -1; step < 21; step++) {
        const F inverse = quotient(fset1(float(step < 0 ? r.levels : r.levels - 1.0 + 0.1 * step)), width);
        F sum_l = fzero(), sum_ll = fzero(), sum_xl = fzero();
        for (int64_t k = 0; k < end; k += 16) {
            const F code = code_of(fmul(fsub(fload(t.x + k), low), inverse), fzero(), top);
            const F wl = fmul(fload(t.w + k), code);
            fstore(t.code + k, code);
            sum_l = fadd(sum_l, wl);
            sum_ll = fma(wl, code, sum_ll);
            sum_xl = fma(fload(t.wx + k), code, sum_xl);
        }
        const F det = fsub(fmul(total, sum_ll), fmul(sum_l, sum_l));
        F scale = quotient(fsub(fmul(total, sum_xl), fmul(sum_x, sum_l)), det);
        F offset = quotient(fsub(fmul(sum_ll, sum_x), fmul(sum_l, sum_xl)), det);
        if (r.negative) {
            scale = pick(less(fzero(), offset), quotient(sum_xl, sum_ll), scale);
            offset = fmin(offset, fzero());
        }
        F error = fzero();
        for (int64_t k = 0; k < end; k += 16) {
            const F off = fsub(fma(fload(t.code + k), scale, offset), fload(t.x + k));
            error = fma(fmul(fload(t.w + k), off), off, error);
        }
        error = fmin(error, fset1(HUGE_ERROR));  // NaN too
        const I better = iand(less(error, best), less(fzero(), scale));
        best = pick(better, error, best);
        best_scale = pick(better, scale, best_scale);
        best_low = pick(better, offset, best_low);
    }
    *lowest = best_low;
    return best_scale;
}

}  // namespace

void fit_scales(const FitRun& r, int64_t g0, int64_t g1) {
    Turned t;
    for (int64_t g = g0; g < g1; g += 16) {
        const int64_t count = g1 - g < 16 ? g1 - g : 16;
        turn_groups(r, g, count, t);
        F low = fzero();
        store_part(r.scales + g, count, r.lows ? fit_affine(r, t, &low) : fit_symmetric(r, t));
        if (r.lows) store_part(r.lows + g, count, low);
    }
}

}  // namespace TK_ISA
}  // namespace tk
