// What a linear kernel is given, and how its weight lies in memory.
//
// Rows (outputs) come in tiles of 16, the last one padded; inputs in steps of 64. Of tile r and step s, lane 4g + t of a warp
// holds rows 2g and 2g + 1 at inputs 32j + 8t + 4i + 0…3 for j, i in 0, 1: four operands of a product of 16 inputs. (A sum
// may be taken in any order, so operands of activations are 8 consecutive inputs at 32j + 8t.)
//   codes   4 bits: [tile][step][lane] x 16 bytes: word 2j + i. 8 bits: [tile][step][j][lane] x 16 bytes: words 2i, 2i + 1
//   scales  [tile][group][16] 16-bit, or [row] float32 where all of a row's inputs share one
//   zeros   [tile][group][16] uint8 ([row] likewise), or null: the middle of the range
#pragma once

#include <cstdint>

namespace tk {

enum LinearFlags : int32_t {
    SCALES_BF16 = 1,  // 16-bit scales are bfloat16, else float16
    WIDE = 2,         // residual and out are float32, else of x's type
};

struct Linear {
    const void* x;         // [tokens] rows of n_in, 16-byte aligned
    const void* codes;
    const void* scales;
    const void* zeros;
    const void* bias;      // [n_out] of x's type, or null
    const void* residual;  // [tokens, n_out], or null; may be `out`
    void* out;             // [tokens, n_out]; for `expand` the weight [n_out, n_in]
    float* partial;        // where splits > 1: `few` [splits, tokens, 16·tiles], `tile` [splits, block columns, sums]
    int32_t* arrivals;     // one a block column, zero before and after
    int64_t stride_x;      // elements from one row of x to the next
    int32_t tokens, n_out, n_in, groups;
    int32_t group_shift;   // log2 of a group's inputs
    int32_t splits;        // parts of the inputs, along the grid's y
    int32_t split_steps;   // steps a part
    int32_t flags;
};

}  // namespace tk
