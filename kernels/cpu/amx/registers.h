// How the tile registers of AMX are divided. Products of integers are in tiles.h.
#pragma once

#include <immintrin.h>

#include "simd/base.h"

namespace tk {
namespace TK_ISA {
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
