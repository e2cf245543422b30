// The vector layer (simd.h) with NEON, and with the dot products of later ARM processors where they are there: of signed
// bytes (dotprod), of unsigned by signed ones (i8mm), of bfloat16 (bf16).
#pragma once

#include <arm_neon.h>

#include "simd/base.h"

namespace tk {
namespace TK_ISA {
namespace {

struct F { float32x4_t a, b, c, d; };
struct I { int32x4_t a, b, c, d; };
typedef I B;

#define TK_MAP1(f, x) {f((x).a), f((x).b), f((x).c), f((x).d)}
#define TK_MAP2(f, x, y) {f((x).a, (y).a), f((x).b, (y).b), f((x).c, (y).c), f((x).d, (y).d)}
#define TK_MAP3(f, x, y, z) {f((x).a, (y).a, (z).a), f((x).b, (y).b, (z).b), f((x).c, (y).c, (z).c), f((x).d, (y).d, (z).d)}
#define TK_SAME(value) {value, value, value, value}

// the first operand where it is greater (less), else the second: NaN as on other processors
TK_INLINE float32x4_t greater_or(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
TK_INLINE float32x4_t less_or(float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(x, y), x, y); }
// to nearest even; out of range and NaN become INT_MIN, as on other processors
TK_INLINE int32x4_t rounded(float32x4_t x) {
    return vbslq_s32(vcaltq_f32(x, vdupq_n_f32(2147483648.0f)), vcvtnq_s32_f32(x), vdupq_n_s32(INT32_MIN));
}

TK_INLINE F fset1(float x) { return TK_SAME(vdupq_n_f32(x)); }
TK_INLINE F fzero() { return fset1(0.0f); }
TK_INLINE F fload(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
TK_INLINE void fstore(float* p, F x) {
    vst1q_f32(p, x.a);
    vst1q_f32(p + 4, x.b);
    vst1q_f32(p + 8, x.c);
    vst1q_f32(p + 12, x.d);
}
TK_INLINE F fadd(F x, F y) { return TK_MAP2(vaddq_f32, x, y); }
TK_INLINE F fsub(F x, F y) { return TK_MAP2(vsubq_f32, x, y); }
TK_INLINE F fmul(F x, F y) { return TK_MAP2(vmulq_f32, x, y); }
TK_INLINE F fdiv(F x, F y) { return TK_MAP2(vdivq_f32, x, y); }
TK_INLINE F fma(F x, F y, F z) { return TK_MAP3(vfmaq_f32, z, x, y); }
TK_INLINE F fmax(F x, F y) { return TK_MAP2(greater_or, x, y); }
TK_INLINE F fmin(F x, F y) { return TK_MAP2(less_or, x, y); }
TK_INLINE F fabs(F x) { return TK_MAP1(vabsq_f32, x); }
TK_INLINE float32x4_t halves_swapped(float32x4_t x) { return vextq_f32(x, x, 2); }
template <int H>
TK_INLINE F fswap(F x) {  // see simd/avx512.h
    if (H == 8) return {x.c, x.d, x.a, x.b};
    if (H == 4) return {x.b, x.a, x.d, x.c};
    if (H == 2) return TK_MAP1(halves_swapped, x);
    return TK_MAP1(vrev64q_f32, x);
}
TK_INLINE F as_f(I x) { return TK_MAP1(vreinterpretq_f32_s32, x); }
TK_INLINE I as_i(F x) { return TK_MAP1(vreinterpretq_s32_f32, x); }
TK_INLINE F f_of(I x) { return TK_MAP1(vcvtq_f32_s32, x); }
TK_INLINE I i_of(F x) { return TK_MAP1(rounded, x); }
TK_INLINE I iset1(int32_t x) { return TK_SAME(vdupq_n_s32(x)); }
TK_INLINE I izero() { return iset1(0); }
TK_INLINE I iload(const int32_t* p) { return {vld1q_s32(p), vld1q_s32(p + 4), vld1q_s32(p + 8), vld1q_s32(p + 12)}; }
TK_INLINE void istore(int32_t* p, I x) {
    vst1q_s32(p, x.a);
    vst1q_s32(p + 4, x.b);
    vst1q_s32(p + 8, x.c);
    vst1q_s32(p + 12, x.d);
}
TK_INLINE I iadd(I x, I y) { return TK_MAP2(vaddq_s32, x, y); }
TK_INLINE I isub(I x, I y) { return TK_MAP2(vsubq_s32, x, y); }
TK_INLINE I imul(I x, I y) { return TK_MAP2(vmulq_s32, x, y); }
TK_INLINE I imax(I x, I y) { return TK_MAP2(vmaxq_s32, x, y); }
TK_INLINE I ishl(I x, int n) { return TK_MAP2(vshlq_s32, x, iset1(n)); }
TK_INLINE int32x4_t shifted(int32x4_t x, int32x4_t n) { return vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(x), n)); }
TK_INLINE I ishr(I x, int n) { return TK_MAP2(shifted, x, iset1(-n)); }
TK_INLINE I ior(I x, I y) { return TK_MAP2(vorrq_s32, x, y); }
TK_INLINE I iand(I x, I y) { return TK_MAP2(vandq_s32, x, y); }

TK_INLINE float32x4_t four_f16(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
TK_INLINE F load_f16(const uint16_t* p) { return {four_f16(p), four_f16(p + 4), four_f16(p + 8), four_f16(p + 12)}; }
TK_INLINE void load_f16_pairs(const void* p, F* even, F* odd) {  // e0 o0 e1 o1 …
    uint16_t e[16], o[16];
    for (int i = 0; i < 16; i += 8) {
        const uint16x8x2_t x = vld2q_u16((const uint16_t*)p + 2 * i);
        vst1q_u16(e + i, x.val[0]);
        vst1q_u16(o + i, x.val[1]);
    }
    *even = load_f16(e);
    *odd = load_f16(o);
}
TK_INLINE float32x4_t four_bf16(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
TK_INLINE F load_bf16(const uint16_t* p) { return {four_bf16(p), four_bf16(p + 4), four_bf16(p + 8), four_bf16(p + 12)}; }
TK_INLINE uint16x8_t eight_f16(float32x4_t x, float32x4_t y) {
    return vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(x), y));
}
TK_INLINE void store_f16(uint16_t* p, F x) {
    vst1q_u16(p, eight_f16(x.a, x.b));
    vst1q_u16(p + 8, eight_f16(x.c, x.d));
}
#define TK_STORES_BF16
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
TK_INLINE uint16x8_t eight_bf16(float32x4_t x, float32x4_t y) {
    return vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(x), y));
}
#else
TK_INLINE uint32x4_t near_bf16(float32x4_t x) {  // in the high half
    const uint32x4_t u = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
    const uint32x4_t near = vaddq_u32(vaddq_u32(u, vdupq_n_u32(0x7fff)), odd);
    return vbslq_u32(vceqq_f32(x, x), near, vorrq_u32(u, vdupq_n_u32(0x400000)));
}
TK_INLINE uint16x8_t eight_bf16(float32x4_t x, float32x4_t y) {
    return vshrn_high_n_u32(vshrn_n_u32(near_bf16(x), 16), near_bf16(y), 16);
}
#endif
TK_INLINE void store_bf16(uint16_t* p, F x) {
    vst1q_u16(p, eight_bf16(x.a, x.b));
    vst1q_u16(p + 8, eight_bf16(x.c, x.d));
}

TK_INLINE int32x4_t low_u16(uint16x8_t x) { return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(x))); }
TK_INLINE int32x4_t high_u16(uint16x8_t x) { return vreinterpretq_s32_u32(vmovl_high_u16(x)); }
TK_INLINE I load_u8(const uint8_t* p) {
    const uint8x16_t x = vld1q_u8(p);
    const uint16x8_t low = vmovl_u8(vget_low_u8(x)), high = vmovl_high_u8(x);
    return {low_u16(low), high_u16(low), low_u16(high), high_u16(high)};
}
TK_INLINE void store_s8(int8_t* p, I x) {
    const int16x8_t low = vqmovn_high_s32(vqmovn_s32(x.a), x.b), high = vqmovn_high_s32(vqmovn_s32(x.c), x.d);
    vst1q_s8(p, vqmovn_high_s16(vqmovn_s16(low), high));
}

TK_INLINE uint8x16_t as_u8(int32x4_t x) { return vreinterpretq_u8_s32(x); }
TK_INLINE int8x16_t as_s8(int32x4_t x) { return vreinterpretq_s8_s32(x); }
TK_INLINE int32x4_t of_u8(uint8x16_t x) { return vreinterpretq_s32_u8(x); }
TK_INLINE B bload(const void* p) {
    const uint8_t* b = (const uint8_t*)p;
    return {of_u8(vld1q_u8(b)), of_u8(vld1q_u8(b + 16)), of_u8(vld1q_u8(b + 32)), of_u8(vld1q_u8(b + 48))};
}
TK_INLINE void bstore(void* p, B x) {
    uint8_t* b = (uint8_t*)p;
    vst1q_u8(b, as_u8(x.a));
    vst1q_u8(b + 16, as_u8(x.b));
    vst1q_u8(b + 32, as_u8(x.c));
    vst1q_u8(b + 48, as_u8(x.d));
}
TK_INLINE B bset4(const void* p) {
    int32_t v;
    memcpy(&v, p, 4);
    return iset1(v);
}
TK_INLINE B low_nibbles(B x) { return iand(x, iset1(0x0f0f0f0f)); }
TK_INLINE int32x4_t upper(int32x4_t x) { return of_u8(vshrq_n_u8(as_u8(x), 4)); }
TK_INLINE B high_nibbles(B x) { return TK_MAP1(upper, x); }
TK_INLINE int32x4_t sum_u8(int32x4_t x, int32x4_t y) { return of_u8(vaddq_u8(as_u8(x), as_u8(y))); }
TK_INLINE B badd(B x, B y) { return TK_MAP2(sum_u8, x, y); }

#if defined(__ARM_FEATURE_MATMUL_INT8)
TK_INLINE int32x4_t dot4(int32x4_t acc, int32x4_t u, int32x4_t s) { return vusdotq_s32(acc, as_u8(u), as_s8(s)); }
#else
#define TK_CENTRED
#if defined(__ARM_FEATURE_DOTPROD)
TK_INLINE int32x4_t dot4(int32x4_t acc, int32x4_t u, int32x4_t s) { return vdotq_s32(acc, as_s8(u), as_s8(s)); }
#else
TK_INLINE int32x4_t dot4(int32x4_t acc, int32x4_t u, int32x4_t s) {  // two products fit 16 bits: 2 * 128 * 127
    const int16x8_t low = vmull_s8(vget_low_s8(as_s8(u)), vget_low_s8(as_s8(s))), high = vmull_high_s8(as_s8(u), as_s8(s));
    return vpadalq_s16(acc, vpaddq_s16(low, high));
}
#endif
#endif
// acc[lane] += sum of 4 products u8 * s8, exact; |s| <= 127
TK_INLINE I dot4(I acc, B u, B s) { return TK_MAP3(dot4, acc, u, s); }
#if defined(TK_CENTRED)
struct Centred { B bytes; };
TK_INLINE int32x4_t flipped(int32x4_t x) { return veorq_s32(x, vdupq_n_s32(int32_t(0x80808080u))); }
TK_INLINE Centred centred(B u) { return {TK_MAP1(flipped, u)}; }
TK_INLINE I dot4(I acc, Centred u, B s) { return TK_MAP3(dot4, acc, u.bytes, s); }
#endif

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define TK_BF16_DOT
// acc[lane] += products of two pairs of bfloat16, summed before they are added
TK_INLINE float32x4_t dot_bf16(float32x4_t acc, int32x4_t x, int32x4_t y) {
    return vbfdotq_f32(acc, vreinterpretq_bf16_s32(x), vreinterpretq_bf16_s32(y));
}
TK_INLINE F dot_bf16(F acc, B x, B y) { return TK_MAP3(dot_bf16, acc, x, y); }
TK_INLINE I load_u16(const uint16_t* p) {
    const uint16x8_t low = vld1q_u16(p), high = vld1q_u16(p + 8);
    return {low_u16(low), high_u16(low), low_u16(high), high_u16(high)};
}
TK_INLINE int32x4_t zip_low(int32x4_t x, int32x4_t y) {
    return vreinterpretq_s32_s16(vzip1q_s16(vreinterpretq_s16_s32(x), vreinterpretq_s16_s32(y)));
}
TK_INLINE int32x4_t zip_high(int32x4_t x, int32x4_t y) {
    return vreinterpretq_s32_s16(vzip2q_s16(vreinterpretq_s16_s32(x), vreinterpretq_s16_s32(y)));
}
// lane i: 16-bit items i and 16 + i
TK_INLINE B zip_halves(B x) { return {zip_low(x.a, x.c), zip_high(x.a, x.c), zip_low(x.b, x.d), zip_high(x.b, x.d)}; }
#endif

TK_INLINE float hsum(F x) {
    const float32x4_t sum = vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d));
    return vpadds_f32(vadd_f32(vget_low_f32(sum), vget_high_f32(sum)));
}
TK_INLINE float hmax(F x) { return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.a, x.c), vmaxq_f32(x.b, x.d))); }
TK_INLINE int32_t hsum(I x) { return vaddvq_s32(vaddq_s32(vaddq_s32(x.a, x.c), vaddq_s32(x.b, x.d))); }
TK_INLINE int32_t hmax(I x) { return vmaxvq_s32(vmaxq_s32(vmaxq_s32(x.a, x.c), vmaxq_s32(x.b, x.d))); }
TK_INLINE float32x4_t keep_lanes(float32x4_t x, int32x4_t lane, int lo, int hi, float32x4_t y) {
    return vbslq_f32(vandq_u32(vcgeq_s32(lane, vdupq_n_s32(lo)), vcltq_s32(lane, vdupq_n_s32(hi))), x, y);
}
TK_INLINE F keep_lanes(F x, int lo, int hi, F y) {
    const int32x4_t lane = {0, 1, 2, 3};
    return {keep_lanes(x.a, lane, lo, hi, y.a), keep_lanes(x.b, lane, lo - 4, hi - 4, y.b),
            keep_lanes(x.c, lane, lo - 8, hi - 8, y.c), keep_lanes(x.d, lane, lo - 12, hi - 12, y.d)};
}
#undef TK_MAP1
#undef TK_MAP2
#undef TK_MAP3
#undef TK_SAME

}  // namespace
}  // namespace TK_ISA
}  // namespace tk
