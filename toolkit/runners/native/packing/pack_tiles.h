// From canonical weights, or the words that hold their codes on disk, to tiles.
#pragma once

#include "ops.h"

namespace tk {

// Where the code of row r and column k stands. Words have 32 bits, those of CODE_AWQ codes of 4 bits alone.
enum CodeLayout : int32_t {
    CODE_BYTES = 0,  // byte [r][k], exclusive-or flip
    CODE_ROWS = 1,   // word [r][k * bits / 32], ascending from its low end: compressed-tensors
    CODE_GPTQ = 2,   // word [k * bits / 32][r], likewise
    CODE_TRELLIS = 4,  // words [r][k * bits / 32], streams of Matrix::trellis
    CODE_AWQ = 3,    // word [k][r / 8], rows of eight in the order 0 2 4 6 1 3 5 7 from its low end
};

struct PackSource {
    const void* codes;  // of a DENSE matrix its elements [rows][ld]
    const int32_t* perm;  // column k is perm[k] of what is stored; null = itself
    const void* scales;   // [rows][ld_scales] of the matrix's dtype
    const void* offsets;  // [rows][ld_scales], uint8 zeros, or minima of the matrix's dtype
    int64_t ld;  // elements, bytes or words
    int64_t ld_scales;
    int64_t repeat;  // groups of the matrix that have a scale together
    int32_t layout;
    int32_t flip;
};

// Fills to.data, all of it.
void pack_tiles(const Matrix& to, const PackSource& from, int threads);

// The same bytes to place `at` of an open file, a block of tiles at a time: what is written is still in the core's cache, and the
// matrix never stands in memory. Returns 0, or the system's error number.
int write_tiles(const Matrix& to, const PackSource& from, int threads, int file, int64_t at);

}  // namespace tk
