// One vector layer for every instruction set: a tile of 16 lanes.
//
// Files that include this header are compiled once per instruction set with -DTK_ISA=<name> and that set's flags, so
// everything here has internal linkage and no standard library template is used (the linker would merge
// instantiations made for different machines). Fused multiply-add is written out and -ffp-contract=off keeps the
// compiler from forming others: every regime of a kernel must run the same float operations.
//
//   F   16 floats          I   16 int32          B   64 bytes (16 groups of 4)
//
// Every instruction set has the same functions, in a file of its own, and says what is special about it:
//   TK_BF16_DOT    it multiplies bfloat16: dot_bf16, zip_halves, load_u16
//   TK_READS_CODES attention multiplies the cache's codes as integers (attention/kv_codes.cpp)
//   TK_CENTRED     dot4 takes unsigned bytes below 128 alone; others are first made Centred, which takes 128 off each
//   TK_SHORT_SUMS  products of small bytes may be added in 16 bits: hdot, widen
#pragma once

#if defined(__AVX512F__)
#include "simd/avx512.h"
#elif defined(__AVX2__)
#include "simd/avx2.h"
#elif defined(TK_NEON)
#include "simd/neon.h"
#else
#include "simd/generic.h"
#endif

namespace tk {
namespace TK_ISA {
namespace {

// float to bf16, round to nearest even, as 16 int32 lanes with the value in the low half (NaN not kept)
TK_INLINE I bf16_bits(F x) {
    const I b = as_i(x), odd = iand(ishr(b, 16), iset1(1));
    return ishr(iadd(iadd(b, iset1(0x7fff)), odd), 16);
}

// Of 32 bfloat16 a0 b0 a1 b1 … the 16 a (0) or b (1).
template <int WHICH>
TK_INLINE F load_half(const void* p) {
    const I x = bload(p);
    return as_f(WHICH ? iand(x, iset1(int32_t(0xffff0000u))) : ishl(x, 16));
}

#if !defined(TK_STORES_BF16)
TK_INLINE void store_bf16(uint16_t* p, F x) {
    float v[16];
    fstore(v, x);
    for (int i = 0; i < 16; i++) p[i] = float_to_bf16(v[i]);
}
#endif

// e^x: 2^n * p(r), |r| <= ln2/2, degree 6; relative error below 2e-7. Below -87.7 it is 0, above 88 it stops growing.
// NaN stays NaN: the constants stand first because fmin and fmax return their second operand for it.
TK_INLINE F fexp(F x) {
    x = fmin(fset1(88.0f), fmax(fset1(-88.0f), x));
    const I n = i_of(fmul(x, fset1(1.44269504088896341f)));
    const F nf = f_of(n);
    F r = fma(nf, fset1(-0.693359375f), x);
    r = fma(nf, fset1(2.12194440e-4f), r);
    F p = fset1(1.9875691500e-4f);
    p = fma(p, r, fset1(1.3981999507e-3f));
    p = fma(p, r, fset1(8.3334519073e-3f));
    p = fma(p, r, fset1(4.1665795894e-2f));
    p = fma(p, r, fset1(1.6666665459e-1f));
    p = fma(p, r, fset1(5.0000001201e-1f));
    p = fma(fmul(p, r), r, fadd(r, fset1(1.0f)));
    return fmul(p, as_f(ishl(iadd(n, iset1(127)), 23)));
}

TK_INLINE F fsigmoid(F x) { return fdiv(fset1(1.0f), fadd(fset1(1.0f), fexp(fsub(fzero(), x)))); }

// Within 2e-7. Abramowitz & Stegun, "Handbook of Mathematical Functions" (1964), 7.1.26.
TK_INLINE F ferf(F x) {
    const F a = fabs(x), t = fdiv(fset1(1.0f), fma(a, fset1(0.3275911f), fset1(1.0f)));
    F p = fma(fset1(1.061405429f), t, fset1(-1.453152027f));
    p = fma(p, t, fset1(1.421413741f));
    p = fma(p, t, fset1(-0.284496736f));
    p = fma(p, t, fset1(0.254829592f));
    const F y = fsub(fset1(1.0f), fmul(fmul(p, t), fexp(fsub(fzero(), fmul(a, a)))));
    return as_f(ior(as_i(y), iand(as_i(x), iset1(int32_t(0x80000000u)))));
}

TK_INLINE F ftanh(F x) {
    const F e = fexp(fadd(x, x));
    return fsub(fset1(1.0f), fdiv(fset1(2.0f), fadd(e, fset1(1.0f))));
}

}  // namespace
}  // namespace TK_ISA
}  // namespace tk

