// The products of one attention tile on AMX, for queries, keys and values of bfloat16.
//
// Cells are laid out as tile registers take them: 32 elements of 16 keys are one tile, 16 elements of two cells of values too. What is
// left of a row or of the tokens is a smaller step, in registers of its own size. A row's sums are those of these steps in ascending
// order, whatever rows stand beside it: tokens that it does not see have probability 0 and add nothing.
#include "amx/attention.h"

#include "amx/registers.h"

namespace tk {
namespace TK_ISA {
namespace {

constexpr int64_t STEP = 32;          // elements, or tokens
constexpr int64_t BESIDE = 3;         // blocks of rows that are multiplied together

// g++ 12 takes no template's numbers of registers in its intrinsics.
template <int R>
TK_INLINE void load(const void* from, int64_t apart) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(apart), "i"(R) : "memory");
}
template <int SUMS, int LEFT, int RIGHT>
TK_INLINE void multiply() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(LEFT), "i"(RIGHT));
}

// Registers: 0, 1, 2 and 7 sums, 3 and 4 the operands of a step, 5 and 6 those of the last one, of `rest` elements.
void configure(int64_t rows, int64_t rest) {
    TileConfig c;
    const auto shape = [&](int i, int64_t lines, int64_t bytes) { c.rows[i] = uint8_t(lines), c.bytes[i] = uint16_t(bytes); };
    for (int i = 0; i < 4; i++) shape(i, rows, 64);
    shape(7, rows, 64);
    shape(4, 16, 64);
    const int64_t pairs = (rest + 1) / 2;
    if (rest) shape(5, rows, pairs * 4), shape(6, pairs, 64);
    load_config(c);
    written();
}

// What one step takes of the other operand: its lines, and how many bytes they are apart.
struct Lines {
    const uint8_t* at;
    int64_t apart;
};

// A step of one block of rows by M times 16 columns. LEFT and RIGHT: the registers of the operands.
template <int LEFT, int RIGHT, int M, class Right>
TK_INLINE void wide_step(const uint16_t* a, int64_t lda, const Right& right, int64_t k) {
    load<LEFT>(a + k * STEP, lda * 2);
    TK_EACH(m, M, {
        const Lines b = right(k, m);
        load<RIGHT>(b.at, b.apart);
        multiply<m == 3 ? 7 : m, LEFT, RIGHT>();
    });
}

// One block of rows by M times 16 columns: products that do not wait for each other. right(k, m): the lines of step k for columns m.
template <int M, class Right>
void wide(const uint16_t* a, int64_t lda, const Right& right, int64_t whole, bool rest, float* out, int64_t ldo) {
    _tile_zero(0);
    if (M > 1) _tile_zero(1);
    if (M > 2) _tile_zero(2);
    if (M > 3) _tile_zero(7);
    for (int64_t k = 0; k < whole; k++) wide_step<3, 4, M>(a, lda, right, k);
    if (rest) wide_step<5, 6, M>(a, lda, right, whole);
    _tile_stored(0, out, ldo * 4);
    if (M > 1) _tile_stored(1, out + 16, ldo * 4);
    if (M > 2) _tile_stored(2, out + 32, ldo * 4);
    if (M > 3) _tile_stored(7, out + 48, ldo * 4);
}

// A step of N blocks of rows, which begin at rows `first`, by 16 columns.
template <int LEFT, int RIGHT, int N, class Right>
TK_INLINE void deep_step(const uint16_t* a, const int64_t* first, int64_t lda, const Right& right, int64_t k) {
    const Lines b = right(k, 0);
    load<RIGHT>(b.at, b.apart);
    TK_EACH(n, N, {
        load<LEFT>(a + first[n] * lda + k * STEP, lda * 2);
        multiply<n, LEFT, RIGHT>();
    });
}

template <int N, class Right>
void deep(const uint16_t* a, const int64_t* first, int64_t lda, const Right& right, int64_t whole, bool rest, float* out, int64_t ldo) {
    _tile_zero(0);
    _tile_zero(1);
    if (N > 2) _tile_zero(2);
    for (int64_t k = 0; k < whole; k++) deep_step<3, 4, N>(a, first, lda, right, k);
    if (rest) deep_step<5, 6, N>(a, first, lda, right, whole);
    _tile_stored(0, out + first[0] * ldo, ldo * 4);
    _tile_stored(1, out + first[1] * ldo, ldo * 4);
    if (N > 2) _tile_stored(2, out + first[2] * ldo, ldo * 4);
}

// All rows by `columns` times 16 columns.
template <class Right>
void product(const Blocks& blocks, const uint16_t* a, int64_t lda, const Right& right, int64_t columns, int64_t whole, bool rest, float* out,
             int64_t ldo) {
    for (int64_t i = 0; i < blocks.number; i += BESIDE) {
        const int64_t left = blocks.number - i;
        int64_t first[BESIDE];
        for (int64_t j = 0; j < BESIDE && j < left; j++) first[j] = blocks.first(i + j);
        for (int64_t c = 0, n; c < columns; c += n) {
            const auto from = [&](int64_t k, int64_t m) __attribute__((always_inline)) { return right(k, c + m); };
            typedef decltype(from) From;
            float* to = out + c * 16;
            n = left > 1 ? 1 : columns - c < 4 ? columns - c : 4;
            if (left > 1) {
                (left > 2 ? deep<3, From> : deep<2, From>)(a, first, lda, from, whole, rest, to, ldo);
                continue;
            }
            const auto block = n > 3 ? wide<4, From> : n > 2 ? wide<3, From> : n > 1 ? wide<2, From> : wide<1, From>;
            block(a + first[0] * lda, lda, from, whole, rest, to + first[0] * ldo, ldo);
        }
    }
}

}  // namespace

void scores_tiles(const AttnParams& p, const KvTile& tile, const uint16_t* q, int64_t rows, int64_t tokens, float* s) {
    const Blocks blocks(rows, 16);
    configure(blocks.rows, p.dpad % STEP ? p.dpad % STEP : tokens % STEP);
    const auto right = [&](int64_t k, int64_t c) __attribute__((always_inline)) { return Lines{(const uint8_t*)tile.k[c] + k * 1024, 64}; };
    product(blocks, q, p.dpad, right, (tokens + 15) / 16, p.dpad / STEP, p.dpad % STEP, s, KV_TILE);
}

void values_tiles(const AttnParams& p, const KvTile& tile, const uint16_t* probs, int64_t rows, int64_t tokens, uint8_t* together, float* acc) {
    const Blocks blocks(rows, 16);
    const int64_t line = p.dpad * 4;
    if (p.dpad % STEP) configure(blocks.rows, tokens % STEP);
    const uint8_t* steps[KV_TILE / STEP];
    for (int64_t i = 0; i * STEP < tokens; i++) {
        const uint8_t *first = (const uint8_t*)tile.v[2 * i], *second = (const uint8_t*)tile.v[2 * i + 1];
        steps[i] = first;
        if (tokens - i * STEP <= 16 || second == first + 8 * line) continue;
        steps[i] = together + i * 16 * line;
        memcpy(together + i * 16 * line, first, size_t(8 * line));
        memcpy(together + (i * 16 + 8) * line, second, size_t(8 * line));
    }
    written();
    const auto right = [&](int64_t k, int64_t c) __attribute__((always_inline)) { return Lines{steps[k] + c * 64, line}; };
    product(blocks, probs, KV_TILE, right, p.vpad / 16, tokens / STEP, tokens % STEP, acc, p.vpad);
    _tile_release();
}

}  // namespace TK_ISA
}  // namespace tk
