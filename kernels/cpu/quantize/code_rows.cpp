// Matrices of adapters to codes of 8 bits, in tiles. See CodeRun.
#include <cmath>
#include <vector>

#include "ops_isa.h"

namespace tk {
namespace TK_ISA {
namespace {

TK_INLINE float one_as(const void* x, int32_t dtype, int64_t i) {
    if (dtype == BF16) return bf16_to_float(((const uint16_t*)x)[i]);
    return dtype == F16 ? f16_to_float(((const uint16_t*)x)[i]) : ((const float*)x)[i];
}

// Codes of 16 rows and columns, a row's side by side, to where a tile has them, 128 more each.
TK_INLINE void put_codes(const int8_t* codes, uint8_t* to) {
    for (int64_t k = 0; k < 16; k += 4)
        for (int64_t row = 0; row < LANES; row++) {
            uint32_t four;
            memcpy(&four, codes + 16 * row + k, 4);
            four ^= 0x80808080u;
            memcpy(to + 16 * k + 4 * row, &four, 4);
        }
}

TK_INLINE float per_step(float step) { return step > 1e-30f ? 1.0f / step : 0.0f; }

// An error is anything within half a step. `steps`: their squares' sum, each of so many numbers.
float error_of(double steps, int64_t numbers, F squares) {
    const double size = hsum(squares);
    return size == 0 ? 0.0f : float(std::sqrt(steps * double(numbers) / 12 / size));
}

// A step for each row's group.
void by_groups(CodeRun& r) {
    const int64_t group = r.group;
    std::vector<float> gathered(r.perm ? size_t(LANES * group) : 0);
    uint8_t* to = r.codes;
    double steps = 0;
    F squares = fzero();
    for (int64_t tile = 0; tile < r.rows; tile += LANES)
        for (int64_t g = 0; g < r.cols; g += group) {
            const int64_t rows = r.rows - tile < LANES ? r.rows - tile : LANES;
            const void* x = r.x;
            int64_t at = tile * r.cols + g, ld = r.cols;
            int32_t dtype = r.dtype;
            const float* own = r.factors && !r.perm ? r.factors + g : nullptr;
            if (r.perm) {
                for (int64_t row = 0; row < rows; row++)
                    for (int64_t k = 0; k < group; k++) {
                        const int64_t from = r.perm[g + k];
                        const float v = one_as(r.x, r.dtype, (tile + row) * r.cols + from);
                        gathered[size_t(row * group + k)] = r.factors ? v * r.factors[from] : v;
                    }
                x = gathered.data(), at = 0, ld = group, dtype = F32;
            }
            const auto load = [&](int64_t row, int64_t k) {
                const F v = load_as(x, dtype, at + row * ld + k);
                return own ? fmul(v, fload(own + k)) : v;
            };
            uint16_t scales[32] = {};
            float factors[LANES] = {};
            for (int64_t row = 0; row < rows; row++) {
                F top = fzero();
                for (int64_t k = 0; k < group; k += 16) {
                    const F v = load(row, k);
                    top = fmax(top, fabs(v));
                    squares = fma(v, v, squares);
                }
                const uint32_t above = (float_to_bits(hmax(top) / 127.0f) + 0xffff) & ~0xffffu;  // the largest number has a code
                const float step = bits_to_float(above);
                scales[row] = uint16_t(above >> 16);
                factors[row] = per_step(step);
                steps += double(step) * double(step);
            }
            memcpy(to, scales, 64);
            to += 64;
            for (int64_t k = 0; k < group; k += 16, to += 256) {
                int8_t codes[256] = {};
                for (int64_t row = 0; row < rows; row++)
                    store_s8(codes + 16 * row, i_of(fmul(load(row, k), fset1(factors[row]))));
                put_codes(codes, to);
            }
        }
    r.error = error_of(steps, group, squares);
}

// A step for each column.
void by_columns(CodeRun& r) {
    const int64_t wide = pad16(r.cols), high = pad16(r.rows);
    double steps = 0;
    F squares = fzero();
    for (int64_t k = 0; k < wide; k += 16) {
        const auto load = [&](int64_t row) {
            const int64_t at = row * r.cols + k;
            const F factor = fset1(r.factors ? r.factors[row] : r.factor);
            if (k + 16 <= r.cols) return fmul(load_as(r.x, r.dtype, at), factor);
            float part[16] = {};
            for (int64_t i = 0; k + i < r.cols; i++) part[i] = one_as(r.x, r.dtype, at + i);
            return fmul(fload(part), factor);
        };
        F top = fzero();
        for (int64_t row = 0; row < r.rows; row++) {
            const F v = load(row);
            top = fmax(top, fabs(v));
            squares = fma(v, v, squares);
        }
        float factors[16];
        fstore(r.steps + k, fdiv(top, fset1(127.0f)));
        for (int64_t i = 0; i < 16; i++) {
            factors[i] = per_step(r.steps[k + i]);
            steps += double(r.steps[k + i]) * double(r.steps[k + i]);
        }
        const F per = fload(factors);
        for (int64_t tile = 0; tile < high; tile += LANES) {
            int8_t codes[256] = {};
            for (int64_t row = 0; row < LANES && tile + row < r.rows; row++)
                store_s8(codes + 16 * row, i_of(fmul(load(tile + row), per)));
            put_codes(codes, r.codes + tile * wide + 16 * k);
        }
    }
    r.error = error_of(steps, high, squares);
}

}  // namespace

void code_rows(CodeRun& r) { r.steps ? by_columns(r) : by_groups(r); }

}  // namespace TK_ISA
}  // namespace tk
