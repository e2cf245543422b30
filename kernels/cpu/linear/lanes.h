// Integer products of a block of tokens by NEON: activations of eight columns are loaded once a token and multiplied lane by lane, or, where
// the processor multiplies 2 x 8 by 8 x 2 bytes at once (i8mm), once for two tokens.
#pragma once

#include "simd/simd.h"

namespace tk {
namespace TK_ISA {
namespace {

// Codes of four rows: `low` of the columns k to k + 3, `high` of k + 4 to k + 7. `codes` of this group and of four rows from `q` on.
template <int BITS>
TK_INLINE void load_codes(const uint8_t* codes, int64_t k, int q, uint8x16_t* low, uint8x16_t* high) {
    if (BITS == 4) {
        const uint8x16_t both = vld1q_u8(codes + k * 8 + 16 * q);
        *low = vandq_u8(both, vdupq_n_u8(15));
        *high = vshrq_n_u8(both, 4);
    } else {
        *low = vld1q_u8(codes + k * 16 + 16 * q);
        *high = vld1q_u8(codes + k * 16 + 64 + 16 * q);
    }
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
// d[t] += codes of 16 rows times the activations of token t, for one group: as they are, 0 to 15 or 255.
template <int M, int BITS>
TK_INLINE void lane_dots(const uint8_t* codes, int64_t group, const int8_t* a, int64_t lda, I* d) {
    constexpr int PAIRS = (M + 1) / 2;
    int32x4_t sums[PAIRS][8];  // of rows 2 i and 2 i + 1 by two tokens
    TK_EACH(p, PAIRS, {
        const I &x = d[2 * p], &y = d[2 * p + 1 < M ? 2 * p + 1 : 2 * p];
        const int32x4_t u[4] = {x.a, x.b, x.c, x.d}, v[4] = {y.a, y.b, y.c, y.d};
        TK_EACH(q, 4, {
            sums[p][2 * q] = vzip1q_s32(u[q], v[q]);
            sums[p][2 * q + 1] = vzip2q_s32(u[q], v[q]);
        });
    });
    for (int64_t k = 0; k < group; k += 8) {
        int8x16_t x[PAIRS];
        TK_EACH(p, PAIRS, x[p] = vcombine_s8(vld1_s8(a + 2 * p * lda + k), vld1_s8(a + (2 * p + 1 < M ? 2 * p + 1 : 2 * p) * lda + k)););
        TK_EACH(q, 4, {
            uint8x16_t low, high;
            load_codes<BITS>(codes, k, q, &low, &high);
            const uint32x4_t l = vreinterpretq_u32_u8(low), h = vreinterpretq_u32_u8(high);
            const uint8x16_t even = vreinterpretq_u8_u32(vzip1q_u32(l, h)), odd = vreinterpretq_u8_u32(vzip2q_u32(l, h));
            TK_EACH(p, PAIRS, {
                sums[p][2 * q] = vusmmlaq_s32(sums[p][2 * q], even, x[p]);
                sums[p][2 * q + 1] = vusmmlaq_s32(sums[p][2 * q + 1], odd, x[p]);
            });
        });
    }
    TK_EACH(t, M, {
        const auto& s = sums[t / 2];
        if (t % 2 == 0) d[t] = {vuzp1q_s32(s[0], s[1]), vuzp1q_s32(s[2], s[3]), vuzp1q_s32(s[4], s[5]), vuzp1q_s32(s[6], s[7])};
        else d[t] = {vuzp2q_s32(s[0], s[1]), vuzp2q_s32(s[2], s[3]), vuzp2q_s32(s[4], s[5]), vuzp2q_s32(s[6], s[7])};
    });
}
#elif defined(__ARM_FEATURE_DOTPROD)
// d[t] += codes of 16 rows times the activations of token t, for one group: those of 4 bits as they are, of 8 less 128.
template <int M, int BITS>
TK_INLINE void lane_dots(const uint8_t* codes, int64_t group, const int8_t* a, int64_t lda, I* d) {
    int32x4_t sums[M][4];
    TK_EACH(t, M, {
        sums[t][0] = d[t].a;
        sums[t][1] = d[t].b;
        sums[t][2] = d[t].c;
        sums[t][3] = d[t].d;
    });
    for (int64_t k = 0; k < group; k += 8) {
        int8x8_t x[M];
        TK_EACH(t, M, x[t] = vld1_s8(a + t * lda + k););
        TK_EACH(q, 4, {
            uint8x16_t low, high;
            load_codes<BITS>(codes, k, q, &low, &high);
            if (BITS == 8) low = veorq_u8(low, vdupq_n_u8(128)), high = veorq_u8(high, vdupq_n_u8(128));
            TK_EACH(t, M, {
                sums[t][q] = vdotq_lane_s32(sums[t][q], vreinterpretq_s8_u8(low), x[t], 0);
                sums[t][q] = vdotq_lane_s32(sums[t][q], vreinterpretq_s8_u8(high), x[t], 1);
            });
        });
    }
    TK_EACH(t, M, d[t] = {sums[t][0], sums[t][1], sums[t][2], sums[t][3]};);
}
#endif

}  // namespace
}  // namespace TK_ISA
}  // namespace tk
