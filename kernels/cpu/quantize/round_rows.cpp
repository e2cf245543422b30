// Weights to integers in groups, as they are read. See RoundRun; the same numbers as to_group_int of toolkit/artifacts/rounding.py.
#include "ops_isa.h"

namespace tk {
namespace TK_ISA {
namespace {

TK_INLINE F between(float low, float high, F x) { return fmin(fset1(high), fmax(fset1(low), x)); }
TK_INLINE F nearest(F x) { return f_of(i_of(x)); }

TK_INLINE void store_codes(uint8_t* to, F x) {
    int32_t v[16];
    istore(v, i_of(x));
    for (int i = 0; i < 16; i++) to[i] = uint8_t(v[i]);
}

// x = w * columns / divisor of one row
void floats_of(const RoundRun& r, int64_t row, float* x) {
    const F divisor = fset1(r.divisors ? r.divisors[row] : 1.0f);
    for (int64_t k = 0; k < r.cols; k += 16) {
        F v = load_as(r.w, r.dtype, row * r.cols + k);
        if (r.columns) v = fmul(v, fload(r.columns + k));
        fstore(x + k, r.divisors ? fdiv(v, divisor) : v);
    }
}

// What rounding w to `value`, in columns k and on, adds to the row's error.
TK_INLINE F error_of(const RoundRun& r, int64_t row, int64_t k, F value) {
    if (r.columns) value = fdiv(value, fload(r.columns + k));
    const F off = fsub(value, load_as(r.w, r.dtype, row * r.cols + k));
    return fmul(fmul(off, off), fload(r.sizes + k));
}

// Columns k0 and on of x, which is `row`; returns their error, by lanes.
F round_group(const RoundRun& r, int64_t row, int64_t k0, const float* x) {
    const int64_t at = row * r.cols + k0;
    uint8_t* const codes = r.codes + at;
    uint16_t* const scale = r.scales + at / r.group;
    x += k0;
    F low = fzero(), high = fzero(), odd = fzero();
    for (int64_t k = 0; k < r.group; k += 16) {
        const F v = fload(x + k);
        low = fmin(low, v);
        high = fmax(high, v);
        odd = fma(v, fzero(), odd);  // NaN where one is not finite
    }
    const float bottom = -hmax(fsub(fzero(), low)), top = hmax(high);
    float size = r.bits == 8 ? (top > -bottom ? top : -bottom) / 127.0f : (top - bottom) / 15.0f;
    if (hsum(odd) != 0.0f)  // fmin and fmax give their second operand for NaN: the next number hides it
        for (int64_t k = 0; k < r.group; k++) size = x[k] == x[k] ? size : x[k];
    *scale = float_to_f16(size);
    const float held = f16_to_float(*scale), step = held > 0x1p-24f ? held : 0x1p-24f;
    float zero = 128.0f;
    F error = fzero();
    if (r.bits == 4) {
        zero = nearbyintf(-bottom / step);
        zero = zero < 15.0f ? zero : 15.0f;
        r.zeros[at / r.group] = uint8_t(zero);
    }
    for (int64_t k = 0; k < r.group; k += 16) {
        F code = nearest(fdiv(fload(x + k), fset1(step)));
        code = r.bits == 8 ? fadd(between(-127.0f, 127.0f, code), fset1(zero)) : between(0.0f, 15.0f, fadd(code, fset1(zero)));
        store_codes(codes + k, code);
        if (r.sizes) error = fadd(error, error_of(r, row, k0 + k, fmul(fsub(code, fset1(zero)), fset1(held))));
    }
    return error;
}

}  // namespace

void round_rows(const RoundRun& r, int64_t r0, int64_t r1, float* scratch) {
    for (int64_t row = r0; row < r1; row++) {
        floats_of(r, row, scratch);
        if (r.turned) hadamard(scratch, r.cols);
        F error = fzero();
        for (int64_t k = 0; k < r.cols; k += r.group) error = fadd(error, round_group(r, row, k, scratch));
        if (r.sizes) r.errors[row] = hsum(error);
    }
}

void squares(const SquaresRun& r, int64_t r0, int64_t r1) {
    for (int64_t row = r0; row < r1; row++) {
        F sum = fzero();
        for (int64_t k = 0; k < r.cols; k += 16) {
            const F w = load_as(r.w, r.dtype, row * r.cols + k);
            sum = fma(r.sizes ? fmul(w, fload(r.sizes + k)) : w, w, sum);
        }
        r.out[row] = hsum(sum);
    }
}

}  // namespace TK_ISA
}  // namespace tk
