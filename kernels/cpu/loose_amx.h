// Products of bfloat16 by tile registers: linears for callers who let sums be in any order, and those of attention.
#pragma once

#include "ops_isa.h"

namespace tk {
namespace TK_ISA {

// Whether a weight, or both of a gated pair, are multiplied so.
bool loose(const Matrix& w, const Matrix& other, const Rows& in);
int64_t loose_scratch(const Matrix& w);
void linear_loose(const Matrix& w, const Rows& in, int64_t count, int64_t t0, int64_t t1, const Store& to, void* scratch);
void gated_loose(const Matrix& gate, const Matrix& up, const Rows& in, int64_t count, int64_t t0, int64_t t1, const Store& to,
                 void* scratch);

// Scores [rows][KV_TILE] of a tile's first tokens, and behind that what their values weigh. The registers are in use from the one to the
// end of the other. together: [KV_TILE][dpad], for cells that do not lie one behind the other.
void scores_tiles(const AttnParams& p, const KvTile& tile, const uint16_t* q, int64_t rows, int64_t tokens, float* s);
void values_tiles(const AttnParams& p, const KvTile& tile, const uint16_t* probs, int64_t rows, int64_t tokens, uint8_t* together, float* acc);

namespace {

// How tile registers are divided: bytes of a row, and rows.
struct alignas(64) TileConfig {
    uint8_t palette = 1, start = 0, unused[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};

// The compiler knows not that tile loads read memory: what they read is written before this, and so is a configuration.
TK_INLINE void written() { __asm__ volatile("" ::: "memory"); }
TK_INLINE void load_config(const TileConfig& c) {
    __asm__ volatile("" ::"r"(&c) : "memory");
    _tile_loadconfig(&c);
}

}  // namespace
}  // namespace TK_ISA
}  // namespace tk
