// Linear with floating point weights.
//
// Every output element is one chain over the columns in ascending order, whatever the blocking: of fused multiply-adds in
// float32, or, where weights are bfloat16 and the caller lets inputs be rounded to it, of bfloat16 products by pairs of columns
// with float32 sums, which the processor does twice as fast.
#include "ops_isa.h"

namespace tk {
namespace TK_ISA {
namespace {

// Tokens of a block at most, where it is of one tile, of two and of four: sums stay in registers, and few tokens take more tiles,
// for chains enough to hide a product's latency.
#if defined(__AVX512F__)
constexpr int WIDE = 12, TWO = WIDE, FOUR = 4;
#else
constexpr int WIDE = 6, TWO = 2, FOUR = 1;
#endif
constexpr int64_t PANEL = 144;  // tokens whose inputs stay in the second-level cache while tiles pass by

constexpr int32_t PAIRS = 3;  // beside the types of weights: products of bfloat16

// Tokens of a panel: their inputs, for PAIRS as bfloat16 with a zero behind an odd number of columns.
struct Panel {
    const float* x;
    const uint16_t* rounded;
    int64_t ld;
};

template <int32_t FORM>
TK_INLINE F load_weight(const uint8_t* p, int64_t k) {
    return FORM == F32 ? fload((const float*)p + k * 16)
           : FORM == BF16 ? load_bf16((const uint16_t*)p + k * 16) : load_f16((const uint16_t*)p + k * 16);
}

// N tiles by M tokens from t0 on: y[n * M + t]
template <int N, int M, int32_t FORM>
TK_INLINE void chains(const Matrix& w, const uint8_t* const* tiles, const Panel& in, int64_t t0, F* y) {
    const float* x = in.x + t0 * in.ld;
    for (int64_t k = 0; k < w.cols; k++) {
        F v[N];
        TK_EACH(n, N, v[n] = load_weight<FORM>(tiles[n], k););
        TK_EACH(t, M, {
            const F a = fset1(x[t * in.ld + k]);
            TK_EACH(n, N, y[n * M + t] = fma(v[n], a, y[n * M + t]););
        });
    }
}

#if defined(TK_BF16_DOT)
constexpr bool HAS_PAIRS = true;

template <int N, int M>
TK_INLINE void pair_step(const B* v, const uint16_t* const* rows, int64_t ld, int64_t k, F* y) {
    TK_EACH(t, M, {
        const B a = bset4(rows[t / 3] + t % 3 * ld + k);
        TK_EACH(n, N, y[n * M + t] = dot_bf16(y[n * M + t], v[n], a););
    });
}

template <int N, int M>
TK_INLINE void pair_chains(const Matrix& w, const uint8_t* const* tiles, const Panel& in, int64_t t0, F* y) {
    const uint16_t* rows[(M + 2) / 3];  // every third one: address arithmetic reaches the others
    TK_EACH(r, (M + 2) / 3, rows[r] = in.rounded + (t0 + 3 * r) * in.ld;);
    B v[N];
    int64_t k = 0;
    for (; k + 2 <= w.cols; k += 2) {
        TK_EACH(n, N, v[n] = zip_halves(bload(tiles[n] + k * 32)););
        pair_step<N, M>(v, rows, in.ld, k, y);
    }
    if (k == w.cols) return;
    TK_EACH(n, N, v[n] = load_u16((const uint16_t*)tiles[n] + k * 16););
    pair_step<N, M>(v, rows, in.ld, k, y);
}
#else
constexpr bool HAS_PAIRS = false;

template <int N, int M>
TK_INLINE void pair_chains(const Matrix&, const uint8_t* const*, const Panel&, int64_t, F*) {}
#endif

template <int N, int M, int32_t FORM>
void block(const Matrix& w, const uint8_t* const* tiles, const Panel& in, int64_t t0, F* out) {
    F y[N * M];
    TK_EACH(i, N * M, y[i] = fzero(););
    if constexpr (FORM == PAIRS) pair_chains<N, M>(w, tiles, in, t0, y);
    else chains<N, M, FORM>(w, tiles, in, t0, y);
    TK_EACH(i, N * M, out[i] = y[i];);
}

typedef void (*Block)(const Matrix&, const uint8_t* const*, const Panel&, int64_t, F*);

// `m` of 1 … M
template <int N, int M>
Block block_for(int32_t form, int64_t m) {
    if constexpr (M > 1)
        if (m < M) return block_for<N, M - 1>(form, m);
    return form == F32 ? block<N, M, F32> : form == BF16 ? block<N, M, BF16>
           : form == F16 ? block<N, M, F16> : block<N, M, PAIRS>;
}

template <int N, int M = WIDE>
void run_tiles(const Matrix& w, int32_t form, const Panel& in, int64_t count, int64_t tile, const Store& to) {
    const int64_t bytes = w.tile_bytes();
    const uint8_t* tiles[N];
    for (int n = 0; n < N; n++) tiles[n] = w.data + (tile + n) * bytes;
    TilesAhead next(tiles[0] + N * bytes, N * bytes, (count + M - 1) / M);
    for (int64_t t = 0, m; t < count; t += m) {
        F y[N * M];
        m = block_at(t, count, M);
        if (m < count) next.step();  // one block alone: the processor's own prefetcher does better
        block_for<N, M>(form, m)(w, tiles, in, t, y);
        for (int n = 0; n < N; n++)
            for (int64_t i = 0; i < m; i++) store_tile(to, t + i, tile + n, y[n * m + i]);
    }
}

void gated_tile(const Matrix& gate, const Matrix& up, int32_t form, const Panel& in, int64_t count, int64_t tile, const Store& to) {
    const int64_t steps = (count + WIDE - 1) / WIDE;
    const uint8_t* tiles[2] = {gate.data + tile * gate.tile_bytes(), up.data + tile * up.tile_bytes()};
    TilesAhead next_gate(tiles[0] + gate.tile_bytes(), gate.tile_bytes(), steps);
    TilesAhead next_up(tiles[1] + up.tile_bytes(), up.tile_bytes(), steps);
    for (int64_t t = 0, m; t < count; t += m) {
        F y[2 * WIDE];
        m = block_at(t, count, WIDE);
        if (m < count) next_gate.step(), next_up.step();
        if (TWO == WIDE && gate.dtype == up.dtype) {
            block_for<2, TWO>(form, m)(gate, tiles, in, t, y);
        } else {
            block_for<1, WIDE>(form, m)(gate, tiles, in, t, y);
            block_for<1, WIDE>(form == PAIRS ? form : up.dtype, m)(up, tiles + 1, in, t, y + m);
        }
        for (int64_t i = 0; i < m; i++) store_gated(to, t + i, tile, y[i], y[m + i]);
    }
}

int32_t form_of(const Matrix& w, const Matrix& other, const Rows& in) {
    return HAS_PAIRS && in.round && w.dtype == BF16 && other.dtype == BF16 ? PAIRS : w.dtype;
}

// elements of a rounded row: padded by a line more than needed, so that rows never lie a power of two apart
int64_t rounded_ld(const Matrix& w) { return (w.cols + 63) / 32 * 32; }

Panel rounded(const Matrix& w, const Rows& in, int64_t t0, int64_t count, uint16_t* out) {
    const int64_t ld = rounded_ld(w);
    for (int64_t t = 0; t < count; t++) {
        const float* x = in.x + (t0 + t) * in.ldx;
        uint16_t* to = out + t * ld;
        int64_t k = 0;
        for (; k + 16 <= w.cols; k += 16) store_bf16(to + k, fload(x + k));
        for (; k < w.cols; k++) to[k] = float_to_bf16(x[k]);
        to[k] = 0;
    }
    return {nullptr, out, ld};
}

// body(panel, its tokens, where their results go) for `count` tokens, in panels as equal as can be
template <class Body>
void each_panel(const Matrix& w, int32_t form, const Rows& in, int64_t count, const Store& to, void* scratch, Body&& body) {
    for (int64_t t = 0, n; t < count; t += n) {
        n = block_at(t, count, PANEL);
        Store part = to;
        part.out += t * to.ld;
        body(form == PAIRS ? rounded(w, in, t, n, (uint16_t*)scratch) : Panel{in.x + t * in.ldx, nullptr, in.ldx}, n, part);
    }
}

// M rows of x [rows of the tiles] by all columns: every output is the sum of 16 chains over the tiles.
template <int M, int32_t FORM>
void back_rows(const Matrix& w, const uint8_t* tiles, int64_t n, const float* x, int64_t ldx, float* out, int64_t ldo) {
    auto columns = [&](int64_t k, auto width) __attribute__((always_inline)) {
        constexpr int C = width;
        F y[M * C];
        TK_EACH(i, M * C, y[i] = fzero(););
        for (int64_t tile = 0; tile < n; tile++) {
            F v[C];
            TK_EACH(c, C, v[c] = load_weight<FORM>(tiles + tile * w.tile_bytes(), k + c););
            TK_EACH(t, M, {
                const F a = fload(x + t * ldx + tile * LANES);
                TK_EACH(c, C, y[t * C + c] = fma(v[c], a, y[t * C + c]););
            });
        }
        TK_EACH(t, M, TK_EACH(c, C, out[t * ldo + k + c] = hsum(y[t * C + c]);););
    };
    int64_t k = 0;
    for (; k + 4 <= w.cols; k += 4) columns(k, Const<4>());
    for (; k < w.cols; k++) columns(k, Const<1>());
}

#if defined(__AVX512BF16__)
constexpr bool HAS_BACK_PAIRS = true;

// One vector of two whose lanes stand in groups of 2 * HALF: sums of the two halves of each group.
template <int HALF>
TK_INLINE F fold(F a, F b) {
    int32_t low[16], high[16];
    for (int i = 0; i < 16; i++) {
        low[i] = i / HALF * 2 * HALF + i % HALF;  // from 16 on of b
        high[i] = low[i] + HALF;
    }
    return fadd(_mm512_permutex2var_ps(a, iload(low), b), _mm512_permutex2var_ps(a, iload(high), b));
}

// By products of bfloat16: a line of a tile holds two columns, eight pairs of rows each. 16 columns at a time.
template <int M>
void back_pairs(const Matrix& w, const uint8_t* tiles, int64_t n, const float* x, int64_t ldx, float* out, int64_t ldo) {
    for (int64_t k = 0; k < w.cols; k += 16) {
        F y[M * 8];
        TK_EACH(i, M * 8, y[i] = fzero(););
        for (int64_t tile = 0; tile < n; tile++) {
            const uint8_t* from = tiles + tile * w.tile_bytes() + k * 32;
            B a[M];
            TK_EACH(t, M, a[t] = _mm512_broadcast_i64x4((__m256i)_mm512_cvtneps_pbh(fload(x + t * ldx + tile * LANES))););
            TK_EACH(c, 8, {
                const B v = bload(from + c * 64);
                TK_EACH(t, M, y[t * 8 + c] = dot_bf16(y[t * 8 + c], v, a[t]););
            });
        }
        TK_EACH(t, M, {
            F z[4];
            TK_EACH(c, 4, z[c] = fold<4>(y[t * 8 + 2 * c], y[t * 8 + 2 * c + 1]););
            fstore(out + t * ldo + k, fold<1>(fold<2>(z[0], z[1]), fold<2>(z[2], z[3])));
        });
    }
}
#else
constexpr bool HAS_BACK_PAIRS = false;

template <int M>
void back_pairs(const Matrix&, const uint8_t*, int64_t, const float*, int64_t, float*, int64_t) {}
#endif

// M rows a call, the last ones singly.
template <int M>
void back_all(const Matrix& w, int32_t form, const Rows& in, int64_t count, int64_t t0, int64_t t1, float* out, int64_t ldo) {
    const uint8_t* tiles = w.data + t0 * w.tile_bytes();
    for (int64_t t = 0; t + M <= count; t += M) {
        const auto rows = form == PAIRS ? back_pairs<M>
                          : form == F32 ? back_rows<M, F32> : form == BF16 ? back_rows<M, BF16> : back_rows<M, F16>;
        rows(w, tiles, t1 - t0, in.x + t * in.ldx, in.ldx, out + t * ldo, ldo);
    }
    if constexpr (M > 1) {
        Rows rest = in;
        rest.x += count / M * M * in.ldx;
        back_all<1>(w, form, rest, count % M, t0, t1, out + count / M * M * ldo, ldo);
    }
}

}  // namespace

int64_t linear_dense_scratch(const Matrix& w) { return PANEL * rounded_ld(w) * 2; }

void linear_dense(const Matrix& w, const Rows& in, int64_t count, int64_t t0, int64_t t1, const Store& to, void* scratch) {
    const int32_t form = form_of(w, w, in);
    each_panel(w, form, in, count, to, scratch, [&](const Panel& panel, int64_t n, const Store& part) {
        int64_t tile = t0;
        if (n <= FOUR)
            for (; tile + 4 <= t1; tile += 4) run_tiles<4, FOUR>(w, form, panel, n, tile, part);
        if (n <= TWO || TWO == WIDE)
            for (; tile + 2 <= t1; tile += 2) run_tiles<2, TWO>(w, form, panel, n, tile, part);
        for (; tile < t1; tile++) run_tiles<1>(w, form, panel, n, tile, part);
    });
}

void gated_dense(const Matrix& gate, const Matrix& up, const Rows& in, int64_t count, int64_t t0, int64_t t1,
                 const Store& to, void* scratch) {
    const int32_t form = form_of(gate, up, in);
    each_panel(gate, form, in, count, to, scratch, [&](const Panel& panel, int64_t n, const Store& part) {
        for (int64_t tile = t0; tile < t1; tile++) gated_tile(gate, up, form, panel, n, tile, part);
    });
}

void linear_back(const Matrix& w, const Rows& in, int64_t count, int64_t t0, int64_t t1, float* out, int64_t ldo) {
    const int32_t form = form_of(w, w, in);
    back_all<3>(w, form == PAIRS && (!HAS_BACK_PAIRS || w.cols % LANES) ? w.dtype : form, in, count, t0, t1, out, ldo);
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
