// The weight in floating point, for cuBLAS: (code - zero)·scale in float32, rounded once. A warp takes one step of a tile.
#pragma once

#include "linear_common.cuh"

namespace tk {

template <class T, int BITS>
TK_DEVICE void expand(const Linear& p, unsigned char*) {
    constexpr int WORDS = Codes<T, BITS>::WORDS;
    const int lane = thread_index() % WARP, g = lane / 4, t = lane % 4;
    const int tile = block_x(), steps = p.n_in / STEP, step = block_y() * WARPS + thread_index() / WARP;
    if (step >= steps) return;
    const auto* codes = static_cast<const unsigned char*>(p.codes) + (size_t(tile) * steps + step) * WORDS * 512;
    Words4 loaded[WORDS];
#pragma unroll
    for (int part = 0; part < WORDS; ++part) loaded[part] = load_128(codes + part * 512 + lane * 16);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const bool whole = p.group_shift < 0;  // a row's inputs share one scale
        const size_t group = size_t(tile) * p.groups + (whole ? 0 : (step * STEP + j * 32) >> p.group_shift);
        Zeros zeros = middle<T, BITS>();
        Pair scales;
        if (whole) {
            zeros = row_zeros<T, BITS>(p, tile, g), scales = row_scales(p, tile, g);
        } else {
            const auto* words = static_cast<const uint32_t*>(p.scales) + group * 8;
            scales = scale_pair(words[g], p.flags & SCALES_BF16);
            if (p.zeros != nullptr)
                zeros = zeros_of<T, BITS>(static_cast<const uint32_t*>(p.zeros)[group * 4 + g / 2], g);
        }
        Words4 rows[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int at = (2 * j + i) * WORDS;
            uint32_t a[4];
            Codes<T, BITS>::fragment(a, &loaded[at / 4].w[at % 4], zeros);
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const float scale = r % 2 ? scales.second : scales.first;
                const Pair code = widen_pair<T>(a[r]);
                rows[r % 2].w[2 * i + r / 2] = to_pair<T>(code.first * scale, code.second * scale);
            }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = tile * TILE + 2 * g + h;
            auto* out = static_cast<uint16_t*>(p.out) + size_t(row) * p.n_in + step * STEP + 32 * j + 8 * t;
            if (row < p.n_out) store_128(out, rows[h]);
        }
    }
}

}  // namespace tk
