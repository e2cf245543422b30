// The vector layer (simd.h) with AVX2, and with AVX-VNNI where it is there.
#pragma once

#include <immintrin.h>

#include "simd/base.h"

namespace tk {
namespace TK_ISA {
namespace {

struct F { __m256 a, b; };
struct I { __m256i a, b; };
typedef I B;

TK_INLINE F fzero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
TK_INLINE F fset1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
TK_INLINE F fload(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
TK_INLINE void fstore(float* p, F x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
TK_INLINE F fadd(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
TK_INLINE F fsub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
TK_INLINE F fmul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
TK_INLINE F fdiv(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
TK_INLINE F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
// z - x y
TK_INLINE F fnma(F x, F y, F z) { return {_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)}; }
TK_INLINE F fmax(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
TK_INLINE F fmin(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
template <int H>
TK_INLINE F fswap(F x) {  // see simd/avx512.h
    if (H == 8) return {x.b, x.a};
    if (H == 4) return {_mm256_permute2f128_ps(x.a, x.a, 1), _mm256_permute2f128_ps(x.b, x.b, 1)};
    return {_mm256_permute_ps(x.a, H == 1 ? 0xb1 : 0x4e), _mm256_permute_ps(x.b, H == 1 ? 0xb1 : 0x4e)};
}
TK_INLINE F as_f(I x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
TK_INLINE I as_i(F x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
TK_INLINE F f_of(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
TK_INLINE I i_of(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
TK_INLINE I izero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
TK_INLINE I iset1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
TK_INLINE I iload(const int32_t* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 8))};
}
TK_INLINE void istore(int32_t* p, I x) {
    _mm256_storeu_si256((__m256i*)p, x.a);
    _mm256_storeu_si256((__m256i*)(p + 8), x.b);
}
TK_INLINE I iadd(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
TK_INLINE I isub(I x, I y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
TK_INLINE I imul(I x, I y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
TK_INLINE I imax(I x, I y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
TK_INLINE I ishl(I x, int n) { return {_mm256_slli_epi32(x.a, n), _mm256_slli_epi32(x.b, n)}; }
TK_INLINE I ishr(I x, int n) { return {_mm256_srli_epi32(x.a, n), _mm256_srli_epi32(x.b, n)}; }
TK_INLINE I ior(I x, I y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
TK_INLINE I iand(I x, I y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
TK_INLINE F fabs(F x) { return as_f(iand(as_i(x), iset1(0x7fffffff))); }
TK_INLINE F load_f16(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
            _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
TK_INLINE void load_f16_pairs(const void* p, F* even, F* odd) {  // e0 o0 e1 o1 …
    const I x = iload((const int32_t*)p), low = iand(x, iset1(0xffff));
    auto halves = [](__m256i a, __m256i b) __attribute__((always_inline)) {
        const __m256i h = _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8);
        return F{_mm256_cvtph_ps(_mm256_castsi256_si128(h)), _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1))};
    };
    *even = halves(low.a, low.b);
    *odd = halves(_mm256_srli_epi32(x.a, 16), _mm256_srli_epi32(x.b, 16));
}
TK_INLINE F load_bf16(const uint16_t* p) {
    I x = {_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)),
           _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(p + 8)))};
    return as_f(ishl(x, 16));
}
TK_INLINE void store_f16(uint16_t* p, F x) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, 0));
    _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(x.b, 0));
}
TK_INLINE I load_u8(const uint8_t* p) {
    return {_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)),
            _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
}
TK_INLINE void store_s8(int8_t* p, I x) {
    __m256i w = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
    _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
}
TK_INLINE B bload(const void* p) { return iload((const int32_t*)p); }
TK_INLINE void bstore(void* p, B x) { istore((int32_t*)p, x); }
TK_INLINE B bset4(const void* p) {
    int32_t v;
    memcpy(&v, p, 4);
    return iset1(v);
}
TK_INLINE B low_nibbles(B x) { return iand(x, iset1(0x0f0f0f0f)); }
TK_INLINE B high_nibbles(B x) {
    return iand({_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)}, iset1(0x0f0f0f0f));
}
TK_INLINE B badd(B x, B y) { return {_mm256_add_epi8(x.a, y.a), _mm256_add_epi8(x.b, y.b)}; }
#if defined(__AVXVNNI__)
TK_INLINE I dot4(I acc, B u, B s) {
    return {_mm256_dpbusd_avx_epi32(acc.a, u.a, s.a), _mm256_dpbusd_avx_epi32(acc.b, u.b, s.b)};
}
#else
// Here a dot product adds two of the four products in 16 bits, which is exact where they fit: |2 u s| < 32768.
// (Assembly, for g++ 12 makes the products of several steps first and has no registers left for the sums.)
#define TK_SHORT_SUMS
#define TK_CENTRED
typedef I H;  // 32 int16
TK_INLINE __m256i hdot(__m256i acc, __m256i u, __m256i s) {
    __m256i x;
    __asm__("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(acc), "=&x"(x) : "x"(u), "x"(s));
    return acc;
}
TK_INLINE H hdot(H acc, B u, B s) { return {hdot(acc.a, u.a, s.a), hdot(acc.b, u.b, s.b)}; }
// The same with the four activations at p; without a sum before them.
TK_INLINE H hdot_at(H acc, B u, const int8_t* p) {
    __m256i x, y;
    __asm__("vpbroadcastd %6, %3\n\tvpmaddubsw %3, %4, %2\n\tvpmaddubsw %3, %5, %3\n\tvpaddw %2, %0, %0\n\tvpaddw %3, %1, %1"
            : "+x"(acc.a), "+x"(acc.b), "=&x"(x), "=&x"(y)
            : "x"(u.a), "x"(u.b), "m"(*(const int8_t(*)[4])p));
    return acc;
}
TK_INLINE H hdot_at(B u, const int8_t* p) {
    H out;
    __asm__("vpbroadcastd %4, %1\n\tvpmaddubsw %1, %2, %0\n\tvpmaddubsw %1, %3, %1"
            : "=&x"(out.a), "=&x"(out.b)
            : "x"(u.a), "x"(u.b), "m"(*(const int8_t(*)[4])p));
    return out;
}
// Each lane's two int16, and acc[lane] += both.
TK_INLINE I widen(H h) {
    const __m256i one = _mm256_set1_epi16(1);
    return {_mm256_madd_epi16(h.a, one), _mm256_madd_epi16(h.b, one)};
}
TK_INLINE I widen(I acc, H h) { return iadd(acc, widen(h)); }
// Bytes u - 128, as absolute value (128 at most, so that twice that by 127 fits) and sign.
struct Centred { B size, sign; };
TK_INLINE Centred centred(B u) {
    const I x = {_mm256_xor_si256(u.a, _mm256_set1_epi8(-128)), _mm256_xor_si256(u.b, _mm256_set1_epi8(-128))};
    return {{_mm256_abs_epi8(x.a), _mm256_abs_epi8(x.b)}, x};
}
TK_INLINE __m256i dot4(__m256i acc, __m256i size, __m256i sign, __m256i s) {
    __m256i x;
    __asm__("vpsignb %3, %4, %1\n\tvpmaddubsw %1, %2, %1\n\tvpmaddwd %5, %1, %1\n\tvpaddd %1, %0, %0"
            : "+x"(acc), "=&x"(x) : "x"(size), "x"(sign), "x"(s), "x"(_mm256_set1_epi16(1)));
    return acc;
}
// acc[lane] += sum of 4 products (u - 128) * s, |s| <= 127
TK_INLINE I dot4(I acc, Centred u, B s) {
    return {dot4(acc.a, u.size.a, u.sign.a, s.a), dot4(acc.b, u.size.b, u.sign.b, s.b)};
}
#endif
TK_INLINE float hsum(F x) {
    __m256 a = _mm256_add_ps(x.a, x.b);
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
TK_INLINE float hmax(F x) {
    __m256 a = _mm256_max_ps(x.a, x.b);
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}
TK_INLINE int32_t hsum(I x) {
    __m256i a = _mm256_add_epi32(x.a, x.b);
    __m128i b = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    b = _mm_add_epi32(b, _mm_shuffle_epi32(b, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(b, _mm_shuffle_epi32(b, 0xb1)));
}
TK_INLINE int32_t hmax(I x) {
    __m256i a = _mm256_max_epi32(x.a, x.b);
    __m128i b = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    b = _mm_max_epi32(b, _mm_shuffle_epi32(b, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(b, _mm_shuffle_epi32(b, 0xb1)));
}
TK_INLINE F keep_lanes(F x, int lo, int hi, F y) {
    const __m256i n0 = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), n1 = _mm256_add_epi32(n0, _mm256_set1_epi32(8));
    const __m256i l = _mm256_set1_epi32(lo - 1), h = _mm256_set1_epi32(hi);
    __m256i m0 = _mm256_and_si256(_mm256_cmpgt_epi32(n0, l), _mm256_cmpgt_epi32(h, n0));
    __m256i m1 = _mm256_and_si256(_mm256_cmpgt_epi32(n1, l), _mm256_cmpgt_epi32(h, n1));
    return {_mm256_blendv_ps(y.a, x.a, _mm256_castsi256_ps(m0)), _mm256_blendv_ps(y.b, x.b, _mm256_castsi256_ps(m1))};
}

}  // namespace
}  // namespace TK_ISA
}  // namespace tk
