// Weights into the tiles of kernels/cpu/ops.h, in one pass over what holds them: plain matrices, a code a byte, or the words that
// checkpoints keep codes in. Blocks of eight tiles are shared by threads; a block reads whole lines of words.
#include "packing/pack_tiles.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <vector>

#include "system/pool.h"

namespace tk {
namespace {

constexpr int64_t BLOCK = 8;  // tiles

using Bytes = uint8_t __attribute__((vector_size(16)));
using Pairs = uint16_t __attribute__((vector_size(16)));
using Quads = uint32_t __attribute__((vector_size(16)));

// Lanes of two vectors, those of the second counted on from the first.
#if defined(__clang__)
#define TK_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define TK_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, decltype(a){__VA_ARGS__})
#endif

template <class V>
inline V load(const void* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}
template <class V>
inline void store(void* to, V v) { std::memcpy(to, &v, sizeof v); }

// The halves of two vectors, lane beside lane; every other lane of both.
inline Bytes low(Bytes a, Bytes b) { return TK_SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23); }
inline Bytes high(Bytes a, Bytes b) { return TK_SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31); }
inline Pairs low(Pairs a, Pairs b) { return TK_SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
inline Pairs high(Pairs a, Pairs b) { return TK_SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15); }
inline Quads evens(Quads a, Quads b) { return TK_SHUFFLE(a, b, 0, 2, 4, 6); }
inline Quads odds(Quads a, Quads b) { return TK_SHUFFLE(a, b, 1, 3, 5, 7); }

// Eight codes of a word, ascending, as ops.h has four and four of eight columns in four bytes.
inline uint32_t halves(uint32_t word) {
    const uint32_t low = word & 0xFFFF, high = word >> 16;
    const uint32_t a = (low | low << 8) & 0x00FF00FF, b = (high | high << 8) & 0x00FF00FF;
    return ((a | a << 4) & 0x0F0F0F0F) | (((b | b << 4) & 0x0F0F0F0F) << 4);
}

struct Job {
    const Matrix& to;
    const PackSource& from;
    uint8_t* data;      // of tile `first` on
    int64_t first = 0;

    uint8_t* tile(int64_t t) const { return data + (t - first) * to.tile_bytes(); }
    const uint8_t* bytes() const { return static_cast<const uint8_t*>(from.codes); }
    const uint32_t* words() const { return static_cast<const uint32_t*>(from.codes); }
    int64_t column(int64_t k) const { return from.perm ? from.perm[k] : k; }

    uint32_t code(int64_t r, int64_t k) const {
        const int64_t c = column(k), bit = c * to.bits;
        if (from.layout == CODE_BYTES) return uint8_t(bytes()[r * from.ld + c] ^ from.flip);
        if (from.layout == CODE_AWQ) {
            static const int PLACE[8] = {0, 4, 1, 5, 2, 6, 3, 7};
            return words()[c * from.ld + r / 8] >> (4 * PLACE[r % 8]) & 15;
        }
        const uint32_t mask = (1u << to.bits) - 1;
        const int64_t at = from.layout == CODE_ROWS ? r * from.ld + bit / 32 : bit / 32 * from.ld + r;
        return words()[at] >> (bit % 32) & mask;
    }

    void header(int64_t t, int64_t g) const {
        const int64_t item = to.dtype == F32 ? 4 : 2, count = std::min(LANES, to.rows - t * LANES);
        const int64_t other = to.minima ? item : 1, own = g / from.repeat;
        uint8_t* out = tile(t) + g * to.group_bytes();
        std::memset(out, 0, size_t(to.header_bytes()));
        const auto* scales = static_cast<const uint8_t*>(from.scales);
        const auto* offsets = static_cast<const uint8_t*>(from.offsets);
        for (int64_t r = 0; r < count; r++) {
            const int64_t at = (t * LANES + r) * from.ld_scales + own;
            std::memcpy(out + r * item, scales + at * item, size_t(item));
            std::memcpy(out + LANES * item + r * other, offsets + at * other, size_t(other));
        }
    }

    // 64 bytes of codes from column k on: eight columns in 4 bits, four in 8.
    void any(int64_t t, int64_t k, uint8_t* out) const {
        std::memset(out, 0, 64);
        const int64_t count = std::min(LANES, to.rows - t * LANES);
        for (int64_t r = 0; r < count; r++)
            for (int64_t j = 0; j < 4; j++) {
                uint32_t c = code(t * LANES + r, k + j);
                if (to.bits == 4) c |= code(t * LANES + r, k + 4 + j) << 4;
                out[4 * r + j] = uint8_t(c);
            }
    }

    void plain_bytes(int64_t t, int64_t k, uint8_t* out) const {
        const uint8_t* row = bytes() + t * LANES * from.ld + k;
        const uint32_t flip = from.flip * 0x01010101u;
        for (int64_t r = 0; r < LANES; r++, row += from.ld) {
            uint32_t low, high = 0;
            std::memcpy(&low, row, 4);
            if (to.bits == 4) std::memcpy(&high, row + 4, 4);
            const uint32_t both = (low ^ flip) | high << 4;
            std::memcpy(out + 4 * r, &both, 4);
        }
    }

    void row_words(int64_t t, int64_t k, uint8_t* out) const {
        const uint32_t* row = words() + t * LANES * from.ld + k * to.bits / 32;
        for (int64_t r = 0; r < LANES; r++, row += from.ld) {
            const uint32_t both = to.bits == 4 ? halves(*row) : *row;
            std::memcpy(out + 4 * r, &both, 4);
        }
    }

    void turned_words(int64_t t, int64_t k, uint8_t* out) const {
        uint32_t both[LANES] = {};
        if (!from.perm) {
            const uint32_t* row = words() + k * to.bits / 32 * from.ld + t * LANES;
            for (int64_t r = 0; r < LANES; r++) both[r] = to.bits == 4 ? halves(row[r]) : row[r];
        } else {
            const uint32_t mask = (1u << to.bits) - 1;
            for (int64_t i = 0; i < 32 / to.bits; i++) {
                const int64_t bit = int64_t(from.perm[k + i]) * to.bits;
                const uint32_t* row = words() + bit / 32 * from.ld + t * LANES;
                const int right = int(bit % 32), left = int(i % 4 * 8 + i / 4 * 4);
                for (int64_t r = 0; r < LANES; r++) both[r] |= (row[r] >> right & mask) << left;
            }
        }
        std::memcpy(out, both, 64);
    }

    // Two tiles from column k on. Bytes of a word are rows 0 2 4 6 of AWQ's order in low bits, the rows between in high ones.
    void awq_words(int64_t t, int64_t k, uint8_t* first, uint8_t* second) const {
        Bytes even[4], odd[4];
        for (int64_t j = 0; j < 4; j++) {
            const auto a = load<Bytes>(words() + (k + j) * from.ld + t * 2), b = load<Bytes>(words() + (k + 4 + j) * from.ld + t * 2);
            even[j] = (a & 15) | b << 4;
            odd[j] = a >> 4 | (b & 0xF0);
        }
        Quads e[4], o[4];
        interleave(even, e);
        interleave(odd, o);
        for (int64_t q = 0; q < 4; q++) {  // of a word: e has rows 0 4 1 5, o rows 2 6 3 7
            uint8_t* out = (q < 2 ? first : second) + q % 2 * 32;
            store(out, evens(e[q], o[q]));
            store(out + 16, odds(e[q], o[q]));
        }
    }

    static void interleave(const Bytes (&in)[4], Quads (&out)[4]) {
        const Pairs a = Pairs(low(in[0], in[1])), b = Pairs(low(in[2], in[3]));
        const Pairs c = Pairs(high(in[0], in[1])), d = Pairs(high(in[2], in[3]));
        out[0] = Quads(low(a, b));
        out[1] = Quads(high(a, b));
        out[2] = Quads(low(c, d));
        out[3] = Quads(high(c, d));
    }

    void codes(int64_t t, int64_t k, uint8_t* out) const {
        const bool whole = (t + 1) * LANES <= to.rows;
        if (whole && from.layout == CODE_GPTQ) return turned_words(t, k, out);
        if (whole && from.layout == CODE_BYTES && !from.perm) return plain_bytes(t, k, out);
        if (whole && from.layout == CODE_ROWS && !from.perm) return row_words(t, k, out);
        any(t, k, out);
    }

    void integers(int64_t block) const {
        const int64_t first = block * BLOCK, last = std::min(first + BLOCK, to.tiles()), step = 32 / to.bits;
        for (int64_t g = 0; g < to.groups(); g++) {
            const int64_t begin = g * to.group_bytes() + to.header_bytes();
            for (int64_t t = first; t < last; t++) header(t, g);
            for (int64_t t = first; t < last && from.layout != CODE_AWQ; t++)
                for (int64_t i = 0; i < to.group / step; i++) codes(t, g * to.group + i * step, tile(t) + begin + i * 64);
            if (from.layout != CODE_AWQ) continue;
            for (int64_t i = 0; i < to.group / step; i++)
                for (int64_t t = first; t < last; t += 2) {
                    const int64_t k = g * to.group + i * step, at = begin + i * 64;
                    if ((t + 2) * LANES <= to.rows && !from.perm) awq_words(t, k, tile(t) + at, tile(t + 1) + at);
                    else for (int64_t u = t; u < last; u++) any(u, k, tile(u) + at);
                }
        }
    }

    // Bytes of the streams; the last one before a group stands in its header.
    void streams(int64_t block) const {
        const int64_t width = to.group * to.bits / 8;
        for (int64_t t = block * BLOCK; t < std::min((block + 1) * BLOCK, to.tiles()); t++) {
            std::memset(tile(t), 0, size_t(to.tile_bytes()));
            for (int64_t r = 0; r < std::min(LANES, to.rows - t * LANES); r++) {
                const int64_t row = t * LANES + r;
                const uint8_t* in = bytes() + row * from.ld * 4;
                for (int64_t g = 0; g < to.groups(); g++, in += width) {
                    uint8_t* out = tile(t) + g * to.group_bytes();
                    std::memcpy(out + 2 * r, static_cast<const uint16_t*>(from.scales) + row * from.ld_scales + g / from.repeat, 2);
                    if (g) out[32 + r] = in[-1];
                    for (int64_t k = 0; k < to.group / 8; k++)
                        std::memcpy(out + to.header_bytes() + (k * LANES + r) * to.bits, in + k * to.bits, size_t(to.bits));
                }
            }
        }
    }

    template <class T>
    void floats(int64_t block) const {
        const auto* in = static_cast<const T*>(from.codes);
        for (int64_t t = block * BLOCK; t < std::min((block + 1) * BLOCK, to.tiles()); t++) {
            T* out = reinterpret_cast<T*>(tile(t));
            const T* row = in + t * LANES * from.ld;
            const int64_t count = std::min(LANES, to.rows - t * LANES);
            if (count < LANES) std::memset(out, 0, size_t(to.tile_bytes()));
            int64_t k = 0;
            for (; count == LANES && k + 8 <= to.cols; k += 8) turn(row + k, out + k * LANES);
            for (; k < to.cols; k++)
                for (int64_t r = 0; r < count; r++) out[k * LANES + r] = row[r * from.ld + k];
        }
    }

    // Eight columns of sixteen rows.
    void turn(const uint16_t* in, uint16_t* out) const {
        for (int64_t half = 0; half < 2; half++) {
            Pairs v[8], w[8];
            for (int64_t r = 0; r < 8; r++) v[r] = load<Pairs>(in + (half * 8 + r) * from.ld);
            for (int round = 0; round < 3; round++) {
                for (int i = 0; i < 4; i++) {
                    w[2 * i] = low(v[i], v[i + 4]);
                    w[2 * i + 1] = high(v[i], v[i + 4]);
                }
                std::copy(w, w + 8, v);
            }
            for (int64_t k = 0; k < 8; k++) store(out + k * LANES + half * 8, v[k]);
        }
    }
    void turn(const uint32_t* in, uint32_t* out) const {
        for (int64_t r = 0; r < LANES; r++)
            for (int64_t k = 0; k < 8; k++) out[k * LANES + r] = in[r * from.ld + k];
    }

    void run(int64_t block) const {
        if (to.trellis) streams(block);
        else if (to.format == INT) integers(block);
        else if (to.dtype == F32) floats<uint32_t>(block);
        else floats<uint16_t>(block);
    }
};

int64_t blocks_of(const Matrix& to) { return (to.tiles() + BLOCK - 1) / BLOCK; }

// body(block), shared by threads.
template <class Body>
void for_blocks(int64_t blocks, int threads, const Body& body) {
    if (threads == 1 || blocks == 1) {
        for (int64_t b = 0; b < blocks; b++) body(b);
        return;
    }
    Pool pool(threads);
    struct Shared {
        const Body& body;
        Pool& pool;
        uint32_t blocks;
    } shared{body, pool, uint32_t(blocks)};
    pool.run(
        [](void* arg, int) {
            auto& s = *static_cast<Shared*>(arg);
            s.pool.chunks(0, s.blocks, [&](uint32_t b) { s.body(int64_t(b)); });
        },
        &shared, 1);
}

// 0, or the system's error number.
int write_all(int file, const uint8_t* data, int64_t size, int64_t at) {
    while (size > 0) {
        const ssize_t n = pwrite(file, data, size_t(size), off_t(at));
        if (n < 0 && errno != EINTR) return errno;
        if (n == 0) return ENOSPC;
        if (n > 0) data += n, size -= n, at += n;
    }
    return 0;
}

}  // namespace

void pack_tiles(const Matrix& to, const PackSource& from, int threads) {
    const Job job{to, from, const_cast<uint8_t*>(to.data)};
    for_blocks(blocks_of(to), threads, [&](int64_t b) { job.run(b); });
}

int write_tiles(const Matrix& to, const PackSource& from, int threads, int file, int64_t at) {
    std::atomic<int> failed{0};
    for_blocks(blocks_of(to), threads, [&](int64_t b) {
        thread_local std::vector<uint8_t> block;
        const int64_t first = b * BLOCK, count = std::min(BLOCK, to.tiles() - first);
        block.resize(size_t(count * to.tile_bytes()));
        if (failed) return;
        Job{to, from, block.data(), first}.run(b);
        if (const int error = write_all(file, block.data(), int64_t(block.size()), at + first * to.tile_bytes())) failed = error;
    });
    return failed;
}

}  // namespace tk
