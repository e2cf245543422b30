// 9 to some hundred tokens: 256 outputs by 8·NT tokens a block, activations shared through memory by its warps.
//
// Four warps stand side by side over the outputs, 64 each; two such rows of warps take the steps of the inputs in turn and
// add up their sums at the end. Copies run STAGES - 1 stages ahead. Codes become operands in registers, multiplied by
// their scale in x's type, once for all tokens of the block.
#pragma once

#include "linear_common.cuh"

namespace tk {

template <class T, int SPAN, int NT>
struct LinearTile {
    static constexpr int TILES = 4, ACROSS = 4, DEEP = WARPS / ACROSS, STAGES = NT == 2 ? 4 : 3;
    static constexpr int TOKENS = 8 * NT, CHUNKS = SPAN == 32 ? 2 : 1;
    static constexpr int X = DEEP * TOKENS * STEP * 2;
    static constexpr int CODES = TILES * THREADS * 16;
    static constexpr int SCALES = SPAN == 0 ? 0 : WARPS * TILES * CHUNKS * 32;
    static constexpr int ZEROS = SCALES / 2;
    static constexpr int STAGE = X + CODES + SCALES + ZEROS;
    static constexpr int SUMS = ACROSS * TILES * NT * WARP * 16;
    static constexpr int SHARED = (STAGES * STAGE > SUMS ? STAGES * STAGE : SUMS) + 16;

    const Linear& p;
    unsigned char* shared;
    int lane, warp, g, t, tile0, tiles, steps, first, last;

    // The warp's step in a stage.
    TK_DEVICE int step_of(int stage) const { return first + stage * DEEP + warp / ACROSS; }

    TK_DEVICE void issue_weights(int stage, int slot) const {
        unsigned char* to = shared + slot * STAGE + X;
        const int step = step_of(stage);
        const bool inside = step < last;
#pragma unroll
        for (int r = 0; r < TILES; ++r) {
            const size_t tile = tile0 + r;
            copy_async<16>(to + (r * THREADS + thread_index()) * 16,
                           static_cast<const unsigned char*>(p.codes) + (tile * steps + step) * 512 + lane * 16,
                           inside && tile0 + r < tiles);
        }
        if constexpr (SPAN != 0) {  // a lane copies 16 bytes: half a group's scales of one tile, or its zeros
            const int item = lane / 2 % (TILES * CHUNKS), part = lane % 2;
            const int r = item / CHUNKS, c = item % CHUNKS;
            const bool valid = inside && tile0 + r < tiles;
            const size_t group = size_t(tile0 + r) * p.groups + ((step * STEP + c * 32) >> p.group_shift);
            unsigned char* mine = to + CODES + (warp * TILES * CHUNKS + item) * 32;
            if (lane < 2 * TILES * CHUNKS)
                copy_async<16, true>(mine + part * 16,
                                     static_cast<const unsigned char*>(p.scales) + group * 32 + part * 16, valid);
            if (lane < 2 * TILES * CHUNKS && part == 0 && p.zeros != nullptr)
                copy_async<16, true>(to + CODES + SCALES + (warp * TILES * CHUNKS + item) * 16,
                                     static_cast<const unsigned char*>(p.zeros) + group * 16, valid);
        }
    }

    // [DEEP][TOKENS] rows of a step, eight pieces of 16 bytes, those of odd rows with their halves swapped: then eight lanes
    // that read four pieces of two rows find them in different banks.
    TK_DEVICE void issue_x(int stage, int slot) const {
#pragma unroll
        for (int i = 0; i < X / 16 / THREADS; ++i) {
            const int at = i * THREADS + thread_index();
            const int piece = at % 8, row = at / 8 % TOKENS, deep = at / 8 / TOKENS;
            const int step = first + stage * DEEP + deep, token = block_z() * TOKENS + row;
            const auto* source = static_cast<const uint16_t*>(p.x) + token * p.stride_x + step * STEP + piece * 8;
            unsigned char* to = shared + slot * STAGE + (at - piece + (piece ^ row % 2 * 4)) * 16;
            copy_async<16, true>(to, source, step < last && token < p.tokens);
        }
    }

    TK_DEVICE void multiply(float (&sum)[TILES][NT][4], int slot, const Zeros (&of_rows)[TILES]) const {
        const unsigned char* stage = shared + slot * STAGE;
        const unsigned char* groups = stage + X + CODES + warp * TILES * CHUNKS * 32;
        const unsigned char* all_zeros = stage + X + CODES + SCALES + warp * TILES * CHUNKS * 16;
        const bool bf16 = p.flags & SCALES_BF16;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            Words4 x[NT];
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                const int row = n * 8 + g, piece = (4 * j + t) ^ row % 2 * 4;
                x[n] = *reinterpret_cast<const Words4*>(stage + ((warp / ACROSS * TOKENS + row) * 8 + piece) * 16);
            }
#pragma unroll
            for (int r = 0; r < TILES; ++r) {
                const auto words = *reinterpret_cast<const Words2*>(stage + X + (r * THREADS + thread_index()) * 16 + j * 8);
                const int item = r * CHUNKS + (CHUNKS == 2 ? j : 0);
                Zeros zeros = of_rows[r];
                uint32_t first_scale = 0, second_scale = 0;
                if constexpr (SPAN != 0) {
                    if (p.zeros != nullptr)
                        zeros = zeros_of<T, 4>(
                            *reinterpret_cast<const uint32_t*>(all_zeros + item * 16 + g / 2 * 4), g);
                    const Pair s = scale_pair(*reinterpret_cast<const uint32_t*>(groups + item * 32 + 4 * g), bf16);
                    first_scale = to_pair<T>(s.first, s.first), second_scale = to_pair<T>(s.second, s.second);
                }
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    uint32_t a[4];
                    Codes<T, 4>::fragment(a, &words.w[i], zeros);
                    if constexpr (SPAN != 0) {
                        a[0] = fma_pair<T>(a[0], first_scale, NOTHING), a[2] = fma_pair<T>(a[2], first_scale, NOTHING);
                        a[1] = fma_pair<T>(a[1], second_scale, NOTHING), a[3] = fma_pair<T>(a[3], second_scale, NOTHING);
                    }
#pragma unroll
                    for (int n = 0; n < NT; ++n) mma<T>(sum[r][n], a, x[n].w[2 * i], x[n].w[2 * i + 1]);
                }
            }
        }
    }

    // Adds the sums of the warps behind each other, and the blocks' where the inputs are split.
    TK_DEVICE void finish(const float (&sum)[TILES][NT][4]) const {
        auto* sums = reinterpret_cast<Float4*>(shared);  // [ACROSS][TILES][NT][lane]
        wait_copies<0>();
#pragma unroll
        for (int deep = DEEP - 1; deep >= 0; --deep) {
            barrier();
            if (warp / ACROSS != deep) continue;
#pragma unroll
            for (int r = 0; r < TILES; ++r)
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    Float4& at = sums[((warp % ACROSS * TILES + r) * NT + n) * WARP + lane];
                    Float4 value = {sum[r][n][0], sum[r][n][1], sum[r][n][2], sum[r][n][3]};
#pragma unroll
                    for (int e = 0; e < 4; ++e) value.f[e] += deep == DEEP - 1 ? 0 : at.f[e];
                    at = value;
                }
        }
        barrier();
        if (p.splits > 1) {
            each([&](float value, int row, int token) { *partial_sum(p, block_y(), row, token) = value; });
            if (!last_to_arrive(p, reinterpret_cast<int*>(shared + SHARED - 16))) return;
            each([&](float, int row, int token) {
                float value = 0;
                for (int split = 0; split < p.splits; ++split) value += *partial_sum(p, split, row, token);
                store_output<T>(p, value, row, token);
            });
        } else {
            each([&](float value, int row, int token) { store_output<T>(p, value, row, token); });
        }
    }

    // Calls use(sum, row, token) for all outputs of the block that exist, in turn among the threads.
    template <class Use>
    TK_DEVICE void each(Use use) const {
#pragma unroll 1
        for (int at = thread_index(); at < ACROSS * TILES * NT * WARP; at += THREADS) {
            const Float4 value = reinterpret_cast<const Float4*>(shared)[at];
            const int of = at % WARP, n = at / WARP % NT, tile = block_x() * ACROSS * TILES + at / WARP / NT;
            if (tile >= tiles) continue;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int row = tile * TILE + of / 4 * 2 + e / 2;
                const int token = block_z() * TOKENS + n * 8 + of % 4 * 2 + e % 2;
                float scaled = value.f[e];
                if (SPAN == 0) scaled *= static_cast<const float*>(p.scales)[row];
                if (token < p.tokens) use(scaled, row, token);
            }
        }
    }

    TK_DEVICE void run() {
        lane = thread_index() % WARP, warp = thread_index() / WARP, g = lane / 4, t = lane % 4;
        tile0 = (block_x() * ACROSS + warp % ACROSS) * TILES;
        tiles = (p.n_out + TILE - 1) / TILE, steps = p.n_in / STEP;
        first = block_y() * p.split_steps, last = first + p.split_steps;
        if (last > steps) last = steps;
        const int stages = (last - first + DEEP - 1) / DEEP;
#pragma unroll
        for (int s = 0; s < STAGES - 1; ++s) issue_weights(s, s);
        Zeros of_rows[TILES];
#pragma unroll
        for (int r = 0; r < TILES; ++r)
            of_rows[r] = SPAN == 0 && tile0 + r < tiles ? row_zeros<T, 4>(p, tile0 + r, g) : middle<T, 4>();
        release_successor();
        wait_for_predecessor();
#pragma unroll
        for (int s = 0; s < STAGES - 1; ++s) {
            issue_x(s, s);
            commit_copies();
        }
        float sum[TILES][NT][4] = {};
        int slot = 0;
        for (int stage = 0; stage < stages; ++stage) {
            wait_copies<STAGES - 2>();
            barrier();
            const int free_slot = slot == 0 ? STAGES - 1 : slot - 1;
            issue_weights(stage + STAGES - 1, free_slot);
            issue_x(stage + STAGES - 1, free_slot);
            commit_copies();
            multiply(sum, slot, of_rows);
            slot = slot + 1 == STAGES ? 0 : slot + 1;
        }
        finish(sum);
    }
};

template <class T, int SPAN, int NT>
TK_DEVICE void linear_tile(const Linear& p, unsigned char* shared) {
    LinearTile<T, SPAN, NT>{p, shared, 0, 0, 0, 0, 0, 0, 0, 0, 0}.run();
}

}  // namespace tk
