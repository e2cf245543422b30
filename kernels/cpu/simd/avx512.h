// The vector layer (simd.h) with AVX-512: F, VNNI and BF16.
#pragma once

#include <immintrin.h>

#include "simd/base.h"

namespace tk {
namespace TK_ISA {
namespace {

typedef __m512 F;
typedef __m512i I;
typedef __m512i B;

TK_INLINE F fzero() { return _mm512_setzero_ps(); }
TK_INLINE F fset1(float x) { return _mm512_set1_ps(x); }
TK_INLINE F fload(const float* p) { return _mm512_loadu_ps(p); }
TK_INLINE void fstore(float* p, F x) { _mm512_storeu_ps(p, x); }
TK_INLINE F fadd(F a, F b) { return _mm512_add_ps(a, b); }
TK_INLINE F fsub(F a, F b) { return _mm512_sub_ps(a, b); }
TK_INLINE F fmul(F a, F b) { return _mm512_mul_ps(a, b); }
TK_INLINE F fdiv(F a, F b) { return _mm512_div_ps(a, b); }
TK_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
TK_INLINE F fmax(F a, F b) { return _mm512_max_ps(a, b); }
TK_INLINE F fmin(F a, F b) { return _mm512_min_ps(a, b); }
TK_INLINE F fabs(F a) { return _mm512_abs_ps(a); }
// Each lane gets that of which the number differs by H, a power of two.
template <int H>
TK_INLINE F fswap(F a) {
    if (H < 4) return _mm512_permute_ps(a, H == 1 ? 0xb1 : 0x4e);
    return _mm512_shuffle_f32x4(a, a, H == 4 ? 0xb1 : 0x4e);
}
TK_INLINE F f_of(I a) { return _mm512_cvtepi32_ps(a); }
TK_INLINE I i_of(F a) { return _mm512_cvtps_epi32(a); }
TK_INLINE F as_f(I a) { return _mm512_castsi512_ps(a); }
TK_INLINE I as_i(F a) { return _mm512_castps_si512(a); }
TK_INLINE I izero() { return _mm512_setzero_si512(); }
TK_INLINE I iset1(int32_t x) { return _mm512_set1_epi32(x); }
TK_INLINE I iload(const int32_t* p) { return _mm512_loadu_si512(p); }
TK_INLINE void istore(int32_t* p, I x) { _mm512_storeu_si512(p, x); }
TK_INLINE I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
TK_INLINE I isub(I a, I b) { return _mm512_sub_epi32(a, b); }
TK_INLINE I imul(I a, I b) { return _mm512_mullo_epi32(a, b); }
TK_INLINE I imax(I a, I b) { return _mm512_max_epi32(a, b); }
TK_INLINE I ishl(I a, int n) { return _mm512_slli_epi32(a, n); }
TK_INLINE I ishr(I a, int n) { return _mm512_srli_epi32(a, n); }
TK_INLINE I ior(I a, I b) { return _mm512_or_si512(a, b); }
TK_INLINE I iand(I a, I b) { return _mm512_and_si512(a, b); }
TK_INLINE F load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
TK_INLINE void load_f16_pairs(const void* p, F* even, F* odd) {  // e0 o0 e1 o1 …
    const I x = _mm512_loadu_si512(p);
    *even = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(x));
    *odd = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(x, 16)));
}
TK_INLINE F load_bf16(const uint16_t* p) {
    return as_f(ishl(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
TK_INLINE void store_f16(uint16_t* p, F x) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, 0)); }
#define TK_STORES_BF16
TK_INLINE void store_bf16(uint16_t* p, F x) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x)); }
TK_INLINE I load_u8(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
TK_INLINE void store_s8(int8_t* p, I x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(x)); }
TK_INLINE B bload(const void* p) { return _mm512_loadu_si512(p); }
TK_INLINE void bstore(void* p, B x) { _mm512_storeu_si512(p, x); }
TK_INLINE B bset4(const void* p) {
    int32_t v;
    memcpy(&v, p, 4);
    return _mm512_set1_epi32(v);
}
TK_INLINE B low_nibbles(B x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
TK_INLINE B high_nibbles(B x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15)); }
TK_INLINE B badd(B a, B b) { return _mm512_add_epi8(a, b); }
// acc[lane] += sum of 4 products u8 * s8, exact
// (written as assembly: g++ 12 copies the accumulators of its intrinsic around and spills them)
TK_INLINE I dot4(I acc, B u, B s) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(u), "v"(s));
    return acc;
}
#define TK_BF16_DOT
#define TK_READS_CODES
// acc[lane] += products of two pairs of bfloat16
TK_INLINE F dot_bf16(F acc, B a, B b) {
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
    return acc;
}
TK_INLINE I load_u16(const uint16_t* p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)); }
// lane i: 16-bit items i and 16 + i
TK_INLINE B zip_halves(B x) {
    const I lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return _mm512_permutexvar_epi16(ior(lane, ishl(iadd(lane, iset1(16)), 16)), x);
}
TK_INLINE float hsum(F x) {
    __m256 a = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
TK_INLINE float hmax(F x) { return _mm512_reduce_max_ps(x); }
TK_INLINE int32_t hsum(I x) { return _mm512_reduce_add_epi32(x); }
TK_INLINE int32_t hmax(I x) { return _mm512_reduce_max_epi32(x); }
// lanes whose index lies in [lo, hi) keep x, the others take y
TK_INLINE F keep_lanes(F x, int lo, int hi, F y) {
    uint32_t h = hi >= 16 ? 0xffffu : hi <= 0 ? 0u : (1u << hi) - 1u;
    uint32_t l = lo >= 16 ? 0xffffu : lo <= 0 ? 0u : (1u << lo) - 1u;
    return _mm512_mask_blend_ps(__mmask16(h & ~l), y, x);
}

}  // namespace
}  // namespace TK_ISA
}  // namespace tk
