// What every vector layer stands on: unrolling, and conversions of single numbers. See simd.h.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

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

}  // namespace
}  // namespace TK_ISA
}  // namespace tk
