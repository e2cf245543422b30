// 17 to 256 tokens: 64·TILES outputs by 8·NT tokens a block, activations shared through memory by its warps.
//
// Four warps stand side by side over the outputs. Of two such rows of warps each takes half of the tokens (SIDES) where
// there are many, so that activations are read from shared memory half as often; else they take the steps of the inputs
// in turn (DEEP) and add up their sums at the end. Copies run two steps ahead. Codes become operands in
// registers, multiplied by their scale in x's type, once for all tokens of the warp. Tokens and tiles that are not there
// repeat the last one that is: a product's columns and rows do not touch each other, and theirs are dropped.
#pragma once

#include "linear_common.cuh"

namespace tk {

template <class T, int BITS, int SPAN, int NT, int RING = 3>
struct LinearTile {
    static constexpr int TILES = 2, PARTS = BITS / 4;
    static constexpr int SIDES = BITS == 4 && NT == 16 ? 2 : 1, ACROSS = 4, DEEP = WARPS / ACROSS / SIDES;
    static constexpr int STAGES = RING, ON_THEIR_WAY = 2;  // steps whose copies are under way
    static constexpr int TOKENS = 8 * NT, CHUNKS = SPAN == 32 ? 2 : 1, GROUPS = SPAN == 0 ? 0 : TILES * CHUNKS;
    static constexpr int COLUMNS = NT / SIDES;                                   // of 8 tokens, a warp's
    static constexpr int OWN = TILES / SIDES, COPIERS = THREADS / SIDES;  // tiles whose codes a warp copies; their lanes
    static constexpr int X = DEEP * TOKENS * STEP * 2, COPIES = X / 16 / THREADS;
    static constexpr int AT_ONCE = THREADS / 8;  // rows of x, of eight pieces, that all threads copy together
    static_assert(TOKENS % AT_ONCE == 0);
    static constexpr int CODES = TILES * PARTS * COPIERS * 16;
    static constexpr int SCALES = WARPS / SIDES * GROUPS * 32, ZEROS = SCALES / 2;
    static constexpr int STAGE = X + CODES + SCALES + ZEROS;
    using HalfStep = std::conditional_t<BITS == 4, Words2, Words4>;  // a lane's codes of 32 inputs
    static constexpr int ENDS = TILES * NT / (DEEP * SIDES);  // products of 16 outputs by 8 tokens that a warp ends
    static constexpr int SUMS = WARPS * ENDS * WARP * 16;
    static constexpr int SHARED = (STAGES * STAGE > SUMS ? STAGES * STAGE : SUMS) + 16;

    const Linear& p;
    unsigned char* shared;
    int lane, across, deep, side, g, t, tiles, step, last;  // step: the warp's that is copied next
    uint32_t codes[OWN];  // where this lane copies from next, in bytes
    uint32_t groups;        // first group of the tile whose groups this lane copies
    int x_step;             // of the first piece of x that this thread copies next

    TK_DEVICE LinearTile(const Linear& arguments, unsigned char* memory) : p(arguments), shared(memory) {
        const int warp = thread_index() / WARP;
        lane = thread_index() % WARP, g = lane / 4, t = lane % 4, across = warp % ACROSS;
        deep = SIDES == 1 ? warp / ACROSS : 0, side = SIDES == 1 ? 0 : warp / ACROSS;
        tiles = (p.n_out + TILE - 1) / TILE;
        const int steps = p.n_in / STEP, first = block_y() * p.split_steps;
        last = first + p.split_steps < steps ? first + p.split_steps : steps;
        step = first + deep;
#pragma unroll
        for (int r = 0; r < OWN; ++r)
            codes[r] = (uint32_t(clamp_tile(first_tile() + side * OWN + r)) * steps + step) * PARTS * 512 + lane * 16;
        groups = clamp_tile(first_tile() + lane / 2 / CHUNKS % TILES) * p.groups;
        x_step = first;
    }

    TK_DEVICE int first_tile() const { return (block_x() * ACROSS + across) * TILES; }
    TK_DEVICE int of_side() const { return deep * ACROSS + across; }  // the warp's number among those of its side
    TK_DEVICE int copier() const { return of_side() * WARP + lane; }
    TK_DEVICE int clamp_tile(int tile) const { return tile < tiles ? tile : tiles - 1; }

    TK_DEVICE void issue_weights(int slot) {
        unsigned char* to = shared + slot * STAGE + X;
        if (step < last) {
#pragma unroll
            for (int r = 0; r < OWN; ++r)
#pragma unroll
                for (int part = 0; part < PARTS; ++part)
                    copy_async<16>(to + (((side * OWN + r) * PARTS + part) * COPIERS + copier()) * 16,
                                   static_cast<const unsigned char*>(p.codes) + codes[r] + part * 512);
            if (side == 0 && lane < 2 * GROUPS) {  // half a group's scales of one tile a lane
                const uint32_t group = groups + (uint32_t(step * STEP + lane / 2 % CHUNKS * 32) >> p.group_shift);
                unsigned char* of_groups = to + CODES + of_side() * GROUPS * 32;
                copy_async<16, true>(of_groups + lane * 16,
                                     static_cast<const unsigned char*>(p.scales) + (group * 32 + lane % 2 * 16));
                if (p.zeros != nullptr && lane % 2 == 0)
                    copy_async<16, true>(to + CODES + SCALES + of_side() * GROUPS * 16 + lane * 8,
                                         static_cast<const unsigned char*>(p.zeros) + group * 16);
            }
        }
        step += DEEP;
#pragma unroll
        for (int r = 0; r < OWN; ++r) codes[r] += DEEP * PARTS * 512;
    }

    // [DEEP][TOKENS] rows of a step, eight pieces of 16 bytes, those of odd rows with their halves swapped: then eight lanes
    // that read four pieces of two rows find them in different banks.
    TK_DEVICE void issue_x(int slot) {
        const int thread = thread_index(), swapped = thread ^ thread / 8 % 2 * 4;
        unsigned char* to = shared + slot * STAGE + swapped * 16;
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            const int later = i * AT_ONCE / TOKENS;  // steps after x_step
            const int wanted = block_z() * TOKENS + i * AT_ONCE % TOKENS + thread / 8;
            const int token = wanted < p.tokens ? wanted : p.tokens - 1;
            const uint32_t from = token * uint32_t(p.stride_x) + (x_step + later) * STEP + thread % 8 * 8;
            if (x_step + later < last)
                copy_async<16, true>(to + i * THREADS * 16, static_cast<const uint16_t*>(p.x) + from);
        }
        x_step += DEEP;
    }

    // What half a step's operands are made of: codes, zeros and scales of this lane.
    struct Half {
        HalfStep words[TILES];
        Zeros offsets[TILES];
        uint32_t factors[TILES][2];
    };

    // Half j of the step in `slot`; zeros and scales stay from half to half where both have the same.
    TK_DEVICE void read(Half& half, int slot, int j, const Zeros (&of_rows)[TILES]) const {
        const unsigned char* stage = shared + slot * STAGE;
        const unsigned char* mine = stage + X + copier() * 16;
        const unsigned char* of_groups = stage + X + CODES + of_side() * GROUPS * 32 + 4 * g;
        const unsigned char* of_zeros = stage + X + CODES + SCALES + of_side() * GROUPS * 16 + g / 2 * 4;
#pragma unroll
        for (int r = 0; r < TILES; ++r) {
            if (j == 0 || CHUNKS == 2) {
                const int item = r * CHUNKS + j;
                if constexpr (SPAN == 0) {
                    half.offsets[r] = of_rows[r];
                } else {
                    half.offsets[r] = middle<T, BITS>();  // a constant, which takes no registers
                    if (p.zeros != nullptr)
                        half.offsets[r] = zeros_of<T, BITS>(*reinterpret_cast<const uint32_t*>(of_zeros + item * 16), g);
                    const auto word = *reinterpret_cast<const uint32_t*>(of_groups + item * 32);
                    const Pair s = scale_pair(word, p.flags & SCALES_BF16);
                    half.factors[r][0] = to_pair<T>(s.first, s.first), half.factors[r][1] = to_pair<T>(s.second, s.second);
                }
            }
            half.words[r] = *reinterpret_cast<const HalfStep*>(
                mine + r * PARTS * COPIERS * 16 + (BITS == 4 ? j * 8 : j * COPIERS * 16));
        }
    }

    // Operand i of tile r.
    TK_DEVICE void unpack(uint32_t (&a)[4], const Half& half, int r, int i) const {
        Codes<T, BITS>::fragment(a, &half.words[r].w[i * PARTS], half.offsets[r]);
        if constexpr (SPAN != 0)
#pragma unroll
            for (int k = 0; k < 4; ++k) a[k] = fma_pair<T>(a[k], half.factors[r][k % 2], NOTHING);
    }

    // Products with half j of the step in `slot`; `between(n)` is what is done behind those of column n.
    template <class Between>
    TK_DEVICE void products(float (&sum)[TILES][COLUMNS][4], const uint32_t (&a)[TILES][2][4], int slot, int j,
                            Between between) const {
        const unsigned char* rows = shared + slot * STAGE + (deep * TOKENS + side * COLUMNS * 8 + g) * 128;
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n) {
            const auto right = *reinterpret_cast<const Words4*>(rows + n * 1024 + ((4 * j + t) ^ g % 2 * 4) * 16);
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int r = 0; r < TILES; ++r) mma<T>(sum[r][n], a[r][i], right.w[2 * i], right.w[2 * i + 1]);
            between(n);
        }
    }

    TK_DEVICE void multiply(float (&sum)[TILES][COLUMNS][4], int slot, const Zeros (&of_rows)[TILES]) const {
        Half half;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            if (j == 1) keep_order();  // or the second half's loads come so early that registers run out
            uint32_t a[TILES][2][4];
            read(half, slot, j, of_rows);
#pragma unroll
            for (int r = 0; r < TILES; ++r)
#pragma unroll
                for (int i = 0; i < 2; ++i) unpack(a[r][i], half, r, i);
            products(sum, a, slot, j, [](int) {});
        }
    }

    // Where the sums of product i of those that this warp ends stand: [ACROSS][TILES][NT] of a warp's lanes.
    TK_DEVICE int place(int i) const {
        const int tile = across * TILES + deep * (TILES / DEEP) + i / COLUMNS;
        return (tile * NT + side * COLUMNS + i % COLUMNS) * WARP + lane;
    }

    // Adds the sums of the warps behind each other, and the blocks' where the inputs are split.
    TK_DEVICE void finish(const float (&sum)[TILES][COLUMNS][4]) const {
        auto* sums = reinterpret_cast<Float4*>(shared);
        wait_copies<0>();
        barrier();
#pragma unroll
        for (int to = DEEP - 1; to >= 0; --to) {  // first what another ends, then what this warp does
#pragma unroll
            for (int r = 0; r < TILES; ++r)
#pragma unroll
                for (int n = 0; n < COLUMNS; ++n) {
                    if ((r / (TILES / DEEP) == deep) == (to != 0)) continue;
                    Float4& at = sums[((across * TILES + r) * NT + side * COLUMNS + n) * WARP + lane];
                    Float4 value = {sum[r][n][0], sum[r][n][1], sum[r][n][2], sum[r][n][3]};
#pragma unroll
                    for (int e = 0; e < 4; ++e) value.f[e] += DEEP == 1 || to != 0 ? 0 : at.f[e];
                    at = value;
                }
            if (to != 0) barrier();
        }
        constexpr int BLOCK = ACROSS * TILES * NT * WARP, AT_ONCE = ENDS < 4 ? ENDS : 4;
        if (p.splits == 1) {
#pragma unroll 1
            for (int i = 0; i < ENDS; i += AT_ONCE)
#pragma unroll
                for (int k = 0; k < AT_ONCE; ++k) store(sums[place(i + k)], place(i + k));
            return;
        }
        const size_t column = block_x() + size_t(grid_x()) * block_z(), columns = size_t(grid_x()) * grid_z();
        auto* parts = reinterpret_cast<Float4*>(p.partial) + column * BLOCK;  // of split 0
#pragma unroll 4
        for (int i = 0; i < ENDS; ++i) parts[block_y() * columns * BLOCK + place(i)] = sums[place(i)];
        if (!last_to_arrive(p, reinterpret_cast<int*>(shared + SHARED - 16))) return;
#pragma unroll 1
        for (int i = 0; i < ENDS; i += AT_ONCE) {  // several at once: each waits for memory as long as all of them
            Float4 value[AT_ONCE] = {};
#pragma unroll 2
            for (int split = 0; split < p.splits; ++split)
#pragma unroll
                for (int k = 0; k < AT_ONCE; ++k) {
                    const Float4 part = parts[split * columns * BLOCK + place(i + k)];
#pragma unroll
                    for (int e = 0; e < 4; ++e) value[k].f[e] += part.f[e];
                }
#pragma unroll
            for (int k = 0; k < AT_ONCE; ++k) store(value[k], place(i + k));
        }
    }

    // The four sums that stand at a place become outputs.
    TK_DEVICE void store(const Float4& value, int at) const {
        const int of = at % WARP, n = at / WARP % NT, tile = block_x() * ACROSS * TILES + at / WARP / NT;
        if (tile >= tiles) return;
        const int row = tile * TILE + of / 4 * 2, token = block_z() * TOKENS + n * 8 + of % 4 * 2;
        const Pair scales = SPAN == 0 ? row_scales(p, tile, of / 4) : Pair{1, 1};
#pragma unroll
        for (int e = 0; e < 2; ++e)
            store_outputs<T>(p, {value.f[e] * scales.first, value.f[2 + e] * scales.second}, row, token + e);
    }

    // Starts the copies of the first two steps.
    TK_DEVICE void begin(Zeros (&of_rows)[TILES]) {
#pragma unroll
        for (int s = 0; s < ON_THEIR_WAY; ++s) issue_weights(s);
#pragma unroll
        for (int r = 0; r < TILES; ++r)
            of_rows[r] = SPAN == 0 ? row_zeros<T, BITS>(p, clamp_tile(first_tile() + r), g) : middle<T, BITS>();
        release_successor();
        wait_for_predecessor();
#pragma unroll
        for (int s = 0; s < ON_THEIR_WAY; ++s) {
            issue_x(s);
            commit_copies();
        }
    }

    // Waits for a step's copies, and starts those of the step that comes ON_THEIR_WAY later.
    TK_DEVICE void next(int slot) {
        wait_copies<ON_THEIR_WAY - 1>();
        barrier();
        const int free_slot = slot + ON_THEIR_WAY < STAGES ? slot + ON_THEIR_WAY : slot + ON_THEIR_WAY - STAGES;
        issue_weights(free_slot);
        issue_x(free_slot);
        commit_copies();
    }

    TK_DEVICE void run() {
        const int first = step;
        Zeros of_rows[TILES];
        begin(of_rows);
        float sum[TILES][COLUMNS][4] = {};
        int slot = 0;
        for (int now = first; now < last + deep; now += DEEP) {  // as often in all warps
            next(slot);
            if (now < last) multiply(sum, slot, of_rows);
            slot = slot + 1 == STAGES ? 0 : slot + 1;
        }
        finish(sum);
    }
};

template <class T, int BITS, int SPAN, int NT>
TK_DEVICE void linear_tile(const Linear& p, unsigned char* shared) {
    LinearTile<T, BITS, SPAN, NT>(p, shared).run();
}

}  // namespace tk
