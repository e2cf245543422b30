// What the op families of one instruction set share: their declarations and the epilogues of linears.
#pragma once

#include "ops.h"
#include "simd/simd.h"

namespace tk {
namespace TK_ISA {

int64_t linear_int_scratch(const Matrix& w);
void linear_int(const Matrix& w, const Rows& in, int64_t count, int64_t t0, int64_t t1, const Store& to, void* scratch);
void gated_int(const Matrix& gate, const Matrix& up, const Rows& in, int64_t count, int64_t t0, int64_t t1,
               const Store& to, void* scratch);
void int_row(const Matrix& w, int64_t row, float scale, float* out);

int64_t linear_dense_scratch(const Matrix& w);
void linear_dense(const Matrix& w, const Rows& in, int64_t count, int64_t t0, int64_t t1, const Store& to, void* scratch);
void gated_dense(const Matrix& gate, const Matrix& up, const Rows& in, int64_t count, int64_t t0, int64_t t1,
                 const Store& to, void* scratch);
void dense_row(const Matrix& w, int64_t row, float scale, float* out);
void linear_back(const Matrix& w, const Rows& in, int64_t count, int64_t t0, int64_t t1, float* out, int64_t ldo);

void quantize(const float* x, const int32_t* perm, int64_t group, int64_t g0, int64_t g1, int8_t* q, float* scale,
              int32_t* sum);
void round_rows(const RoundRun& r, int64_t r0, int64_t r1, float* scratch);
void code_rows(CodeRun& r);
void squares(const SquaresRun& r, int64_t r0, int64_t r1);
void fit_scales(const FitRun& r, int64_t g0, int64_t g1);
void trellis_rows(const TrellisRun& r, int64_t r0, int64_t r1);
void rms_norm(const float* x, const float* w, int64_t n, float eps, float* out);
void layer_norm(const float* x, const float* w, const float* b, int64_t n, float eps, float* out);
void add_scaled(float* y, const float* x, float alpha, int64_t n);
void rope(float* x, const float* cos, const float* sin, int64_t rotary);
void hadamard(float* x, int64_t n);
void activate(float* x, int64_t n, int32_t activation);
void xielu(float* x, int64_t n, float above, float below, float slope);
void multiply(float* y, const float* x, int64_t n, int32_t activation);
void to_bf16(const float* x, uint16_t* out, int64_t n);

void kv_write(int32_t type, int64_t dpad, const float* k, const float* v, uint8_t* kc, uint8_t* vc, uint8_t* kp,
              uint8_t* vp, int64_t lane, int32_t clear_next);
void kv_cell(int64_t dpad, const float* k, const float* v, int64_t ld, uint8_t* kc, uint8_t* vc);
void kv_load(int32_t type, int64_t dpad, const uint8_t* kc, const uint8_t* vc, const uint8_t* kp, const uint8_t* vp,
             int32_t to_bf16, int64_t tokens, void* k_out, void* v_out);
void kv_bytes(int32_t type, int64_t dpad, const uint8_t* kc, const uint8_t* vc, int64_t tokens, uint8_t* k_out, uint8_t* v_out);
void query_codes(const float* x, int64_t dpad, uint8_t* out);
void key_cell(int64_t dpad, int32_t bf16, const void* values, void* keys);
void attn_tile(const AttnParams& p, const KvTile& tile, const void* q, int64_t rows, const int32_t* lo,
               const int32_t* hi, const AttnState& out, float* scratch);
void attn_merge(int64_t vpad, int64_t rows, const AttnState& into, const AttnState& part);
void attn_finish(int64_t vpad, float m, float l, const float* acc, const float* sink, float* out);

void convolve(const ConvRun& r);
void recur(const StateRun& r);

float row_max(const float* x, int64_t n, int64_t* index, int32_t* has_nan);
int64_t at_least(const float* x, int64_t n, float low, int32_t* ids);
double sum_exp(const float* x, int64_t n, float max, float scale);
void scale_logits(float* x, int64_t n, float scale, float softcap);

namespace {

TK_INLINE uint8_t* aligned(void* p) { return (uint8_t*)(((uintptr_t)p + 63) & ~(uintptr_t)63); }

// 16 numbers of a float type, from the i-th on.
TK_INLINE F load_as(const void* x, int32_t dtype, int64_t i) {
    if (dtype == BF16) return load_bf16((const uint16_t*)x + i);
    return dtype == F16 ? load_f16((const uint16_t*)x + i) : fload((const float*)x + i);
}

// The first n of 16 lanes; the others are zeros, or are not stored.
TK_INLINE F load_part(const float* p, int64_t n) {
    if (n >= 16) return fload(p);
    float v[16] = {};
    for (int64_t i = 0; i < n; i++) v[i] = p[i];
    return fload(v);
}

TK_INLINE void store_part(float* p, int64_t n, F x) {
    if (n >= 16) return fstore(p, x);
    float v[16];
    fstore(v, x);
    for (int64_t i = 0; i < n; i++) p[i] = v[i];
}

// Of a group of an INT tile: its scales (0) or minima (1), and its zeros.
TK_INLINE F header_floats(const uint8_t* h, int32_t dtype, int which) {
    if (dtype == F16) return load_f16((const uint16_t*)h + 16 * which);
    if (dtype == BF16) return load_bf16((const uint16_t*)h + 16 * which);
    if (dtype == ONES) return fset1(1.0f);
    return fload((const float*)h + 16 * which);
}

TK_INLINE const uint8_t* header_zeros(const uint8_t* h, int32_t dtype) { return h + (dtype == F32 ? 64 : 32); }

TK_INLINE bool same_shape(const Matrix& a, const Matrix& b) {
    return a.bits == b.bits && a.group == b.group && a.minima == b.minima && a.trellis == b.trellis && a.dtype == b.dtype && a.cols == b.cols;
}

// Tokens of the block that starts at t: blocks of at most `widest` are as equal as can be.
TK_INLINE int64_t block_at(int64_t t, int64_t count, int64_t widest) {
    const int64_t left = count - t, blocks = (left + widest - 1) / widest;
    return (left + blocks - 1) / blocks;
}

// Blocks of equal size, of at most `widest` tokens; the last one begins earlier where there are not tokens enough, and takes some once more.
struct Blocks {
    int64_t count, rows, number;
    Blocks(int64_t n, int64_t widest) : count(n), rows(block_at(0, n, widest)), number((n + rows - 1) / rows) {}
    int64_t first(int64_t i) const { return i + 1 < number ? i * rows : count - rows; }
    int64_t place(int64_t t) const { return t < (number - 1) * rows ? t : (number - 1) * rows + t - first(number - 1); }
};

// Fetches, while `steps` blocks of tokens are computed, what comes next: a share of the bytes of the next tiles (whoever will
// compute them; behind the last one it is in vain), and the places where a block's results go.
struct TilesAhead {
    const uint8_t *at, *end;
    int64_t share;

    TilesAhead(const uint8_t* data, int64_t bytes, int64_t steps) : at(data), end(data + bytes), share(bytes / steps + 64) {}
    void step() {
        const uint8_t* to = end - at < share ? end : at + share;
        for (; at < to; at += 64) fetch_to_l2(at);
    }
    static void results(const Store& to, int64_t t, int64_t m, int64_t tile) {
        for (int64_t i = t; i < t + m; i++) __builtin_prefetch(to.out + i * to.ld + tile * LANES, 1);
    }
};

// Fetches what a Store says is read later, spread over `steps` equal parts of a linear's work.
struct LaterAhead {
    const Later *part, *end;
    int64_t done = 0, share = 0;

    LaterAhead(const Store& to, int64_t steps) : part(to.later), end(to.later + to.laters) {
        int64_t bytes = 0;
        for (const Later* p = part; p < end; p++) bytes += p->bytes;
        if (steps > 0 && bytes) share = bytes / 64 / steps + 1;
    }
    void step(int64_t times) {
        for (int64_t lines = share * times; lines > 0 && part < end; lines--) {
            fetch_to_l2(part->at + done);
            if ((done += 64) >= part->bytes) part++, done = 0;
        }
    }
};

TK_INLINE F apply_activation(F x, int32_t activation) {
    if (activation == SILU) return fmul(x, fsigmoid(x));
    if (activation == RELU) return fmax(fzero(), x);  // NaN stays NaN: see fexp
    if (activation == RELU2) return fmul(fmax(fzero(), x), fmax(fzero(), x));
    if (activation == SIGMOID) return fsigmoid(x);
    if (activation == GELU_TANH) {
        // x * (1 + tanh(u)) / 2 = x * sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3)
        const F u = fmul(x, fma(fmul(x, x), fset1(0.0713548162726f), fset1(1.5957691216057f)));
        return fmul(x, fsigmoid(u));
    }
    if (activation == QUICK_GELU) return fmul(x, fsigmoid(fmul(x, fset1(1.702f))));
    const F half = fmul(x, fset1(0.5f));
    return fma(half, ferf(fmul(x, fset1(0.70710678118654752f))), half);
}

TK_INLINE void store_tile(const Store& to, int64_t t, int64_t tile, F y) {
    float* out = to.out + t * to.ld + tile * LANES;
    if (to.bias) y = fadd(y, fload(to.bias + tile * LANES));
    if (to.activation >= 0) y = apply_activation(y, to.activation);
    fstore(out, to.add ? fma(y, fset1(to.alpha), fload(out)) : y);
}

TK_INLINE void store_gated(const Store& to, int64_t t, int64_t tile, F gate, F up) {
    if (to.bias) gate = fadd(gate, fload(to.bias + tile * LANES));
    if (to.bias_up) up = fadd(up, fload(to.bias_up + tile * LANES));
    if (to.gate_scale != 1.0f) gate = fmul(gate, fset1(to.gate_scale));
    F y;
    if (to.activation == SWIGLUOAI) {  // NaN stays NaN: see fexp
        gate = fmin(fset1(7.0f), gate);
        up = fmin(fset1(7.0f), fmax(fset1(-7.0f), up));
        y = fmul(fmul(gate, fsigmoid(fmul(gate, fset1(1.702f)))), fadd(up, fset1(1.0f)));
    } else {
        y = fmul(apply_activation(gate, to.activation), up);
    }
    fstore(to.out + t * to.ld + tile * LANES, y);
}

}  // namespace
}  // namespace TK_ISA
}  // namespace tk
