// Linear with floating point weights and unquantized activations: float32 products, columns in ascending order.
//
// Every output element is one chain of fused multiply-adds over the columns, whatever the blocking.
#include "ops_isa.h"

namespace tk {
namespace TK_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int WIDE = 12;
#else
constexpr int WIDE = 4;
#endif

template <int32_t DTYPE>
TK_INLINE F load_weight(const uint8_t* p, int64_t k) {
    return DTYPE == F32 ? fload((const float*)p + k * 16)
           : DTYPE == BF16 ? load_bf16((const uint16_t*)p + k * 16) : load_f16((const uint16_t*)p + k * 16);
}

// N tiles by M tokens: y[n * M + t]
template <int N, int M, int32_t DTYPE>
void block(const Matrix& w, const uint8_t* const* tiles, const Rows& in, int64_t t0, F* out) {
    F y[N * M];
    TK_EACH(i, N * M, y[i] = fzero(););
    const float* x = in.x + t0 * in.ldx;
    for (int64_t k = 0; k < w.cols; k++) {
        F v[N];
        TK_EACH(n, N, v[n] = load_weight<DTYPE>(tiles[n], k););
        TK_EACH(t, M, {
            const F a = fset1(x[t * in.ldx + k]);
            TK_EACH(n, N, y[n * M + t] = fma(v[n], a, y[n * M + t]););
        });
    }
    TK_EACH(i, N * M, out[i] = y[i];);
}

typedef void (*Block)(const Matrix&, const uint8_t* const*, const Rows&, int64_t, F*);

template <int N, int M>
Block block_of(int32_t dtype) {
    return dtype == F32 ? block<N, M, F32> : dtype == BF16 ? block<N, M, BF16> : block<N, M, F16>;
}

template <int N>
Block block_for(int32_t dtype, int64_t left, int64_t* m) {
    *m = left >= WIDE ? WIDE : left >= 4 ? 4 : left >= 2 ? 2 : 1;
    if (*m == WIDE) return block_of<N, WIDE>(dtype);
    if (*m == 4) return block_of<N, 4>(dtype);
    if (*m == 2) return block_of<N, 2>(dtype);
    return block_of<N, 1>(dtype);
}

template <int N>
void run_tiles(const Matrix& w, const Rows& in, int64_t count, int64_t tile, const Store& to) {
    const uint8_t* tiles[N];
    for (int n = 0; n < N; n++) tiles[n] = w.data + (tile + n) * w.tile_bytes();
    for (int64_t t = 0, m = 0; t < count; t += m) {
        F y[N * WIDE];
        block_for<N>(w.dtype, count - t, &m)(w, tiles, in, t, y);
        for (int n = 0; n < N; n++)
            for (int64_t i = 0; i < m; i++) store_tile(to, t + i, tile + n, y[n * m + i]);
    }
}

}  // namespace

int64_t linear_dense_scratch(const Matrix&) { return 64; }

void linear_dense(const Matrix& w, const Rows& in, int64_t count, int64_t t0, int64_t t1, const Store& to, void*) {
    int64_t tile = t0;
    if (count < 4)
        for (; tile + 4 <= t1; tile += 4) run_tiles<4>(w, in, count, tile, to);
    for (; tile + 2 <= t1; tile += 2) run_tiles<2>(w, in, count, tile, to);
    for (; tile < t1; tile++) run_tiles<1>(w, in, count, tile, to);
}

void gated_dense(const Matrix& gate, const Matrix& up, const Rows& in, int64_t count, int64_t t0, int64_t t1,
                 const Store& to, void*) {
    for (int64_t tile = t0; tile < t1; tile++) {
        const uint8_t* tiles[2] = {gate.data + tile * gate.tile_bytes(), up.data + tile * up.tile_bytes()};
        for (int64_t t = 0, m = 0; t < count; t += m) {
            F y[2 * WIDE];
            if (gate.dtype == up.dtype) {
                block_for<2>(gate.dtype, count - t, &m)(gate, tiles, in, t, y);
            } else {
                const Block b = block_for<1>(gate.dtype, count - t, &m);
                b(gate, tiles, in, t, y);
                block_for<1>(up.dtype, count - t, &m)(up, tiles + 1, in, t, y + m);
            }
            for (int64_t i = 0; i < m; i++) store_gated(to, t + i, tile, y[i], y[m + i]);
        }
    }
}

void dense_row(const Matrix& w, int64_t row, float scale, float* out) {
    const uint8_t* tile = w.data + row / LANES * w.tile_bytes();
    const int64_t lane = row % LANES;
    for (int64_t k = 0; k < w.cols; k++) {
        const int64_t i = k * LANES + lane;
        const float v = w.dtype == F32 ? ((const float*)tile)[i]
                        : w.dtype == BF16 ? bf16_to_float(((const uint16_t*)tile)[i]) : f16_to_float(((const uint16_t*)tile)[i]);
        out[k] = v * scale;
    }
}

}  // namespace TK_ISA
}  // namespace tk
