// The table of one instruction set.
#include "linear/trellis.h"
#include "ops_isa.h"

namespace tk {
namespace TK_ISA {

extern const Ops table;

namespace {

#define TK_TEXT_(x) #x
#define TK_TEXT(x) TK_TEXT_(x)

int64_t linear_scratch(const Matrix& w) {
    if (w.trellis) return trellis_scratch(table, w);
    return w.format == INT ? linear_int_scratch(w) : linear_dense_scratch(w);
}

void linear(const Matrix& w, const Rows& in, int64_t count, int64_t t0, int64_t t1, const Store& to, void* scratch) {
    if (w.trellis) return linear_trellis(table, w, in, count, t0, t1, to, scratch);
    (w.format == INT ? linear_int : linear_dense)(w, in, count, t0, t1, to, scratch);
}

void gated(const Matrix& gate, const Matrix& up, const Rows& in, int64_t count, int64_t t0, int64_t t1, const Store& to,
           void* scratch) {
    if (gate.trellis || up.trellis) return gated_trellis(table, gate, up, in, count, t0, t1, to, scratch);
    (gate.format == INT ? gated_int : gated_dense)(gate, up, in, count, t0, t1, to, scratch);
}

void matrix_row(const Matrix& w, int64_t row, float scale, float* out) {
    (w.trellis ? trellis_row : w.format == INT ? int_row : dense_row)(w, row, scale, out);
}

// Registers of sums beside which the operands have room.
#if defined(__AVX512F__)
constexpr int SUMS = 12;
#else
constexpr int SUMS = 5;
#endif

int64_t int_products(int64_t rounds) {
    uint8_t from[64];
    for (int i = 0; i < 64; i++) from[i] = uint8_t(i % 16);
#if defined(TK_SHORT_SUMS)
    H sums[SUMS];
#else
    I sums[SUMS];
#endif
    TK_EACH(i, SUMS, sums[i] = izero(););
    for (int64_t round = 0; round < rounds; round++) {
        __asm__ volatile("" ::"r"(from) : "memory");  // no round's products are another's
        const B u = bload(from), s = bset4(from);
#if defined(TK_SHORT_SUMS)
        TK_EACH(i, SUMS, sums[i] = hdot(sums[i], u, s););
#else
        TK_EACH(i, SUMS, sums[i] = dot4(sums[i], u, s););
#endif
    }
    int32_t kept[16];
    TK_EACH(i, SUMS, {
        istore(kept, sums[i]);
        __asm__ volatile("" ::"r"(kept) : "memory");
    });
    return rounds * SUMS * 128;
}

}  // namespace

#if defined(TK_READS_CODES)
constexpr auto bytes = kv_bytes;
constexpr auto codes = query_codes;
#else
constexpr decltype(Ops::kv_bytes) bytes = nullptr;
constexpr decltype(Ops::query_codes) codes = nullptr;
#endif

const Ops table = {
    TK_TEXT(TK_ISA),
#if defined(TK_BF16_DOT)
    1,
#else
    0,
#endif
#if defined(TK_READS_CODES)
    1,
#else
    0,
#endif
    linear_scratch, linear, gated, linear_back, matrix_row, quantize, round_rows, code_rows, squares, fit_scales, trellis_rows, rms_norm, layer_norm, add_scaled, rope, hadamard, activate,
    xielu, multiply, to_bf16, kv_write, kv_cell, kv_load, bytes, codes, key_cell, attn_tile, attn_merge, attn_finish, convolve, recur,
    row_max, at_least, sum_exp, scale_logits, int_products,
};

}  // namespace TK_ISA
}  // namespace tk
