// The products of one attention tile on AMX, for queries, keys and values of bfloat16 (AttnParams::loose).
//
// Cells are laid out as tile registers take them: 32 elements of 16 keys are one tile, 16 elements of two cells of values too. A
// step of half of that, where there is no more, has registers of its own size.
#include "loose_amx.h"

namespace tk {
namespace TK_ISA {
namespace {

// Registers: 0-2 sums, 3 and 4 the operands, 5 and 6 those of half a step.
void configure() {
    TileConfig c;
    for (int i = 0; i < 5; i++) c.bytes[i] = 64, c.rows[i] = 16;
    c.bytes[5] = 32, c.rows[5] = 16;
    c.bytes[6] = 64, c.rows[6] = 8;
    load_config(c);
    written();
}

// N x 16 rows of a by 16 columns: `whole` steps of 32 and perhaps a half one. b: each step's lines, `step` bytes after those of the
// one before, `line` bytes apart.
template <int N>
void product(const uint16_t* a, int64_t lda, const uint8_t* b, int64_t line, int64_t step, int64_t whole, bool half, float* out, int64_t ldo) {
    _tile_zero(0);
    if (N > 1) _tile_zero(1);
    if (N > 2) _tile_zero(2);
    for (int64_t k = 0; k < whole; k++, b += step) {
        _tile_loadd(4, b, line);
        _tile_loadd(3, a + k * 32, lda * 2);
        _tile_dpbf16ps(0, 3, 4);
        if (N > 1) {
            _tile_loadd(3, a + 16 * lda + k * 32, lda * 2);
            _tile_dpbf16ps(1, 3, 4);
        }
        if (N > 2) {
            _tile_loadd(3, a + 32 * lda + k * 32, lda * 2);
            _tile_dpbf16ps(2, 3, 4);
        }
    }
    if (half) {
        _tile_loadd(6, b, line);
        _tile_loadd(5, a + whole * 32, lda * 2);
        _tile_dpbf16ps(0, 5, 6);
        if (N > 1) {
            _tile_loadd(5, a + 16 * lda + whole * 32, lda * 2);
            _tile_dpbf16ps(1, 5, 6);
        }
        if (N > 2) {
            _tile_loadd(5, a + 32 * lda + whole * 32, lda * 2);
            _tile_dpbf16ps(2, 5, 6);
        }
    }
    _tile_stored(0, out, ldo * 4);
    if (N > 1) _tile_stored(1, out + 16 * ldo, ldo * 4);
    if (N > 2) _tile_stored(2, out + 32 * ldo, ldo * 4);
}

// All rows, 16 to 48 at a time: see `product`.
void product_rows(int64_t rows, const uint16_t* a, int64_t lda, const uint8_t* b, int64_t line, int64_t step, int64_t whole, bool half,
                  float* out, int64_t ldo) {
    for (int64_t r = 0; r < rows; r += 48) {
        const int64_t left = rows - r;
        (left > 32 ? product<3> : left > 16 ? product<2> : product<1>)(a + r * lda, lda, b, line, step, whole, half, out + r * ldo, ldo);
    }
}

}  // namespace

void scores_loose(const AttnParams& p, const KvTile& tile, const uint16_t* q, int64_t rows, int64_t cells, float* s) {
    configure();
    for (int64_t c = 0; c < cells; c++)
        product_rows(rows, q, p.dpad, (const uint8_t*)tile.k[c], 64, 1024, p.dpad / 32, p.dpad % 32, s + c * 16, KV_TILE);
    _tile_release();
}

void values_loose(const AttnParams& p, const KvTile& tile, const uint16_t* probs, int64_t rows, int64_t tokens, float* acc) {
    const int64_t cells = (tokens + 15) / 16, line = p.dpad * 4;
    configure();
    for (int64_t col = 0; col < p.vpad; col += 16)
        product_rows(rows, probs, KV_TILE, (const uint8_t*)tile.v[0] + col * 4, line, 16 * line, cells / 2, cells % 2, acc + col, p.vpad);
    _tile_release();
}

}  // namespace TK_ISA
}  // namespace tk
