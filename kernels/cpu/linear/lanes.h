// Integer products of a block of tokens by NEON: activations of eight columns are loaded once a token and multiplied lane by lane.
#pragma once

#include "simd/simd.h"

namespace tk {
namespace TK_ISA {
namespace {

// sums += four rows' codes times four activations, those of a token's eight from 4 HALF on. Codes of 8 bits are less 128 where products are
// of signed bytes alone.
template <int HALF, int BITS>
TK_INLINE int32x4_t lane_dot(int32x4_t sums, uint8x16_t codes, int8x8_t x) {
#if defined(TK_CENTRED)
    const int8x16_t c = vreinterpretq_s8_u8(BITS == 8 ? veorq_u8(codes, vdupq_n_u8(128)) : codes);
    return vdotq_lane_s32(sums, c, x, HALF);
#else
    return vusdotq_lane_s32(sums, codes, x, HALF);
#endif
}

// d[t] += codes of 16 rows times the activations of token t, for one group.
template <int M, int BITS>
TK_INLINE void lane_dots(const uint8_t* codes, int64_t group, const int8_t* a, int64_t lda, I* d) {
    int32x4_t sums[M][4];
    TK_EACH(t, M, {
        sums[t][0] = d[t].a;
        sums[t][1] = d[t].b;
        sums[t][2] = d[t].c;
        sums[t][3] = d[t].d;
    });
    for (int64_t k = 0; k < group; k += 8, codes += 16 * BITS) {
        int8x8_t x[M];
        TK_EACH(t, M, x[t] = vld1_s8(a + t * lda + k););
        TK_EACH(q, 4, {
            const uint8x16_t both = vld1q_u8(codes + 16 * q);
            const uint8x16_t low = BITS == 4 ? vandq_u8(both, vdupq_n_u8(15)) : both;
            const uint8x16_t high = BITS == 4 ? vshrq_n_u8(both, 4) : vld1q_u8(codes + 64 + 16 * q);
            TK_EACH(t, M, {
                sums[t][q] = lane_dot<0, BITS>(sums[t][q], low, x[t]);
                sums[t][q] = lane_dot<1, BITS>(sums[t][q], high, x[t]);
            });
        });
    }
    TK_EACH(t, M, d[t] = {sums[t][0], sums[t][1], sums[t][2], sums[t][3]};);
}

}  // namespace
}  // namespace TK_ISA
}  // namespace tk
