// Linear with 4- and 8-bit group-quantized weights and int8 activations, for many tokens, by products of tiles.
//
// The numbers, and the sequence of float operations, are those of linear/int.cpp: results are equal bit for bit. Two tiles of weights
// go together. Some groups of their codes are unpacked into the first-level cache, as the right operand; blocks of up to 16
// tokens pass by: integer sums of each group go to memory, from where they are scaled and added to the floats. The two take
// turns, since the units for floats are half as fast while tiles are multiplied.
#include "amx/linear.h"

#include <type_traits>

#include "amx/tiles.h"

namespace tk {
namespace TK_ISA {
namespace {

constexpr int64_t FROM = 9;  // fewer tokens are as fast without tiles, or faster: they pass once by weights of theirs
constexpr int64_t PANEL = 256, LEAST = 64;  // tokens whose float sums wait in the second-level cache, beside
constexpr int64_t INPUTS = 1 << 20;         // so many bytes of their inputs
constexpr int64_t COLUMNS = 256;  // of the groups that are unpacked together, where a group is not wider
constexpr int64_t GROUPS = 4;     // unpacked together at most
constexpr int64_t NARROWEST = 32; // columns of a product
constexpr int64_t ROUNDS = 2;     // of groups that are unpacked together: weights are fetched so far ahead

// Columns of one product: as many as 64 bytes hold of equal parts of a group.
int64_t step_of(int64_t group) {
    for (int64_t step = TILE_BYTES; step >= NARROWEST; step -= 4)
        if (group % step == 0) return step;
    return 0;
}

int64_t together(const Matrix& w) {
    const int64_t n = COLUMNS / w.group;
    return n < 1 ? 1 : n < GROUPS ? n : GROUPS;
}

// What a pair of tiles is multiplied with, and where.
struct Work {
    const uint8_t* tile[2];  // at the groups in hand
    uint8_t* codes;          // [2][groups][group / 4][64]
    float *scales, *minima;  // [2][GROUPS][16]
    int32_t* sums;           // [GROUPS][2][16 tokens][16]
    float* y;                // [blocks * rows][2][16]
};

// Fetches a pair's weights into the first-level cache before they are unpacked, those of ROUNDS rounds on, or of the next pair. The core
// has few requests for memory under way at a time, so that they are spread over the round: half of the lines come with the unpacking, the
// others with products and sums. A burst of them would hold up what it stands before, and nothing would come meanwhile.
struct Ahead {
    const uint8_t *end[2], *next[2];    // of the pair's tiles, and the next pair
    const uint8_t *unpacking[2], *at[2];  // what the round fetches
    int64_t distance, left = 0, product = 0, token = 0;  // lines of each tile: left, with a product, with a token's sums

    Ahead(const Matrix& w, const uint8_t* const* tile, const uint8_t* a, const uint8_t* b) : next{a, b} {
        const int64_t bytes = w.tile_bytes(), most = ROUNDS * together(w) * w.group_bytes();
        distance = most < bytes ? most : bytes;
        for (int n = 0; n < 2; n++) end[n] = tile[n] + bytes;
    }
    // The round that begins at `tile`, of so many groups; of products and tokens in its first block, which fetches what is left.
    void begin(const Matrix& w, const uint8_t* const* tile, int64_t groups, int64_t products, int64_t tokens) {
        const int64_t half = groups * unpack_lines(w);
        left = (groups * w.group_bytes() + 63) / 64 - half;
        product = (left / 2 + products - 1) / products;
        token = (left / 2 + tokens - 1) / tokens;
        for (int n = 0; n < 2; n++) {
            const int64_t over = tile[n] + distance - end[n];
            unpacking[n] = over < 0 ? tile[n] + distance : next[n] + over;
            at[n] = unpacking[n] + half * 64;
        }
    }
    void step(int64_t lines) {
        for (; lines > 0 && left > 0; lines--, left--)
            for (int n = 0; n < 2; n++, at[n - 1] += 64) __builtin_prefetch(at[n]);
    }
    // Lines that are fetched while a group is unpacked.
    static int64_t unpack_lines(const Matrix& w) { return w.group * w.bits / 64; }
};

int64_t code_bytes(const Matrix& w) { return together(w) * w.group * LANES; }

Work work_of(void* scratch) {
    uint8_t* p = aligned(scratch);
    Work k = {};
    k.sums = (int32_t*)p;
    k.scales = (float*)(p + GROUPS * 2048);
    k.minima = k.scales + GROUPS * 32;
    k.y = k.minima + GROUPS * 32;
    k.codes = (uint8_t*)(k.y + (PANEL + 2 * TILE_ROWS) * 32);
    return k;
}

// The codes of one group as the product takes them: as they are beside minima, less their zeros without. A line at `ahead` is fetched with
// every other one that is read.
template <int BITS, bool MIN>
TK_INLINE void unpack(const uint8_t* from, I zeros, int64_t group, uint8_t* to, const uint8_t* ahead) {
    const B less = MIN ? izero() : BITS == 8 ? iset1(-0x7f7f7f80) : imul(iand(isub(izero(), zeros), iset1(255)), iset1(0x01010101));
    if (BITS == 8) {
        for (int64_t k = 0; k < group * LANES; k += 128, ahead += 64) {
            __builtin_prefetch(ahead);
            TK_EACH(j, 2, const B all = bload(from + k + 64 * j); bstore(to + k + 64 * j, MIN ? all : badd(all, less)););
        }
        return;
    }
    for (int64_t k = 0; k < group * LANES; k += 256, ahead += 64) {
        __builtin_prefetch(ahead);
        TK_EACH(j, 2, {
            const B both = bload(from + k / 2 + 64 * j), low = low_nibbles(both), high = high_nibbles(both);
            bstore(to + k + 128 * j, MIN ? low : badd(low, less));
            bstore(to + k + 128 * j + 64, MIN ? high : badd(high, less));
        });
    }
}

template <int BITS, bool MIN>
void unpack_groups(const Matrix& w, Work& k, int64_t groups, const Ahead& ahead) {
    const int64_t header = w.header_bytes(), lines = Ahead::unpack_lines(w);
    for (int64_t n = 0; n < 2; n++)
        for (int64_t g = 0; g < groups; g++, k.tile[n] += w.group_bytes()) {
            const uint8_t* h = k.tile[n];
            fstore(k.scales + (n * GROUPS + g) * 16, header_floats(h, w.dtype, 0));
            if (MIN) fstore(k.minima + (n * GROUPS + g) * 16, header_floats(h, w.dtype, 1));
            const I zeros = BITS == 4 && !MIN ? load_u8(header_zeros(h, w.dtype)) : izero();
            unpack<BITS, MIN>(h + header, zeros, w.group, k.codes + (n * groups + g) * w.group * LANES,
                              ahead.unpacking[n] + g * lines * 64);
        }
}

// One group of the block of tokens that begins at a, into sums R and R + 1. FETCH: while lines are left.
template <int R, bool MIN, bool FETCH>
TK_INLINE void product(Tiles& r, int64_t group, int64_t step, const uint8_t* left, const uint8_t* right, const int8_t* a, int64_t lda,
                       Ahead& ahead) {
    r.zero<R>();
    r.zero<R + 1>();
    for (int64_t c = 0; c < group; c += step) {
        r.load<4>(a + c, lda);
        r.load<6>(left + c * LANES, TILE_BYTES);
        r.multiply<R, 4, 6, MIN>();
        r.load<7>(right + c * LANES, TILE_BYTES);
        r.multiply<R + 1, 4, 7, MIN>();
        if (FETCH) ahead.step(ahead.product);
    }
}

template <int R>
TK_INLINE void keep(Tiles& r, int32_t* d) {
    r.store<R>(d);
    r.store<R + 1>(d + 256);
}

// Integer sums of `groups` groups for the block of tokens that begins at a. They are stored when the next group's products are on
// their way: by then these have come out of the unit, and their stores hold up nobody.
template <bool MIN, bool FETCH>
void products(Tiles& r, const Matrix& w, const Work& k, int64_t groups, int64_t step, const int8_t* a, int64_t lda, Ahead& ahead) {
    const int64_t group = w.group, bytes = group * LANES;
    const uint8_t *left = k.codes, *right = left + groups * bytes;
    int32_t* d = k.sums;
    for (int64_t g = 0; g < groups; g++, a += group, left += bytes, right += bytes, d += 512) {
        if (g % 2 == 0) {
            product<0, MIN, FETCH>(r, group, step, left, right, a, lda, ahead);
            if (g) keep<2>(r, d - 512);
        } else {
            product<2, MIN, FETCH>(r, group, step, left, right, a, lda, ahead);
            keep<0>(r, d - 512);
        }
    }
    if (groups % 2) keep<0>(r, d - 512);
    else keep<2>(r, d - 512);
}

// The sums of G groups of one block of `rows` tokens, scaled, into y. Meanwhile inputs from `next` on are fetched, and weights.
template <int G, bool MIN, bool FETCH>
void settle(const Work& k, const float* sa, const int32_t* sums, int64_t lds, int64_t rows, float* y, const int8_t* next, int64_t lda,
            Ahead& ahead) {
    const int32_t* d = k.sums;
    F s[2 * G], low[2 * G];
    TK_EACH(i, 2 * G, s[i] = fload(k.scales + (i / G * GROUPS + i % G) * 16););
    if (MIN) TK_EACH(i, 2 * G, low[i] = fload(k.minima + (i / G * GROUPS + i % G) * 16););
    for (int64_t t = 0; t < rows; t++, d += 16, sa += lds, sums += lds, y += 32, next += lda) {
        F p = fload(y), q = fload(y + 16);
        if (FETCH) ahead.step(ahead.token);
        TK_EACH(g, G, {
            __builtin_prefetch(next + g * 64);
            const F x = fset1(sa[g]);
            p = fma(f_of(iload(d + g * 512)), fmul(s[g], x), p);
            q = fma(f_of(iload(d + g * 512 + 256)), fmul(s[G + g], x), q);
            if (MIN) {
                const F sum = fmul(x, f_of(iset1(sums[g])));
                p = fma(low[g], sum, p);
                q = fma(low[G + g], sum, q);
            }
        });
        fstore(y, p);
        fstore(y + 16, q);
    }
}

template <int G, bool MIN>
void pass(Tiles& r, const Matrix& w, const Work& k, const Rows& in, const Blocks& blocks, int64_t group, int64_t step, Ahead& ahead) {
    const int8_t *q = in.q + group * w.group, *a = q;
    for (int64_t i = 0; i < blocks.number; i++) {
        const int64_t x = blocks.first(i) * in.lds + group;
        const int8_t* next = i + 1 < blocks.number ? q + blocks.first(i + 1) * in.ldq : q + G * w.group;
        const auto block = [&](auto fetch) __attribute__((always_inline)) {
            products<MIN, fetch>(r, w, k, G, step, a, in.ldq, ahead);
            settle<G, MIN, fetch>(k, in.scale + x, in.sum + x, in.lds, blocks.rows, k.y + i * blocks.rows * 32, next, in.ldq, ahead);
        };
        if (ahead.left > 0) block(std::true_type());
        else block(std::false_type());
        a = next;
    }
}

// All groups of the pair in k.tile for the tokens; result in k.y. `a` and `b`: the pair that comes next.
template <int BITS, bool MIN>
void pair(Tiles& r, const Matrix& w, Work k, const Rows& in, const Blocks& blocks, int64_t step, const uint8_t* a, const uint8_t* b) {
    memset(k.y, 0, size_t(blocks.number * blocks.rows * 128));
    Ahead ahead(w, k.tile, a, b);
    const int64_t groups = w.groups(), most = together(w);
    for (int64_t g = 0, n; g < groups; g += n) {
        n = groups - g < most ? groups - g : most;
        ahead.begin(w, k.tile, n, n * w.group / step, blocks.rows);
        unpack_groups<BITS, MIN>(w, k, n, ahead);
        switch (n) {
            case 4: pass<4, MIN>(r, w, k, in, blocks, g, step, ahead); break;
            case 3: pass<3, MIN>(r, w, k, in, blocks, g, step, ahead); break;
            case 2: pass<2, MIN>(r, w, k, in, blocks, g, step, ahead); break;
            default: pass<1, MIN>(r, w, k, in, blocks, g, step, ahead);
        }
    }
}

void any_pair(Tiles& r, const Matrix& w, const Work& k, const Rows& in, const Blocks& blocks, int64_t step, const uint8_t* a,
              const uint8_t* b) {
    if (w.bits == 4) (w.minima ? pair<4, true> : pair<4, false>)(r, w, k, in, blocks, step, a, b);
    else (w.minima ? pair<8, true> : pair<8, false>)(r, w, k, in, blocks, step, a, b);
}

// body(tiles, blocks, rows, their store) for panels of tokens as equal as can be
template <class Body>
void each_panel(const Matrix& w, const Rows& in, int64_t count, const Store& to, int64_t step, Body&& body) {
    const int64_t fit = INPUTS / w.cols, widest = fit < LEAST ? LEAST : fit < PANEL ? fit : PANEL;
    for (int64_t t = 0, n; t < count; t += n) {
        n = block_at(t, count, widest);
        const Blocks blocks(n, TILE_ROWS);
        Tiles registers(blocks.rows, step);
        body(registers, blocks, in.from(t), to.from(t));
    }
}

}  // namespace

bool tiled(const Matrix& w, int64_t count) {
    return w.format == INT && count >= FROM && step_of(w.group) > 0;
}

int64_t tiled_scratch(const Matrix& w) {
    if (!tiled(w, PANEL)) return 0;
    return 64 + GROUPS * 2048 + GROUPS * 256 + (PANEL + 2 * TILE_ROWS) * 128 + 2 * code_bytes(w);
}

void linear_tiled(const Matrix& w, const Rows& in, int64_t count, int64_t t0, int64_t t1, const Store& to, void* scratch) {
    const int64_t step = step_of(w.group), bytes = w.tile_bytes();
    each_panel(w, in, count, to, step, [&](Tiles& r, const Blocks& blocks, const Rows& rows, const Store& part) {
        Work k = work_of(scratch);
        for (int64_t tile = t0; tile < t1; tile += 2) {
            const bool two = tile + 1 < t1;
            k.tile[0] = w.data + tile * bytes;
            k.tile[1] = two ? k.tile[0] + bytes : k.tile[0];
            any_pair(r, w, k, rows, blocks, step, k.tile[0] + 2 * bytes, k.tile[0] + 3 * bytes);
            for (int64_t t = 0; t < blocks.count; t++) {
                const float* y = k.y + blocks.place(t) * 32;
                store_tile(part, t, tile, fload(y));
                if (two) store_tile(part, t, tile + 1, fload(y + 16));
            }
        }
    });
}

void gated_tiled(const Matrix& gate, const Matrix& up, const Rows& in, int64_t count, int64_t t0, int64_t t1, const Store& to,
                 void* scratch) {
    const int64_t step = step_of(gate.group), bytes = gate.tile_bytes();
    each_panel(gate, in, count, to, step, [&](Tiles& r, const Blocks& blocks, const Rows& rows, const Store& part) {
        Work k = work_of(scratch);
        for (int64_t tile = t0; tile < t1; tile++) {
            k.tile[0] = gate.data + tile * bytes;
            k.tile[1] = up.data + tile * bytes;
            any_pair(r, gate, k, rows, blocks, step, k.tile[0] + bytes, k.tile[1] + bytes);
            for (int64_t t = 0; t < blocks.count; t++) {
                const float* y = k.y + blocks.place(t) * 32;
                store_gated(part, t, tile, fload(y), fload(y + 16));
            }
        }
    });
}

}  // namespace TK_ISA
}  // namespace tk
