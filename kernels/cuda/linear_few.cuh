// 8 or 16 tokens a block: weights are read once, from memory straight to the lane that multiplies them.
//
// A block has 32 outputs; its 8 warps take the steps of the inputs in turn. Weights are the 16-row operand, 8 tokens the
// columns. Every lane copies what it will use itself into a ring of its own in shared memory, several steps ahead: nobody waits
// for anybody until the sums are added up.
#pragma once

#include "linear_common.cuh"

namespace tk {

// SPAN: inputs of a step that share a scale: 32, 64, or 0 where all of a row's do; NT: columns of 8 tokens.
template <class T, int BITS, int SPAN, int NT>
struct LinearFew {
    static constexpr int TILES = 2, DEPTH = 4, PARTS = BITS / 4, CHUNKS = SPAN == 32 ? 2 : 1;
    static constexpr int CODES = TILES * PARTS * 16 * THREADS;
    static constexpr int SCALES = SPAN == 0 ? 0 : TILES * CHUNKS * 4 * THREADS;
    static constexpr int STAGE = CODES + 2 * SCALES;
    static constexpr int SHARED = DEPTH * STAGE, SUMS = WARPS * TILES * NT * WARP * 16;
    static_assert(SHARED >= SUMS + 16, "the sums of all warps stand there at the end");

    const Linear& p;
    unsigned char* shared;
    int g, t, tile0, tiles, last;
    uint32_t codes[TILES];   // where this lane copies from next, in bytes
    uint32_t groups[TILES];  // its tiles' first groups

    TK_DEVICE LinearFew(const Linear& arguments, unsigned char* memory) : p(arguments), shared(memory) {}

    // Starts the copies of a step; called for every WARPS-th step in turn.
    TK_DEVICE void issue(int step, int slot) {
        unsigned char* stage = shared + slot * STAGE + thread_index() * 16;
        unsigned char* words = shared + slot * STAGE + CODES + thread_index() * 4;
        if (step < last) {
#pragma unroll
            for (int r = 0; r < TILES; ++r) {
#pragma unroll
                for (int part = 0; part < PARTS; ++part)
                    copy_async<16>(stage + (r * PARTS + part) * THREADS * 16,
                                   static_cast<const unsigned char*>(p.codes) + codes[r] + part * 512);
                codes[r] += WARPS * PARTS * 512;
            }
#pragma unroll
            for (int c = 0; c < (SPAN == 0 ? 0 : CHUNKS); ++c) {
                const uint32_t group = (step * STEP + c * SPAN) >> p.group_shift;
#pragma unroll
                for (int r = 0; r < TILES; ++r) {
                    unsigned char* to = words + (r * CHUNKS + c) * THREADS * 4;
                    const uint32_t at = groups[r] + group;
                    copy_async<4>(to, static_cast<const unsigned char*>(p.scales) + (at * 32 + 4 * g));
                    if (p.zeros != nullptr)
                        copy_async<4>(to + SCALES, static_cast<const unsigned char*>(p.zeros) + (at * 16 + g / 2 * 4));
                }
            }
        }
        commit_copies();
    }

    // One step of both tiles.
    TK_DEVICE void multiply(float (&sum)[TILES][NT][4], int slot, const Words4 (&x)[NT][2],
                            const Zeros (&of_rows)[TILES]) const {
        const unsigned char* stage = shared + slot * STAGE + thread_index() * 16;
        const unsigned char* words_of = shared + slot * STAGE + CODES + thread_index() * 4;
        constexpr int WORDS = Codes<T, BITS>::WORDS;
#pragma unroll
        for (int r = 0; r < TILES; ++r) {
            Words4 words[PARTS];
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
                words[part] = *reinterpret_cast<const Words4*>(stage + (r * PARTS + part) * THREADS * 16);
            Zeros offsets = of_rows[r];
            float part[NT][4] = {};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const unsigned char* group = words_of + (r * CHUNKS + (SPAN == 32 ? i / 2 : 0)) * THREADS * 4;
                if (SPAN != 0 && i % (4 / CHUNKS) == 0)
                    offsets = zeros_of<T, BITS>(*reinterpret_cast<const uint32_t*>(group + SCALES), g);
                uint32_t a[4];
                Codes<T, BITS>::fragment(a, &words[i * WORDS / 4].w[i * WORDS % 4], offsets);
#pragma unroll
                for (int n = 0; n < NT; ++n)
                    mma<T>(SPAN == 0 ? sum[r][n] : part[n], a, x[n][i / 2].w[i % 2 * 2], x[n][i / 2].w[i % 2 * 2 + 1]);
                if (SPAN != 0 && (i + 1) % (4 / CHUNKS) == 0) {
                    const Pair s = scale_pair(*reinterpret_cast<const uint32_t*>(group), p.flags & SCALES_BF16);
#pragma unroll
                    for (int n = 0; n < NT; ++n)
#pragma unroll
                        for (int e = 0; e < 4; ++e) {
                            sum[r][n][e] += (e < 2 ? s.first : s.second) * part[n][e];
                            part[n][e] = 0;
                        }
                }
            }
        }
    }

    // Adds the warps' sums, and the blocks' where the inputs are split; NT outputs a thread.
    TK_DEVICE void finish(const float (&sum)[TILES][NT][4]) const {
        const int thread = thread_index(), warp = thread / WARP, lane = thread % WARP;
        wait_copies<0>();
        barrier();
        auto* sums = reinterpret_cast<Float4*>(shared);
#pragma unroll
        for (int r = 0; r < TILES; ++r)
#pragma unroll
            for (int n = 0; n < NT; ++n)
                sums[((warp * TILES + r) * NT + n) * WARP + lane] = {sum[r][n][0], sum[r][n][1], sum[r][n][2],
                                                                     sum[r][n][3]};
        barrier();
        float value[NT];
        int row[NT], token[NT];
#pragma unroll
        for (int i = 0; i < NT; ++i) {
            const int at = i * THREADS + thread, from = at / 4 % WARP, element = at % 4;
            const int tile = tile0 + at / 128 / NT;
            row[i] = tile < tiles ? tile * TILE + from / 4 * 2 + element / 2 : p.n_out;
            token[i] = block_z() * 8 * NT + at / 128 % NT * 8 + from % 4 * 2 + element % 2;
            value[i] = 0;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) value[i] += reinterpret_cast<const float*>(shared)[w * THREADS * NT + at];
            if (SPAN == 0 && tile < tiles) value[i] *= static_cast<const float*>(p.scales)[row[i]];
        }
        if (p.splits > 1) {
#pragma unroll
            for (int i = 0; i < NT; ++i)
                if (there(row[i], token[i])) *partial_sum(p, block_y(), row[i], token[i]) = value[i];
            if (!last_to_arrive(p, reinterpret_cast<int*>(shared + SUMS))) return;
#pragma unroll
            for (int i = 0; i < NT; ++i) {
                if (!there(row[i], token[i])) continue;
                value[i] = 0;
                for (int split = 0; split < p.splits; ++split) value[i] += *partial_sum(p, split, row[i], token[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < NT; ++i) store_output<T>(p, value[i], row[i], token[i]);
    }

    TK_DEVICE bool there(int row, int token) const { return row < p.n_out && token < p.tokens; }

    TK_DEVICE void run() {
        const int warp = thread_index() / WARP, lane = thread_index() % WARP;
        g = lane / 4, t = lane % 4;
        tile0 = block_x() * TILES, tiles = (p.n_out + TILE - 1) / TILE;
        const int steps = p.n_in / STEP, first = block_y() * p.split_steps + warp;
        last = block_y() * p.split_steps + p.split_steps;
        if (last > steps) last = steps;
        Zeros of_rows[TILES];
#pragma unroll
        for (int r = 0; r < TILES; ++r) {
            const uint32_t tile = tile0 + r < tiles ? tile0 + r : tile0;  // one that is not there: results are dropped
            codes[r] = (tile * steps + first) * PARTS * 512 + lane * 16;
            groups[r] = tile * p.groups;
            of_rows[r] = SPAN == 0 ? row_zeros<T, BITS>(p, tile, g) : middle<T, BITS>();
        }
        if (SPAN != 0 && p.zeros == nullptr)  // then they are always the same
#pragma unroll
            for (int i = 0; i < DEPTH * TILES * CHUNKS; ++i) {
                unsigned char* stage = shared + i / (TILES * CHUNKS) * STAGE + CODES + SCALES;
                reinterpret_cast<uint32_t*>(stage)[i % (TILES * CHUNKS) * THREADS + thread_index()] =
                    Codes<T, BITS>::MIDDLE * 0x01010101;
            }
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) issue(first + d * WARPS, d);
        release_successor();
        wait_for_predecessor();
        const uint16_t* source[NT];
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            const int wanted = (block_z() * NT + n) * 8 + g, token = wanted < p.tokens ? wanted : p.tokens - 1;
            source[n] = static_cast<const uint16_t*>(p.x) + token * p.stride_x + first * STEP + 8 * t;
        }
        Words4 x[NT][2], next[NT][2];  // what is read now, and what was asked for meanwhile
        const auto ask = [&](int step) {
            if (step >= last) return;
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                next[n][0] = load_128(source[n]), next[n][1] = load_128(source[n] + 32);
                source[n] += WARPS * STEP;
            }
        };
        ask(first);
        float sum[TILES][NT][4] = {};
        for (int turn = first; turn < last; turn += WARPS * DEPTH) {
#pragma unroll
            for (int d = 0; d < DEPTH; ++d) {
                const int step = turn + d * WARPS;
                if (step >= last) break;
#pragma unroll
                for (int n = 0; n < NT; ++n) x[n][0] = next[n][0], x[n][1] = next[n][1];
                ask(step + WARPS);
                wait_copies<DEPTH - 1>();
                multiply(sum, d, x, of_rows);
                issue(step + WARPS * DEPTH, d);
            }
        }
        finish(sum);
    }
};

template <class T, int BITS, int SPAN, int NT>
TK_DEVICE void linear_few(const Linear& p, unsigned char* shared) {
    LinearFew<T, BITS, SPAN, NT>(p, shared).run();
}

}  // namespace tk
