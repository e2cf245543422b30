// What the linear kernels share: scales of a group, and the end of a sum.
#pragma once

#include "codes.cuh"
#include "linear.h"

namespace tk {

constexpr int STEP = 64;     // inputs
constexpr int TILE = 16;     // outputs
constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;

// Two 16-bit scales.
TK_DEVICE Pair scale_pair(uint32_t word, bool bf16) {
    return bf16 ? widen_pair<Bf16>(word) : widen_pair<Half>(word);
}

// The zeros of rows 2g and 2g + 1 from the word that holds those of rows 4·(g / 2) … + 3.
template <class T, int BITS>
TK_DEVICE Zeros zeros_of(uint32_t word, int g) {
    return Codes<T, BITS>::prepare(word, g % 2 * 2);
}

template <class T, int BITS>
TK_DEVICE Zeros middle() {
    return Codes<T, BITS>::prepare(Codes<T, BITS>::MIDDLE * 0x0101, 0);
}

// Zeros and float32 scales of rows 2g and 2g + 1 of a tile, where a row has one of each.
template <class T, int BITS>
TK_DEVICE Zeros row_zeros(const Linear& p, int tile, int g) {
    if (p.zeros == nullptr) return middle<T, BITS>();
    const uint8_t* z = static_cast<const uint8_t*>(p.zeros) + tile * TILE + 2 * g;
    return Codes<T, BITS>::prepare(z[0] | z[1] << 8, 0);
}

TK_DEVICE Pair row_scales(const Linear& p, int tile, int g) {
    const float* s = static_cast<const float*>(p.scales) + tile * TILE + 2 * g;
    return {s[0], s[1]};
}

// One sum of products becomes one output.
template <class T>
TK_DEVICE void store_output(const Linear& p, float value, int row, int token) {
    if (row >= p.n_out || token >= p.tokens) return;
    const size_t at = size_t(token) * p.n_out + row;
    if (p.bias != nullptr) value += widen<T>(static_cast<const uint16_t*>(p.bias)[row]);
    if (p.flags & WIDE) {
        if (p.residual != nullptr) value += static_cast<const float*>(p.residual)[at];
        static_cast<float*>(p.out)[at] = value;
    } else {
        if (p.residual != nullptr) value += widen<T>(static_cast<const uint16_t*>(p.residual)[at]);
        static_cast<uint16_t*>(p.out)[at] = static_cast<uint16_t>(to_pair<T>(value, 0.0f));
    }
}

// Sums of two outputs that follow each other, `row` being even.
template <class T>
TK_DEVICE void store_outputs(const Linear& p, Pair value, int row, int token) {
    if (p.n_out % 2) {  // pairs of every second token would begin aside
        store_output<T>(p, value.first, row, token);
        store_output<T>(p, value.second, row + 1, token);
        return;
    }
    if (row >= p.n_out || token >= p.tokens) return;
    const size_t at = (size_t(token) * p.n_out + row) / 2;
    const auto add = [&](Pair more) { value.first += more.first, value.second += more.second; };
    if (p.bias != nullptr) {
        const auto* bias = static_cast<const uint16_t*>(p.bias) + row;  // a part of a larger one may begin aside
        add({widen<T>(bias[0]), widen<T>(bias[1])});
    }
    if (p.flags & WIDE) {
        if (p.residual != nullptr) add(static_cast<const Pair*>(p.residual)[at]);
        static_cast<Pair*>(p.out)[at] = value;
    } else {
        if (p.residual != nullptr) add(widen_pair<T>(static_cast<const uint32_t*>(p.residual)[at]));
        static_cast<uint32_t*>(p.out)[at] = to_pair<T>(value.first, value.second);
    }
}

// Where the part `split` of an output's sum waits for the others.
TK_DEVICE float* partial_sum(const Linear& p, int split, int row, int token) {
    const int padded = (p.n_out + TILE - 1) / TILE * TILE;
    return p.partial + (size_t(split) * p.tokens + token) * padded + row;
}

// After all threads wrote their parts: whether this block is the last of its column, which then adds them up, always in
// the same order. `told`: a word of shared memory.
TK_DEVICE bool last_to_arrive(const Linear& p, int* told) {
    fence();
    barrier();
    if (thread_index() == 0) {
        int* counter = p.arrivals + block_x() + grid_x() * block_z();
        const bool last = arrive(counter) == p.splits - 1;
        if (last) *counter = 0;
        *told = last;
    }
    barrier();
    fence();
    return *told != 0;
}

}  // namespace tk
