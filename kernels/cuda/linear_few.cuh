// Up to 8 tokens a block: weights are read once, from memory straight to the lane that multiplies them.
//
// A block has 32 outputs; its 8 warps take the steps of the inputs in turn. Weights are the 16-row operand, tokens the 8
// columns. Every lane copies what it will use itself into a ring of its own in shared memory, several steps ahead: nobody waits
// for anybody until the sums are added up.
#pragma once

#include "linear_common.cuh"

namespace tk {

// SPAN: inputs of a step that share a scale: 32, 64, or 0 where all of a row's do.
template <class T, int BITS, int SPAN>
struct LinearFew {
    static constexpr int TILES = 2, DEPTH = 4, PARTS = BITS / 4, CHUNKS = SPAN == 32 ? 2 : 1;
    static constexpr int CODES = TILES * PARTS * 16 * THREADS;
    static constexpr int SCALES = SPAN == 0 ? 0 : TILES * CHUNKS * 4 * THREADS;
    static constexpr int STAGE = CODES + 2 * SCALES;
    static constexpr int SHARED = DEPTH * STAGE;
    static_assert(SHARED >= WARPS * TILES * WARP * 16 + 16, "the sums of all warps stand there at the end");

    const Linear& p;
    unsigned char* shared;
    int g, t, tile0, tiles, steps, last;

    TK_DEVICE void issue(int step, int slot) const {
        const int thread = thread_index(), lane = thread % WARP;
        unsigned char* stage = shared + slot * STAGE;
        const bool inside = step < last;
#pragma unroll
        for (int r = 0; r < TILES; ++r) {
            const bool valid = inside && tile0 + r < tiles;
            const size_t tile = tile0 + r;
            const auto* codes = static_cast<const unsigned char*>(p.codes) + (tile * steps + step) * PARTS * 512;
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
                copy_async<16>(stage + ((r * PARTS + part) * THREADS + thread) * 16, codes + part * 512 + lane * 16,
                               valid);
            if constexpr (SPAN != 0)
#pragma unroll
                for (int c = 0; c < CHUNKS; ++c) {
                    const size_t group = tile * p.groups + ((step * STEP + c * SPAN) >> p.group_shift);
                    unsigned char* to = stage + CODES + ((r * CHUNKS + c) * THREADS + thread) * 4;
                    copy_async<4>(to, static_cast<const unsigned char*>(p.scales) + group * 32 + 4 * g, valid);
                    if (p.zeros != nullptr)
                        copy_async<4>(to + SCALES,
                                      static_cast<const unsigned char*>(p.zeros) + group * 16 + g / 2 * 4, valid);
                }
        }
        commit_copies();
    }

    // One step of both tiles.
    TK_DEVICE void multiply(float (&sum)[TILES][4], int slot, const Words4 (&x)[2], const Zeros (&of_rows)[TILES]) const {
        const int thread = thread_index();
        const unsigned char* stage = shared + slot * STAGE;
#pragma unroll
        for (int r = 0; r < TILES; ++r) {
            Words4 words[PARTS];
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
                words[part] = *reinterpret_cast<const Words4*>(stage + ((r * PARTS + part) * THREADS + thread) * 16);
            Zeros zeros = of_rows[r];
            float part[4] = {0, 0, 0, 0};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int c = SPAN == 32 ? i / 2 : 0;
                const unsigned char* group = stage + CODES + ((r * CHUNKS + c) * THREADS + thread) * 4;
                if (SPAN != 0 && i % (4 / CHUNKS) == 0 && p.zeros != nullptr)
                    zeros = zeros_of<T, BITS>(*reinterpret_cast<const uint32_t*>(group + SCALES), g);
                uint32_t a[4];
                constexpr int WORDS = Codes<T, BITS>::WORDS;
                Codes<T, BITS>::fragment(a, &words[i * WORDS / 4].w[i * WORDS % 4], zeros);
                mma<T>(SPAN == 0 ? sum[r] : part, a, x[i / 2].w[i % 2 * 2], x[i / 2].w[i % 2 * 2 + 1]);
                if (SPAN != 0 && (i + 1) % (4 / CHUNKS) == 0) {
                    const Pair s = scale_pair(*reinterpret_cast<const uint32_t*>(group), p.flags & SCALES_BF16);
                    sum[r][0] += s.first * part[0], sum[r][1] += s.first * part[1];
                    sum[r][2] += s.second * part[2], sum[r][3] += s.second * part[3];
                    part[0] = part[1] = part[2] = part[3] = 0;
                }
            }
        }
    }

    // Adds the warps' sums, and the blocks' where the inputs are split; one output a thread.
    TK_DEVICE void finish(const float (&sum)[TILES][4]) const {
        const int thread = thread_index(), warp = thread / WARP, lane = thread % WARP;
        wait_copies<0>();
        barrier();
        auto* sums = reinterpret_cast<Float4*>(shared);
#pragma unroll
        for (int r = 0; r < TILES; ++r)
            sums[(warp * TILES + r) * WARP + lane] = {sum[r][0], sum[r][1], sum[r][2], sum[r][3]};
        barrier();
        float value = 0;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) value += reinterpret_cast<const float*>(shared)[w * THREADS + thread];
        const int from = thread / 4 % WARP, element = thread % 4;
        const int tile = tile0 + thread / 128;
        const int row = tile * TILE + from / 4 * 2 + element / 2;
        const int token = block_z() * 8 + from % 4 * 2 + element % 2;
        if (SPAN == 0 && tile < tiles) value *= static_cast<const float*>(p.scales)[row];
        if (p.splits > 1) {
            const bool valid = tile < tiles && token < p.tokens;
            if (valid) *partial_sum(p, block_y(), row, token) = value;
            if (!last_to_arrive(p, reinterpret_cast<int*>(shared + WARPS * TILES * WARP * 16)) || !valid) return;
            value = 0;
            for (int split = 0; split < p.splits; ++split) value += *partial_sum(p, split, row, token);
        }
        store_output<T>(p, value, row, token);
    }

    TK_DEVICE void run() {
        const int warp = thread_index() / WARP, lane = thread_index() % WARP;
        g = lane / 4, t = lane % 4;
        tile0 = block_x() * TILES, tiles = (p.n_out + TILE - 1) / TILE, steps = p.n_in / STEP;
        const int first = block_y() * p.split_steps + warp;
        last = block_y() * p.split_steps + p.split_steps;
        if (last > steps) last = steps;
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) issue(first + d * WARPS, d);
        Zeros of_rows[TILES];
#pragma unroll
        for (int r = 0; r < TILES; ++r)
            of_rows[r] = SPAN == 0 && tile0 + r < tiles ? row_zeros<T, BITS>(p, tile0 + r, g) : middle<T, BITS>();
        release_successor();
        wait_for_predecessor();
        const int token = block_z() * 8 + g;
        const auto* source = static_cast<const uint16_t*>(p.x) + token * p.stride_x + 8 * t;
        float sum[TILES][4] = {};
        int slot = 0;
        for (int step = first; step < last; step += WARPS) {
            Words4 x[2] = {};
            if (token < p.tokens)
                x[0] = load_128(source + step * STEP), x[1] = load_128(source + step * STEP + 32);
            wait_copies<DEPTH - 1>();
            multiply(sum, slot, x, of_rows);
            issue(step + DEPTH * WARPS, slot);
            slot = slot + 1 == DEPTH ? 0 : slot + 1;
        }
        finish(sum);
    }
};

template <class T, int BITS, int SPAN>
TK_DEVICE void linear_few(const Linear& p, unsigned char* shared) {
    LinearFew<T, BITS, SPAN>{p, shared, 0, 0, 0, 0, 0, 0}.run();
}

}  // namespace tk
