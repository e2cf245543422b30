// The vector layer (simd.h) in plain C++: the reference.
#pragma once

#include "simd/base.h"

namespace tk {
namespace TK_ISA {
namespace {

struct F { float v[16]; };
struct I { int32_t v[16]; };
typedef I B;

#define TK_LANES(type, expr)                   \
    type r;                                    \
    for (int i = 0; i < 16; i++) r.v[i] = expr; \
    return r
TK_INLINE F fset1(float x) { TK_LANES(F, x); }
TK_INLINE F fzero() { return fset1(0.0f); }
TK_INLINE F fload(const float* p) { TK_LANES(F, p[i]); }
TK_INLINE void fstore(float* p, F x) { memcpy(p, x.v, 64); }
TK_INLINE F fadd(F x, F y) { TK_LANES(F, x.v[i] + y.v[i]); }
TK_INLINE F fsub(F x, F y) { TK_LANES(F, x.v[i] - y.v[i]); }
TK_INLINE F fmul(F x, F y) { TK_LANES(F, x.v[i] * y.v[i]); }
TK_INLINE F fdiv(F x, F y) { TK_LANES(F, x.v[i] / y.v[i]); }
TK_INLINE F fma(F x, F y, F z) { TK_LANES(F, x.v[i] * y.v[i] + z.v[i]); }
TK_INLINE F fmax(F x, F y) { TK_LANES(F, x.v[i] > y.v[i] ? x.v[i] : y.v[i]); }
TK_INLINE F fmin(F x, F y) { TK_LANES(F, x.v[i] < y.v[i] ? x.v[i] : y.v[i]); }
TK_INLINE F fabs(F x) { TK_LANES(F, fabsf(x.v[i])); }
template <int H>
TK_INLINE F fswap(F x) { TK_LANES(F, x.v[i ^ H]); }  // see simd/avx512.h
TK_INLINE F f_of(I x) { TK_LANES(F, float(x.v[i])); }
// out of range and NaN become INT_MIN, as on x86 vector units
TK_INLINE int32_t int_of(float f) { return f >= -2147483648.0f && f < 2147483648.0f ? int32_t(nearbyintf(f)) : INT32_MIN; }
TK_INLINE I i_of(F x) { TK_LANES(I, int_of(x.v[i])); }
TK_INLINE F as_f(I x) { F r; memcpy(&r, &x, 64); return r; }
TK_INLINE I as_i(F x) { I r; memcpy(&r, &x, 64); return r; }
TK_INLINE I iset1(int32_t x) { TK_LANES(I, x); }
TK_INLINE I izero() { return iset1(0); }
TK_INLINE I iload(const int32_t* p) { I r; memcpy(&r, p, 64); return r; }
TK_INLINE void istore(int32_t* p, I x) { memcpy(p, x.v, 64); }
// unsigned arithmetic: wraps like the vector units do
TK_INLINE I iadd(I x, I y) { TK_LANES(I, int32_t(uint32_t(x.v[i]) + uint32_t(y.v[i]))); }
TK_INLINE I isub(I x, I y) { TK_LANES(I, int32_t(uint32_t(x.v[i]) - uint32_t(y.v[i]))); }
TK_INLINE I imul(I x, I y) { TK_LANES(I, int32_t(uint32_t(x.v[i]) * uint32_t(y.v[i]))); }
TK_INLINE I imax(I x, I y) { TK_LANES(I, x.v[i] > y.v[i] ? x.v[i] : y.v[i]); }
TK_INLINE I ishl(I x, int n) { TK_LANES(I, int32_t(uint32_t(x.v[i]) << n)); }
TK_INLINE I ishr(I x, int n) { TK_LANES(I, int32_t(uint32_t(x.v[i]) >> n)); }
TK_INLINE I ior(I x, I y) { TK_LANES(I, x.v[i] | y.v[i]); }
TK_INLINE I iand(I x, I y) { TK_LANES(I, x.v[i] & y.v[i]); }
TK_INLINE F load_f16(const uint16_t* p) { TK_LANES(F, f16_to_float(p[i])); }
TK_INLINE void load_f16_pairs(const void* p, F* even, F* odd) {  // e0 o0 e1 o1 …
    uint16_t h[32];
    memcpy(h, p, 64);
    for (int i = 0; i < 16; i++) even->v[i] = f16_to_float(h[2 * i]), odd->v[i] = f16_to_float(h[2 * i + 1]);
}
TK_INLINE F load_bf16(const uint16_t* p) { TK_LANES(F, bf16_to_float(p[i])); }
TK_INLINE void store_f16(uint16_t* p, F x) { for (int i = 0; i < 16; i++) p[i] = float_to_f16(x.v[i]); }
TK_INLINE I load_u8(const uint8_t* p) { TK_LANES(I, p[i]); }
TK_INLINE void store_s8(int8_t* p, I x) {
    for (int i = 0; i < 16; i++) p[i] = int8_t(x.v[i] < -128 ? -128 : x.v[i] > 127 ? 127 : x.v[i]);
}
TK_INLINE B bload(const void* p) { B r; memcpy(&r, p, 64); return r; }
TK_INLINE void bstore(void* p, B x) { memcpy(p, &x, 64); }
TK_INLINE B bset4(const void* p) { int32_t v; memcpy(&v, p, 4); return iset1(v); }
TK_INLINE B low_nibbles(B x) { return iand(x, iset1(0x0f0f0f0f)); }
TK_INLINE B high_nibbles(B x) { TK_LANES(B, int32_t((uint32_t(x.v[i]) >> 4) & 0x0f0f0f0fu)); }
TK_INLINE B badd(B x, B y) {
    uint8_t a[64], b[64];
    memcpy(a, &x, 64);
    memcpy(b, &y, 64);
    for (int i = 0; i < 64; i++) a[i] = uint8_t(a[i] + b[i]);
    return bload(a);
}
TK_INLINE I dot4(I acc, B u, B s) {
    uint8_t a[64];
    int8_t b[64];
    memcpy(a, &u, 64);
    memcpy(b, &s, 64);
    for (int i = 0; i < 16; i++) {
        int32_t d = 0;
        for (int j = 0; j < 4; j++) d += int32_t(a[4 * i + j]) * b[4 * i + j];
        acc.v[i] = int32_t(uint32_t(acc.v[i]) + uint32_t(d));
    }
    return acc;
}
TK_INLINE float hsum(F x) {
    for (int n = 8; n > 0; n /= 2)
        for (int i = 0; i < n; i++) x.v[i] += x.v[i + n];
    return x.v[0];
}
TK_INLINE float hmax(F x) {
    float m = x.v[0];
    for (int i = 1; i < 16; i++) m = x.v[i] > m ? x.v[i] : m;
    return m;
}
TK_INLINE int32_t hsum(I x) {
    uint32_t s = 0;
    for (int i = 0; i < 16; i++) s += uint32_t(x.v[i]);
    return int32_t(s);
}
TK_INLINE int32_t hmax(I x) {
    int32_t m = x.v[0];
    for (int i = 1; i < 16; i++) m = x.v[i] > m ? x.v[i] : m;
    return m;
}
TK_INLINE F keep_lanes(F x, int lo, int hi, F y) { TK_LANES(F, i >= lo && i < hi ? x.v[i] : y.v[i]); }
#undef TK_LANES

}  // namespace
}  // namespace TK_ISA
}  // namespace tk
