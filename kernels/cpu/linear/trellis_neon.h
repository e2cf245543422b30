// Trellis codes by NEON: four permutations look 16 places up in 256 bytes, which fill half of the registers.
#pragma once

#include <arm_neon.h>

#include "linear/trellis_windows.h"

namespace tk {
namespace TK_ISA {
namespace {

// The table, plus 128.
struct Values {
    uint8x16x4_t part[4];

    explicit Values(int bits) {
        uint8_t bytes[256];
        for (int i = 0; i < 256; i++) bytes[i] = uint8_t(trellis_table(bits)[i] + 128);
        for (int i = 0; i < 16; i++) part[i / 4].val[i % 4] = vld1q_u8(bytes + 16 * i);
    }
};

TK_INLINE uint8x16_t look_up(const Values& values, uint8x16_t places) {
    uint8x16_t out = vqtbl4q_u8(values.part[0], places);
    out = vqtbx4q_u8(out, values.part[1], vsubq_u8(places, vdupq_n_u8(64)));
    out = vqtbx4q_u8(out, values.part[2], vsubq_u8(places, vdupq_n_u8(128)));
    return vqtbx4q_u8(out, values.part[3], vsubq_u8(places, vdupq_n_u8(192)));
}

// Of rows 4 `q` and following: which are the lower or the upper half of what Windows has.
TK_INLINE uint8x16_t cut_windows(const Windows& w, int half, int64_t q, uint8x16_t x) {
    const uint8x16_t even = vqtbl1q_u8(x, vld1q_u8(w.even[half] + 16 * q)), odd = vqtbl1q_u8(x, vld1q_u8(w.odd[half] + 16 * q));
    const uint16x8_t a = vmulq_u16(vreinterpretq_u16_u8(even), vld1q_u16(w.even_up[half] + 8 * q));
    const uint16x8_t b = vmulq_u16(vreinterpretq_u16_u8(odd), vld1q_u16(w.odd_up[half] + 8 * q));
    return vtrn2q_u8(vreinterpretq_u8_u16(a), vreinterpretq_u8_u16(b));
}

template <int BITS>
void expand_group_bytes(const uint8_t* codes, const uint8_t* before, int64_t columns, uint8_t* out) {
    static const Windows w(BITS);
    static const Values made(BITS);
    const Values values = made;  // in registers
    uint8x16_t old[4];
    for (int q = 0; q < 4; q++) old[q] = vqtbl1q_u8(vld1q_u8(before), vld1q_u8(w.spread[q / 2] + 16 * (q % 2)));
    for (int64_t k = 0; k < columns; k += 8, codes += 16 * BITS, out += 128) {
        TK_EACH(q, 4, {
            constexpr int64_t UPPER = BITS == 4 ? 16 : BITS == 3 ? 8 : 0;  // bytes from a pair of fours to where its second is loaded
            const uint8x16_t now = vld1q_u8(codes + 8 * BITS * (q / 2) + UPPER * (q % 2));
            const uint8x16_t codes_now = vqtbl1q_u8(now, vld1q_u8(w.codes + 16 * (q % 2)));
            const uint8x16_t first = vorrq_u8(codes_now, vqtbl1q_u8(old[q], vld1q_u8(w.last + 16 * (q % 2))));
            vst1q_u8(out + 16 * q, look_up(values, cut_windows(w, 0, q % 2, first)));
            vst1q_u8(out + 64 + 16 * q, look_up(values, cut_windows(w, 1, q % 2, now)));
            old[q] = now;
        });
    }
}

}  // namespace
}  // namespace TK_ISA
}  // namespace tk
