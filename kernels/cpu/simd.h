// One vector layer for every instruction set: a tile of 16 lanes.
//
// Files that include this header are compiled once per instruction set with -DTK_ISA=<name> and that set's flags, so
// everything here has internal linkage and no standard library template is used (the linker would merge
// instantiations made for different machines). Fused multiply-add is written out and -ffp-contract=off keeps the
// compiler from forming others: every regime of a kernel must run the same float operations.
//
//   F   16 floats          I   16 int32          B   64 bytes (16 groups of 4)
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#ifndef TK_ISA
#error "compile with -DTK_ISA=<instruction set>"
#endif

#define TK_INLINE static inline __attribute__((always_inline, unused))

namespace tk {
namespace TK_ISA {
namespace {

// f(0), …, f(N - 1) written out before the optimiser looks, with constant arguments: arrays indexed by them become
// registers. A loop, even unrolled later, would leave them in memory.
template <int V>
struct Const {
    constexpr operator int() const { return V; }
};

template <int I, int N, class Fn>
TK_INLINE void each_from(Fn& f) {
    if constexpr (I < N) {
        f(Const<I>());
        each_from<I + 1, N>(f);
    }
}

#define TK_EACH(t, N, ...)                                                        \
    do {                                                                          \
        auto tk_body = [&](auto t) __attribute__((always_inline)) { __VA_ARGS__ }; \
        each_from<0, N>(tk_body);                                                 \
    } while (0)

TK_INLINE float bits_to_float(uint32_t b) {
    float f;
    memcpy(&f, &b, 4);
    return f;
}

TK_INLINE uint32_t float_to_bits(float f) {
    uint32_t b;
    memcpy(&b, &f, 4);
    return b;
}

TK_INLINE float bf16_to_float(uint16_t h) { return bits_to_float(uint32_t(h) << 16); }

TK_INLINE uint16_t float_to_bf16(float f) {
    uint32_t b = float_to_bits(f);
    if ((b & 0x7fffffffu) > 0x7f800000u) return uint16_t((b >> 16) | 0x40u);
    return uint16_t((b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
}

TK_INLINE float f16_to_float(uint16_t h) {
    uint32_t sign = uint32_t(h & 0x8000u) << 16, rest = h & 0x7fffu;
    if (rest >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | ((rest & 0x3ffu) << 13));
    if (rest >= 0x400u) return bits_to_float(sign | ((rest + 0x1c000u) << 13));
    float f = float(rest) * 5.9604644775390625e-8f;  // subnormal: units of 2^-24
    return sign ? -f : f;
}

TK_INLINE uint16_t float_to_f16(float f) {
    uint32_t b = float_to_bits(f), sign = (b >> 16) & 0x8000u, a = b & 0x7fffffffu;
    if (a > 0x7f800000u) return uint16_t(sign | 0x7e00u);
    if (a >= 0x477ff000u) return uint16_t(sign | 0x7c00u);
    if (a < 0x38800000u) return uint16_t(sign | uint32_t(nearbyintf(bits_to_float(a) * 16777216.0f)));
    return uint16_t(sign | ((a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13));
}

#if defined(__AVX512F__)
// ---------------------------------------------------------------- AVX-512 (VNNI, BF16)
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
TK_INLINE I ishl(I a, int n) { return _mm512_slli_epi32(a, n); }
TK_INLINE I ior(I a, I b) { return _mm512_or_si512(a, b); }
TK_INLINE I iand(I a, I b) { return _mm512_and_si512(a, b); }
TK_INLINE F load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
TK_INLINE F load_bf16(const uint16_t* p) {
    return as_f(ishl(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
TK_INLINE void store_f16(uint16_t* p, F x) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, 0)); }
TK_INLINE void store_bf16(uint16_t* p, F x) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x)); }
TK_INLINE I load_u8(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
TK_INLINE I load_s8(const int8_t* p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }
TK_INLINE void store_s8(int8_t* p, I x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(x)); }
TK_INLINE void store_u8(uint8_t* p, I x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(x)); }
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
// lanes whose index lies in [lo, hi) keep x, the others take y
TK_INLINE F keep_lanes(F x, int lo, int hi, F y) {
    uint32_t h = hi >= 16 ? 0xffffu : hi <= 0 ? 0u : (1u << hi) - 1u;
    uint32_t l = lo >= 16 ? 0xffffu : lo <= 0 ? 0u : (1u << lo) - 1u;
    return _mm512_mask_blend_ps(__mmask16(h & ~l), y, x);
}
#elif defined(__AVX2__)
// ---------------------------------------------------------------- AVX2 and AVX-VNNI
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
TK_INLINE F fmax(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
TK_INLINE F fmin(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
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
TK_INLINE I ishl(I x, int n) { return {_mm256_slli_epi32(x.a, n), _mm256_slli_epi32(x.b, n)}; }
TK_INLINE I ior(I x, I y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
TK_INLINE I iand(I x, I y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
TK_INLINE F fabs(F x) { return as_f(iand(as_i(x), iset1(0x7fffffff))); }
TK_INLINE F load_f16(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
            _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
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
TK_INLINE I load_s8(const int8_t* p) {
    return {_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)),
            _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
}
TK_INLINE void store_s8(int8_t* p, I x) {
    __m256i w = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
    _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
}
TK_INLINE void store_u8(uint8_t* p, I x) {
    __m256i w = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
    _mm_storeu_si128((__m128i*)p, _mm_packus_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
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
typedef I H;  // 32 int16
TK_INLINE __m256i hdot(__m256i acc, __m256i u, __m256i s) {
    __m256i x;
    __asm__("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(acc), "=&x"(x) : "x"(u), "x"(s));
    return acc;
}
TK_INLINE H hdot(H acc, B u, B s) { return {hdot(acc.a, u.a, s.a), hdot(acc.b, u.b, s.b)}; }
// acc[lane] += both of its int16
TK_INLINE I widen(I acc, H h) {
    const __m256i one = _mm256_set1_epi16(1);
    return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(h.a, one)), _mm256_add_epi32(acc.b, _mm256_madd_epi16(h.b, one))};
}
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
TK_INLINE F keep_lanes(F x, int lo, int hi, F y) {
    const __m256i n0 = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), n1 = _mm256_add_epi32(n0, _mm256_set1_epi32(8));
    const __m256i l = _mm256_set1_epi32(lo - 1), h = _mm256_set1_epi32(hi);
    __m256i m0 = _mm256_and_si256(_mm256_cmpgt_epi32(n0, l), _mm256_cmpgt_epi32(h, n0));
    __m256i m1 = _mm256_and_si256(_mm256_cmpgt_epi32(n1, l), _mm256_cmpgt_epi32(h, n1));
    return {_mm256_blendv_ps(y.a, x.a, _mm256_castsi256_ps(m0)), _mm256_blendv_ps(y.b, x.b, _mm256_castsi256_ps(m1))};
}
#else
// ---------------------------------------------------------------- plain C++: the reference
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
TK_INLINE I ishl(I x, int n) { TK_LANES(I, int32_t(uint32_t(x.v[i]) << n)); }
TK_INLINE I ior(I x, I y) { TK_LANES(I, x.v[i] | y.v[i]); }
TK_INLINE I iand(I x, I y) { TK_LANES(I, x.v[i] & y.v[i]); }
TK_INLINE F load_f16(const uint16_t* p) { TK_LANES(F, f16_to_float(p[i])); }
TK_INLINE F load_bf16(const uint16_t* p) { TK_LANES(F, bf16_to_float(p[i])); }
TK_INLINE void store_f16(uint16_t* p, F x) { for (int i = 0; i < 16; i++) p[i] = float_to_f16(x.v[i]); }
TK_INLINE I load_u8(const uint8_t* p) { TK_LANES(I, p[i]); }
TK_INLINE I load_s8(const int8_t* p) { TK_LANES(I, p[i]); }
TK_INLINE void store_s8(int8_t* p, I x) {
    for (int i = 0; i < 16; i++) p[i] = int8_t(x.v[i] < -128 ? -128 : x.v[i] > 127 ? 127 : x.v[i]);
}
TK_INLINE void store_u8(uint8_t* p, I x) { for (int i = 0; i < 16; i++) p[i] = uint8_t(x.v[i]); }
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
TK_INLINE F keep_lanes(F x, int lo, int hi, F y) { TK_LANES(F, i >= lo && i < hi ? x.v[i] : y.v[i]); }
#undef TK_LANES
#endif

// float to bf16, round to nearest even, as 16 int32 lanes with the value in the low half (NaN not kept)
TK_INLINE I bf16_bits(F x) {
    const I b = as_i(x);
#if defined(__AVX512F__)
    const I odd = iand(_mm512_srli_epi32(b, 16), iset1(1));
    return _mm512_srli_epi32(iadd(iadd(b, iset1(0x7fff)), odd), 16);
#elif defined(__AVX2__)
    const I odd = iand({_mm256_srli_epi32(b.a, 16), _mm256_srli_epi32(b.b, 16)}, iset1(1));
    const I s = iadd(iadd(b, iset1(0x7fff)), odd);
    return {_mm256_srli_epi32(s.a, 16), _mm256_srli_epi32(s.b, 16)};
#else
    I r;
    for (int i = 0; i < 16; i++) {
        const uint32_t u = uint32_t(b.v[i]);
        r.v[i] = int32_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
    }
    return r;
#endif
}

#if !defined(__AVX512F__)
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

TK_INLINE F ftanh(F x) {
    const F e = fexp(fadd(x, x));
    return fsub(fset1(1.0f), fdiv(fset1(2.0f), fadd(e, fset1(1.0f))));
}

}  // namespace
}  // namespace TK_ISA
}  // namespace tk
