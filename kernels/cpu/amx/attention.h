// The products of one attention tile by tile registers: of bfloat16 (attention/attention.cpp) and of codes (codes.cpp).
#pragma once

#include "ops_isa.h"

namespace tk {
namespace TK_ISA {

// Scores [rows][KV_TILE] of a tile's first tokens, and behind that what their values weigh. The registers are in use from the one to the
// end of the other. together: [KV_TILE][dpad], for cells that do not lie one behind the other.
void scores_tiles(const AttnParams& p, const KvTile& tile, const uint16_t* q, int64_t rows, int64_t tokens, float* s);
void values_tiles(const AttnParams& p, const KvTile& tile, const uint16_t* probs, int64_t rows, int64_t tokens, uint8_t* together, float* acc);

// The same of codes, with the bits of attention/codes.h: queries as query_codes makes them, weights as weigh_codes does, whose tails
// are in s.
void scores_of_codes(const AttnParams& p, const KvTile& tile, const uint8_t* q, int64_t rows, int64_t cells, float* s);
void values_of_codes(const AttnParams& p, const KvTile& tile, const int8_t* weights, int64_t rows, int64_t cells, const float* s, uint8_t* together,
                     float* acc);

}  // namespace TK_ISA
}  // namespace tk
