// Where windows of trellis codes lie, for processors that permute 16 bytes at a time: the codes of eight columns of four rows are loaded, and
// the windows of four columns cut out of them as bytes by products of 16 bits.
#pragma once

#include "linear/trellis_tables.h"
#include "simd/base.h"

namespace tk {
namespace TK_ISA {
namespace {

// By the first of four rows in a pair of fours: rows 4 to 7 are loaded from 8 bytes on, for nothing is to be read behind row 15.
struct alignas(32) Windows {
    // The pairs of bytes that have the windows of even and odd columns, and what moves those into the upper byte. First columns 0 to 3, cut
    // from rows of four bytes: the one before and three of the codes. Then 4 to 7, cut from the codes as they are.
    uint8_t even[2][32], odd[2][32];
    uint16_t even_up[2][16], odd_up[2][16];
    uint8_t codes[32], last[32];  // what makes those rows of four bytes of the codes, and of the codes before
    uint8_t spread[2][32];        // puts the rows' bytes before a group where the codes before would have them

    explicit Windows(int bits) {
        memset(spread, NOTHING, sizeof spread);
        for (int r = 0; r < 8; r++) {
            const int first = r % 4 * bits + (r < 4 || bits == 4 ? 0 : bits == 2 ? 8 : 4);
            for (int i = 0; i < 4; i++) {
                codes[4 * r + i] = uint8_t(i && i <= bits ? first + i - 1 : NOTHING);
                last[4 * r + i] = uint8_t(i ? NOTHING : first + bits - 1);
                cut(0, r, i, r % 4 * 4, bits * (i + 1));
                cut(1, r, i, first, bits * (i + 5) - 8);
            }
            for (int h = 0; h < 2; h++) spread[h][r / 4 * 16 + first + bits - 1] = uint8_t(8 * h + r);
        }
    }

private:
    static constexpr int NOTHING = 128;  // a shuffle gives 0

    void cut(int half, int r, int i, int first, int bit) {
        const int byte = first + bit / 8;
        uint8_t* from = i % 2 ? odd[half] : even[half];
        uint16_t* up = i % 2 ? odd_up[half] : even_up[half];
        from[4 * r + i / 2 * 2] = uint8_t(byte);
        from[4 * r + i / 2 * 2 + 1] = uint8_t(bit % 8 ? byte + 1 : NOTHING);
        up[2 * r + i / 2] = uint16_t(1 << (8 - bit % 8));
    }
};

}  // namespace
}  // namespace TK_ISA
}  // namespace tk
