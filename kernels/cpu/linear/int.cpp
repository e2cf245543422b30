// Linear with 4- and 8-bit group-quantized weights and int8 activations.
//
// For an output row r, a token t and group g of columns, the integer D = sum (code - zero) * a is exact; then
//     p = scale_w[r,g] * scale_a[t,g];  y = fma(float(D), p, y);  with minima also y = fma(min[r,g], scale_a * sum_a, y)
// in ascending g. All regimes run exactly that, so their results are equal bit for bit:
//   narrow   few tokens: stream up to eight tiles side by side, split nibbles in registers, use each code for up to 8 tokens at
//            once. A core has more memory in flight when it reads several places: the processor fetches ahead in each of them,
//            up to the end of a page. Where few places are faster (few_places), two tiles are the most. With plain AVX2 and
//            4 bits up to 17 tokens; from there on linear/split.h has them.
//   pairs    many tokens: two tiles by up to 6 tokens, integer and float sums both in registers; codes are split again for
//            each block of tokens, which costs nothing beside the products. What comes next is fetched meanwhile. Where
//            the processor's units for products split codes, too, linear/ready.h splits them once. ARM's i8mm has linear/mmla.h.
// The unsigned operand of the dot product is the weight (code, or code - zero + 16), the signed one the activation.
#include <type_traits>

#include "linear/pairs.h"
#if defined(__AVX512F__)
#include "linear/ready.h"
#endif
#if defined(TK_SHORT_SUMS)
#include "linear/split.h"
#endif
#if defined(__ARM_FEATURE_MATMUL_INT8)
#define TK_MMLA
#include "linear/mmla.h"
#endif

namespace tk {
namespace TK_ISA {
namespace {

// SIDE: so many tiles side by side at most. Tokens at most: NARROW of one tile alone, TWO, FOUR, EIGHT of so many side by side. Sums stay
// in registers.
#if defined(__AVX512F__)
constexpr int SIDE = 8, EIGHT = 2, FOUR = 4, TWO = 8, NARROW = 8;
#elif defined(__AVXVNNI__)
constexpr int SIDE = 4, EIGHT = 0, FOUR = 2, TWO = 2, NARROW = 4;
#elif defined(TK_NEON)
constexpr int SIDE = 2, EIGHT = 0, FOUR = 0, TWO = 1, NARROW = 2;
#else
constexpr int SIDE = 4, EIGHT = 0, FOUR = 2, TWO = 2, NARROW = 5;
#endif
constexpr int FEW = 2;  // side by side where the processor reads few places faster: see few_places
constexpr int64_t AHEAD = 6144;  // bytes that the narrow kernel prefetches ahead

// ------------------------------------------------------------------------------------------------ few tokens

// Integer part of one group of N tiles for M tokens: d[n * M + t].
template <int M, int N>
TK_INLINE void group_dots4(const uint8_t* const* codes, int64_t group, const int8_t* a, int64_t lda, I* d) {
#if defined(TK_SHORT_SUMS)
    TK_EACH(i, N * M, d[i] = izero(););
    for (int64_t k = 0; k < group;) {
        H sums[N * M];
        TK_EACH(i, N * M, sums[i] = izero(););
        const int64_t end = k + 32 < group ? k + 32 : group;  // 8 times 2 products of 15 * 127 fit 16 bits
        for (; k < end; k += 8)
            TK_EACH(n, N, {
                __builtin_prefetch(codes[n] + k * 8 + AHEAD / N);
                const B w = bload(codes[n] + k * 8), low = low_nibbles(w), high = high_nibbles(w);
                TK_EACH(t, M, {
                    sums[n * M + t] = hdot(sums[n * M + t], low, bset4(a + t * lda + k));
                    sums[n * M + t] = hdot(sums[n * M + t], high, bset4(a + t * lda + k + 4));
                });
            });
        TK_EACH(i, N * M, d[i] = widen(d[i], sums[i]););
    }
#else
    constexpr int ODD = N == 1 ? M : 0;  // one tile alone: two chains, which hide a product's latency
    I sums[N * M + ODD];
    TK_EACH(i, N * M + ODD, sums[i] = izero(););
    for (int64_t k = 0; k < group; k += 8) {
        B low[N], high[N];
        TK_EACH(n, N, {
            __builtin_prefetch(codes[n] + k * 8 + AHEAD / N);
            const B w = bload(codes[n] + k * 8);
            low[n] = low_nibbles(w);
            high[n] = high_nibbles(w);
        });
        TK_EACH(t, M, {
            const B even = bset4(a + t * lda + k), odd = bset4(a + t * lda + k + 4);
            TK_EACH(n, N, sums[n * M + t] = dot4(sums[n * M + t], low[n], even););
            TK_EACH(n, N, sums[n * M + t + ODD] = dot4(sums[n * M + t + ODD], high[n], odd););
        });
    }
    TK_EACH(i, N * M, d[i] = ODD ? iadd(sums[i], sums[i + ODD]) : sums[i];);
#endif
}

template <int M, int N>
TK_INLINE void group_dots8(const uint8_t* const* codes, int64_t group, const int8_t* a, int64_t lda, I* d) {
    constexpr int ODD = N == 1 ? M : 0;
    I sums[N * M + ODD];
    TK_EACH(i, N * M + ODD, sums[i] = izero(););
    for (int64_t k = 0; k < group; k += 8) {
        Codes8 low[N], high[N];
        TK_EACH(n, N, {
            const uint8_t* p = codes[n] + k * 16;
            __builtin_prefetch(p + AHEAD / N);
            __builtin_prefetch(p + AHEAD / N + 64);
            low[n] = codes8(bload(p));
            high[n] = codes8(bload(p + 64));
        });
        TK_EACH(t, M, {
            const B even = bset4(a + t * lda + k), odd = bset4(a + t * lda + k + 4);
            TK_EACH(n, N, sums[n * M + t] = dot4(sums[n * M + t], low[n], even););
            TK_EACH(n, N, sums[n * M + t + ODD] = dot4(sums[n * M + t + ODD], high[n], odd););
        });
    }
    TK_EACH(i, N * M, d[i] = ODD ? iadd(sums[i], sums[i + ODD]) : sums[i];);
}

// M tokens from t0 on by N tiles: out[n * M + t]
template <int M, int N, int BITS, bool MIN>
void narrow(const Matrix& w, const uint8_t* const* tiles, const Rows& in, int64_t t0, LaterAhead& later, F* out) {
    const int64_t groups = w.groups(), step = w.group_bytes(), header = w.header_bytes();
    const uint8_t* at[N];
    TK_EACH(n, N, at[n] = tiles[n];);
    F y[N * M];
    TK_EACH(i, N * M, y[i] = fzero(););
    for (int64_t g = 0; g < groups; g++) {
        I d[N * M];
        const uint8_t* codes[N];
        TK_EACH(n, N, codes[n] = at[n] + header;);
        const int8_t* a = in.q + t0 * in.ldq + g * w.group;
        later.step(N);
        if (BITS == 4) group_dots4<M, N>(codes, w.group, a, in.ldq, d);
        else group_dots8<M, N>(codes, w.group, a, in.ldq, d);
        TK_EACH(n, N, {
            const F s = header_floats(at[n], w.dtype, 0);
            F low = fzero();
            I zero = izero();
            if (MIN) low = header_floats(at[n], w.dtype, 1);
            if (BITS == 8) zero = iset1(rest8<MIN>());
            else if (!MIN) zero = load_u8(header_zeros(at[n], w.dtype));
            TK_EACH(t, M, {
                constexpr int i = n * M + t;
                const float sa = in.scale[(t0 + t) * in.lds + g];
                const int32_t sum = in.sum[(t0 + t) * in.lds + g];
                if (BITS == 8 ? rest8<MIN>() != 0 : !MIN) d[i] = isub(d[i], imul(zero, iset1(sum)));
                y[i] = fma(f_of(d[i]), fmul(s, fset1(sa)), y[i]);
                if (MIN) y[i] = fma(low, fset1(sa * float(sum)), y[i]);
            });
            at[n] += step;
        });
    }
    TK_EACH(i, N * M, out[i] = y[i];);
}

typedef void (*Narrow)(const Matrix&, const uint8_t* const*, const Rows&, int64_t, LaterAhead&, F*);

template <int N>
constexpr int most() { return N == 8 ? EIGHT : N == 4 ? FOUR : N == 2 ? TWO : NARROW; }

// N tiles by `m` tokens, m of 1 ... M
template <int N, int M = most<N>()>
Narrow narrow_for(const Matrix& w, int64_t m) {
    if constexpr (M > 1)
        if (m < M) return narrow_for<N, M - 1>(w, m);
    if (w.bits == 4) return w.minima ? narrow<M, N, 4, true> : narrow<M, N, 4, false>;
    return w.minima ? narrow<M, N, 8, true> : narrow<M, N, 8, false>;
}

// Tiles [t0, t1) in N runs side by side, what is left over in fewer.
template <int N>
void linear_narrow(const Matrix& w, const Rows& in, int64_t count, int64_t t0, int64_t t1, const Store& to, LaterAhead& later) {
    const int64_t run = N == 1 || count <= most<N>() ? (t1 - t0) / N : 0;
    for (int64_t i = 0; i < run; i++) {
        const uint8_t* tiles[N];
        for (int n = 0; n < N; n++) tiles[n] = w.data + (t0 + n * run + i) * w.tile_bytes();
        for (int64_t t = 0, m; t < count; t += m) {
            m = count - t < most<N>() ? count - t : most<N>();
            F y[N * most<N>()];
            narrow_for<N>(w, m)(w, tiles, in, t, later, y);
            for (int n = 0; n < N; n++)
                for (int64_t j = 0; j < m; j++) store_tile(to, t + j, t0 + n * run + i, y[n * m + j]);
        }
    }
    if constexpr (N > 1) linear_narrow<N / 2>(w, in, count, t0 + N * run, t1, to, later);
}

// One token by tiles of one short group without scales, as an adapter's B is beside a row: a tile takes a few products, fewer than
// the narrow kernel needs around them.
bool in_short(const Matrix& w, int64_t count) { return count == 1 && w.dtype == ONES && w.group == w.cols; }

void linear_short(const Matrix& w, const Rows& in, int64_t t0, int64_t t1, const Store& to) {
    const int64_t bytes = w.tile_bytes();
    const I start = iset1(-rest8<false>() * in.sum[0]);
    const F scale = fset1(in.scale[0]);
    const uint8_t* at = w.data + t0 * bytes;
    for (int64_t tile = t0; tile < t1; tile++, at += bytes) {
        I d = start;
        for (int64_t k = 0; k < w.group; k += 16)
            TK_EACH(j, 4, d = dot4(d, codes8(bload(at + k * 16 + 64 * j)), bset4(in.q + k + 4 * j)););
        store_tile(to, 0, tile, fma(f_of(d), scale, fzero()));
    }
}

// fn(number) with how many tiles are read side by side at most on this processor
template <class Fn>
void side_by_side(Fn&& fn) {
    if constexpr (SIDE > FEW)
        if (few_places()) return fn(std::integral_constant<int, FEW>());
    fn(std::integral_constant<int, SIDE>());
}

// The same for pairs of one shape, N tiles of both.
template <int N>
void gated_narrow(const Matrix& gate, const Matrix& up, const Rows& in, int64_t count, int64_t t0, int64_t t1, const Store& to) {
    const int64_t run = count <= most<2 * N>() ? (t1 - t0) / N : 0;
    for (int64_t i = 0; i < run; i++) {
        const uint8_t* tiles[2 * N];
        for (int n = 0; n < N; n++) {
            const int64_t at = (t0 + n * run + i) * gate.tile_bytes();
            tiles[2 * n] = gate.data + at;
            tiles[2 * n + 1] = up.data + at;
        }
        F y[2 * N * most<2 * N>()];
        LaterAhead none(to, 0);
        narrow_for<2 * N>(gate, count)(gate, tiles, in, 0, none, y);
        for (int n = 0; n < N; n++)
            for (int64_t t = 0; t < count; t++) store_gated(to, t, t0 + n * run + i, y[2 * n * count + t], y[(2 * n + 1) * count + t]);
    }
    if constexpr (N > 1) gated_narrow<N / 2>(gate, up, in, count, t0 + N * run, t1, to);
}

}  // namespace

int64_t linear_int_scratch(const Matrix& w) {
    const int64_t pair = 128 + 2 * WIDE * 64 + w.groups() * 384;
#if defined(TK_SHORT_SUMS)
    const int64_t split = split_scratch(w);
    return split > pair ? split : pair;
#elif defined(__AVX512F__)
    const int64_t ready = in_ready(w, READY_FROM) ? Ready::bytes(w) : 0;
    return ready > pair ? ready : pair;
#elif defined(TK_MMLA)
    return pair > Mmla::bytes(w) ? pair : Mmla::bytes(w);
#else
    return pair;
#endif
}

void linear_int(const Matrix& w, const Rows& in, int64_t count, int64_t t0, int64_t t1, const Store& to, void* scratch) {
#if defined(TK_SHORT_SUMS)
    if (in_split(w, count)) return linear_split(w, nullptr, in, count, t0, t1, to, scratch);
#endif
#if defined(__AVX512F__)
    if (in_ready(w, count)) return linear_ready(w, in, count, t0, t1, to, scratch);
#endif
#if defined(TK_MMLA)
    if (in_mmla(w, count)) return linear_mmla(w, nullptr, in, count, t0, t1, to, scratch);
#endif
    if (in_short(w, count)) return linear_short(w, in, t0, t1, to);
    if (in_pairs(w, count)) return linear_pairs(w, in, count, t0, t1, to, scratch);
    LaterAhead later(to, (t1 - t0) * w.groups());
    side_by_side([&](auto n) { linear_narrow<n>(w, in, count, t0, t1, to, later); });
}

void gated_int(const Matrix& gate, const Matrix& up, const Rows& in, int64_t count, int64_t t0, int64_t t1,
               const Store& to, void* scratch) {
    const bool same = same_shape(gate, up);
#if defined(TK_SHORT_SUMS)
    if (same && in_split(gate, count)) return linear_split(gate, &up, in, count, t0, t1, to, scratch);
#endif
#if defined(__AVX512F__)
    if (same && in_ready(gate, count)) return gated_ready(gate, up, in, count, t0, t1, to, scratch);
#endif
#if defined(TK_MMLA)
    if (same && in_mmla(gate, count)) return linear_mmla(gate, &up, in, count, t0, t1, to, scratch);
#endif
    if (same && in_pairs(gate, count)) return gated_pairs(gate, up, in, count, t0, t1, to, scratch);
    if (same && count <= TWO) return side_by_side([&](auto n) { gated_narrow<n / 2>(gate, up, in, count, t0, t1, to); });
    for (int64_t tile = t0; tile < t1; tile++)
        for (int64_t t = 0; t < count; t += NARROW) {
            const int64_t m = count - t < NARROW ? count - t : NARROW;
            F g[NARROW], u[NARROW];
            const uint8_t *tile_gate = gate.data + tile * gate.tile_bytes(), *tile_up = up.data + tile * up.tile_bytes();
            LaterAhead none(to, 0);
            narrow_for<1>(gate, m)(gate, &tile_gate, in, t, none, g);
            narrow_for<1>(up, m)(up, &tile_up, in, t, none, u);
            for (int64_t i = 0; i < m; i++) store_gated(to, t + i, tile, g[i], u[i]);
        }
}

void int_row(const Matrix& w, int64_t row, float scale, float* out) {
    const int64_t lane = row % LANES;
    const uint8_t* tile = w.data + row / LANES * w.tile_bytes();
    for (int64_t g = 0; g < w.groups(); g++, tile += w.group_bytes()) {
        float s[16], low[16];
        fstore(s, header_floats(tile, w.dtype, 0));
        if (w.minima) fstore(low, header_floats(tile, w.dtype, 1));
        const int32_t zero = w.bits == 8 ? 128 : header_zeros(tile, w.dtype)[lane];
        const uint8_t* codes = tile + w.header_bytes();
        for (int64_t k = 0; k < w.group; k++) {
            int32_t c;
            if (w.bits == 8) c = codes[k / 4 * 64 + lane * 4 + k % 4];
            else c = (codes[k / 8 * 64 + lane * 4 + k % 4] >> (k % 8 >= 4 ? 4 : 0)) & 15;
            const float v = w.minima ? float(c) * s[lane] + low[lane] : float(c - zero) * s[lane];
            out[g * w.group + k] = v * scale;
        }
    }
}

}  // namespace TK_ISA
}  // namespace tk
