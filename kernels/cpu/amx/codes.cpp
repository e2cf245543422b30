// Products of one attention tile on AMX, of codes as integers (attention/codes.h). Sums of integers are exact, and what is made of them are the
// same floats: rows come out as those by vector registers do, bit for bit, so who takes which is a matter of speed alone.
//
// Cells of codes are laid out as tile registers take them: of keys four elements of 16 tokens are a line, of values four tokens of 16
// columns.
#include "attention/codes.h"

#include "amx/attention.h"
#include "amx/tiles.h"

namespace tk {
namespace TK_ISA {
namespace {

constexpr int64_t CELLS = TILE_BYTES / 16;  // of values, that are multiplied in one step

// Of one block of rows, by two times 16 columns.
struct alignas(64) Sums {
    int32_t upper[2][TILE_ROWS][16], lower[2][TILE_ROWS][16];
};

// Rows of bytes, upper ones and `apart` bytes later lower ones.
struct Left {
    const uint8_t* rows;
    int64_t row, apart;
};

// Columns of codes: two times 16, `line` bytes from four of the products to the next four.
struct Right {
    const uint8_t *first, *second;
    int64_t line;
};

TK_INLINE void multiply(Tiles& r, const Left& left, const Right& right, int64_t step, int64_t steps, Sums* sums) {
    r.zero<0>();
    r.zero<1>();
    r.zero<2>();
    r.zero<3>();
    for (int64_t k = 0; k < steps; k++) {
        const uint8_t* rows = left.rows + k * step;
        const int64_t lines = k * step / 4 * right.line;
        r.load<4>(rows, left.row);
        r.load<6>(right.first + lines, right.line);
        r.load<5>(rows + left.apart, left.row);
        r.load<7>(right.second + lines, right.line);
        r.multiply<0, 4, 6, true>();
        r.multiply<1, 5, 6, true>();
        r.multiply<2, 4, 7, true>();
        r.multiply<3, 5, 7, true>();
    }
    r.store<0>(sums->upper[0]);
    r.store<1>(sums->lower[0]);
    r.store<2>(sums->upper[1]);
    r.store<3>(sums->lower[1]);
}

// Elements of one product: as many as 64 bytes hold of equal parts of a row.
int64_t step_of(int64_t d) {
    int64_t step = TILE_BYTES;
    while (d % step) step -= 16;
    return step;
}

// The first of so many cells of values that lie one behind the other; elsewhere they are copied.
const uint8_t* one_run(const KvTile& tile, int64_t cells, int64_t bytes, uint8_t* together) {
    const uint8_t* first = (const uint8_t*)tile.v[0];
    int64_t c = 1;
    while (c < cells && tile.v[c] == first + c * bytes) c++;
    if (c == cells) return first;
    for (c = 0; c < cells; c++) memcpy(together + c * bytes, tile.v[c], size_t(bytes));
    return together;
}

}  // namespace

void scores_of_codes(const AttnParams& p, const KvTile& tile, const uint8_t* q, int64_t rows, int64_t cells, float* s) {
    F scale[KV_CELLS], minimum[KV_CELLS];
    for (int64_t c = 0; c < cells; c++) load_f16_pairs(tile.kp[c], scale + c, minimum + c);
    const int64_t row = query_bytes(KV_BYTES, false, p.dpad), step = step_of(p.dpad);
    const Blocks blocks(rows, TILE_ROWS);
    Tiles registers(blocks.rows, step);
    Sums sums;
    for (int64_t b = 0; b < blocks.number; b++) {
        const Left left{q + blocks.first(b) * row, row, p.dpad};
        float* to = s + blocks.first(b) * KV_TILE;
        for (int64_t c = 0; c < cells; c += 2) {
            const int64_t number = cells - c < 2 ? 1 : 2;
            multiply(registers, left, {(const uint8_t*)tile.k[c], (const uint8_t*)tile.k[c + number - 1], 64}, step, p.dpad / step, &sums);
            for (int64_t r = 0; r < blocks.rows; r++) {
                QueryTail tail;
                memcpy(&tail, left.rows + r * row + 2 * p.dpad, sizeof tail);
                for (int64_t n = 0; n < number; n++)
                    fstore(to + r * KV_TILE + (c + n) * 16,
                           score_of(iload(sums.upper[n][r]), iload(sums.lower[n][r]), tail, scale[c + n], minimum[c + n]));
            }
        }
    }
}

void values_of_codes(const AttnParams& p, const KvTile& tile, const int8_t* weights, int64_t rows, int64_t cells, const float* s, uint8_t* together,
                     float* acc) {
    const int64_t steps = (cells + CELLS - 1) / CELLS, line = 4 * p.dpad;
    const uint8_t* values = one_run(tile, steps * CELLS, 16 * p.dpad, together);
    const Blocks blocks(rows, TILE_ROWS);
    Tiles registers(blocks.rows, TILE_BYTES);
    Sums sums;
    for (int64_t b = 0; b < blocks.number; b++) {
        const int64_t first = blocks.first(b);
        const Left left{(const uint8_t*)weights + first * 2 * KV_TILE, 2 * KV_TILE, KV_TILE};
        for (int64_t col = 0; col < p.vpad; col += 32) {
            const int64_t number = p.vpad - col < 32 ? 1 : 2;
            const uint8_t* at = values + col * 4;
            multiply(registers, left, {at, at + (number - 1) * 64, line}, TILE_BYTES, steps, &sums);
            for (int64_t r = 0; r < blocks.rows; r++) {
                WeightTail tail;
                memcpy(&tail, s + (first + r) * KV_TILE, sizeof tail);
                for (int64_t n = 0; n < number; n++)
                    fstore(acc + (first + r) * p.vpad + col + n * 16, value_of(iload(sums.upper[n][r]), iload(sums.lower[n][r]), tail));
            }
        }
    }
}

}  // namespace TK_ISA
}  // namespace tk
