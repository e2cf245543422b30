// Eight registers of 16 rows of 64 bytes, and products of whole ones (AMX). Where the compiler makes no code for them, they are
// arrays of the object, and products run lane by lane as the processor's do: tests run the kernels so on any machine.
//
// Registers 0 … 3 hold sums, 4 and 5 rows of the left operand, 6 and 7 columns of the right one.
#pragma once

#include "simd/base.h"
#if defined(__AMX_INT8__)
#include "amx/registers.h"
#endif

namespace tk {
namespace TK_ISA {
namespace {

constexpr int64_t TILE_ROWS = 16, TILE_BYTES = 64;

#if defined(__AMX_INT8__)

// Between its birth and its end the thread has tile registers: so many rows of sums, so many bytes of columns a step. Assembly, since
// g++ 12 lets its intrinsics pass stores to the memory that they read.
class Tiles {
public:
    Tiles(int64_t rows, int64_t step) {
        TileConfig shape;
        for (int i = 0; i < 8; i++) {
            shape.bytes[i] = uint16_t(i == 4 || i == 5 ? step : TILE_BYTES);
            shape.rows[i] = uint8_t(i < 6 ? rows : step / 4);
        }
        load_config(shape);
    }
    ~Tiles() { __asm__ volatile("tilerelease" ::: "memory"); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;

    template <int R>
    inline __attribute__((always_inline)) void zero() { __asm__ volatile("tilezero %%tmm%c0" ::"i"(R)); }
    template <int R>
    inline __attribute__((always_inline)) void load(const void* from, int64_t stride) {
        __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(R) : "memory");
    }
    template <int R>
    inline __attribute__((always_inline)) void store(void* to) {
        __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(TILE_BYTES), "i"(R) : "memory");
    }
    // sums += left (int8) times right (uint8 where UNSIGNED, else int8)
    template <int SUMS, int LEFT, int RIGHT, bool UNSIGNED>
    inline __attribute__((always_inline)) void multiply() {
        if (UNSIGNED) __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(LEFT), "i"(RIGHT));
        else __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(LEFT), "i"(RIGHT));
    }
};

#else

class Tiles {
public:
    Tiles(int64_t rows, int64_t step) {
        for (int i = 0; i < 8; i++) {
            bytes_[i] = i == 4 || i == 5 ? step : TILE_BYTES;
            rows_[i] = i < 6 ? rows : step / 4;
        }
    }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;

    template <int R>
    void zero() { memset(data_[R], 0, sizeof data_[R]); }
    template <int R>
    void load(const void* from, int64_t stride) {
        zero<R>();
        for (int64_t i = 0; i < rows_[R]; i++) memcpy(data_[R][i], (const uint8_t*)from + i * stride, size_t(bytes_[R]));
    }
    template <int R>
    void store(void* to) const {
        for (int64_t i = 0; i < rows_[R]; i++) memcpy((uint8_t*)to + i * TILE_BYTES, data_[R][i], size_t(bytes_[R]));
    }
    template <int SUMS, int LEFT, int RIGHT, bool UNSIGNED>
    void multiply() {
        for (int64_t i = 0; i < rows_[SUMS]; i++)
            for (int64_t k = 0; k < rows_[RIGHT]; k++)
                for (int64_t lane = 0; lane < 16; lane++) {
                    int32_t sum;
                    memcpy(&sum, data_[SUMS][i] + 4 * lane, 4);
                    for (int64_t j = 0; j < 4; j++) {
                        const uint8_t right = data_[RIGHT][k][4 * lane + j];
                        sum += int8_t(data_[LEFT][i][4 * k + j]) * (UNSIGNED ? int32_t(right) : int32_t(int8_t(right)));
                    }
                    memcpy(data_[SUMS][i] + 4 * lane, &sum, 4);
                }
    }

private:
    int64_t bytes_[8], rows_[8];
    uint8_t data_[8][TILE_ROWS][TILE_BYTES] = {};
};

#endif

}  // namespace
}  // namespace TK_ISA
}  // namespace tk
