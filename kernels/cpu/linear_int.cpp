// Linear with 4- and 8-bit group-quantized weights and int8 activations.
//
// For an output row r, a token t and group g of columns, the integer D = sum (code - zero) * a is exact; then
//     p = scale_w[r,g] * scale_a[t,g];  y = fma(float(D), p, y);  with minima also y = fma(min[r,g], scale_a * sum_a, y)
// in ascending g. Both regimes below run exactly that, so their results are equal bit for bit:
//   narrow   few tokens: stream a tile, split nibbles in registers, use each code for up to 8 tokens at once
//   panel    many tokens: unpack two tiles to uint8 once, then a register-blocked product of 32 rows by up to 6 tokens,
//            integer and float sums both in registers
// The unsigned operand of the dot product is the weight (code, or code - zero + 16), the signed one the activation.
#include "ops_isa.h"

namespace tk {
namespace TK_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int NARROW = 8, WIDE = 6, PANEL_FROM = 12;
#elif defined(__AVX2__)
constexpr int NARROW = 4, WIDE = 4, PANEL_FROM = 16;
#else
constexpr int NARROW = 4, WIDE = 4, PANEL_FROM = 16;
#endif
constexpr int64_t AHEAD = 3072;  // bytes that the narrow kernel prefetches ahead

template <int BITS>
TK_INLINE I dot(I acc, B u, B s) {
    return BITS == 4 ? dot4_small(acc, u, s) : dot4(acc, u, s);
}

TK_INLINE F header_floats(const uint8_t* h, int32_t dtype, int which) {
    if (dtype == F16) return load_f16((const uint16_t*)h + 16 * which);
    if (dtype == BF16) return load_bf16((const uint16_t*)h + 16 * which);
    return fload((const float*)h + 16 * which);
}

TK_INLINE const uint8_t* header_zeros(const uint8_t* h, int32_t dtype) { return h + (dtype == F32 ? 64 : 32); }

// One group of one tile for M tokens: integer part.
template <int M, int BITS>
TK_INLINE void group_dots(const uint8_t* codes, int64_t group, const int8_t* a, int64_t lda, I* d) {
    I even[M], odd[M];
    TK_EACH(t, M, even[t] = odd[t] = izero(););
    for (int64_t k = 0; k < group; k += 8) {
        const uint8_t* p = codes + k * 2 * BITS;
        B w0, w1;
        __builtin_prefetch(p + AHEAD);
        if (BITS == 4) {
            const B w = bload(p);
            w0 = low_nibbles(w);
            w1 = high_nibbles(w);
        } else {
            __builtin_prefetch(p + AHEAD + 64);
            w0 = bload(p);
            w1 = bload(p + 64);
        }
        TK_EACH(t, M, {
            even[t] = dot<BITS>(even[t], w0, bset4(a + t * lda + k));
            odd[t] = dot<BITS>(odd[t], w1, bset4(a + t * lda + k + 4));
        });
    }
    TK_EACH(t, M, d[t] = iadd(even[t], odd[t]););
}

template <int M, int BITS, bool MIN>
void narrow_tile(const Matrix& w, const uint8_t* tile, const Rows& in, int64_t t0, F* out) {
    const int64_t groups = w.groups(), step = w.group_bytes(), header = w.header_bytes();
    F y[M];
    TK_EACH(t, M, y[t] = fzero(););
    for (int64_t g = 0; g < groups; g++, tile += step) {
        I d[M];
        group_dots<M, BITS>(tile + header, w.group, in.q + t0 * in.ldq + g * w.group, in.ldq, d);
        const F s = header_floats(tile, w.dtype, 0);
        F low = fzero();
        I zero = izero();
        if (MIN) low = header_floats(tile, w.dtype, 1);
        else zero = BITS == 8 ? iset1(128) : load_u8(header_zeros(tile, w.dtype));
        TK_EACH(t, M, {
            const float sa = in.scale[(t0 + t) * in.lds + g];
            const int32_t sum = in.sum[(t0 + t) * in.lds + g];
            if (!MIN) d[t] = isub(d[t], imul(zero, iset1(sum)));
            y[t] = fma(f_of(d[t]), fmul(s, fset1(sa)), y[t]);
            if (MIN) y[t] = fma(low, fset1(sa * float(sum)), y[t]);
        });
    }
    TK_EACH(t, M, out[t] = y[t];);
}

typedef void (*NarrowTile)(const Matrix&, const uint8_t*, const Rows&, int64_t, F*);

template <int BITS, bool MIN>
NarrowTile narrow_for(int64_t m) {
    switch (m) {
        case 1: return narrow_tile<1, BITS, MIN>;
        case 2: return narrow_tile<2, BITS, MIN>;
        case 3: return narrow_tile<3, BITS, MIN>;
        case 4: return narrow_tile<4, BITS, MIN>;
#if defined(__AVX512F__)
        case 5: return narrow_tile<5, BITS, MIN>;
        case 6: return narrow_tile<6, BITS, MIN>;
        case 7: return narrow_tile<7, BITS, MIN>;
        case 8: return narrow_tile<8, BITS, MIN>;
#endif
    }
    return nullptr;
}

NarrowTile narrow_kernel(const Matrix& w, int64_t m) {
    if (w.bits == 4) return w.minima ? narrow_for<4, true>(m) : narrow_for<4, false>(m);
    return w.minima ? narrow_for<8, true>(m) : narrow_for<8, false>(m);
}

// ------------------------------------------------------------------------------------------------ panel

// Two tiles unpacked: codes [cols/4][2][64], scales and minima [groups][2][16].
struct Panel {
    uint8_t* codes;
    float* scales;
    float* minima;
    float* y;  // [2][WIDE][16]
};

TK_INLINE uint8_t* aligned(void* p) { return (uint8_t*)(((uintptr_t)p + 63) & ~(uintptr_t)63); }

Panel panel_of(const Matrix& w, void* scratch) {
    uint8_t* p = aligned(scratch);
    Panel out;
    out.y = (float*)p;
    p += 2 * WIDE * 64;
    out.scales = (float*)p;
    p += w.groups() * 128;
    out.minima = (float*)p;
    p += w.groups() * 128;
    out.codes = p;
    return out;
}

// what is added to (code - zero) so that the stored byte is unsigned
TK_INLINE int32_t offset_of(const Matrix& w) { return w.minima ? 0 : w.bits == 4 ? 16 : 128; }

void unpack_tile(const Matrix& w, const uint8_t* tile, int which, const Panel& p) {
    const int64_t groups = w.groups(), header = w.header_bytes();
    for (int64_t g = 0; g < groups; g++, tile += w.group_bytes()) {
        fstore(p.scales + g * 32 + which * 16, header_floats(tile, w.dtype, 0));
        if (w.minima) fstore(p.minima + g * 32 + which * 16, header_floats(tile, w.dtype, 1));
        const uint8_t* codes = tile + header;
        uint8_t* to = p.codes + g * w.group * 32 + which * 64;
        if (w.bits == 8) {
            for (int64_t k = 0; k < w.group; k += 4) bstore(to + k * 32, bload(codes + k * 16));
            continue;
        }
        B shift = izero();
        if (!w.minima) shift = imul(isub(iset1(16), load_u8(header_zeros(tile, w.dtype))), iset1(0x01010101));
        for (int64_t k = 0; k < w.group; k += 8) {
            const B b = bload(codes + k * 8);
            bstore(to + k * 32, badd(low_nibbles(b), shift));
            bstore(to + k * 32 + 128, badd(high_nibbles(b), shift));
        }
    }
}

// Integer part of one group: d[i * M + t] += sums of tile i and token t. Rows of activations are reached from every third
// one, which is what address arithmetic offers.
template <int M, int BITS>
TK_INLINE void panel_dots(const uint8_t* codes, int64_t group, const int8_t* a, int64_t lda, I* d) {
    const int8_t* rows[(M + 2) / 3];
    TK_EACH(r, (M + 2) / 3, rows[r] = a + r * 3 * lda;);
    for (int64_t k = 0; k < group; k += 4, codes += 128) {
        const B w0 = bload(codes), w1 = bload(codes + 64);
        TK_EACH(t, M, {
            const B s = bset4(rows[t / 3] + t % 3 * lda);
            d[t] = dot<BITS>(d[t], w0, s);
            d[M + t] = dot<BITS>(d[M + t], w1, s);
        });
        TK_EACH(r, (M + 2) / 3, rows[r] += 4;);
    }
}

// M tokens by the 32 rows of a panel; result in p.y.
template <int M, int BITS, bool MIN>
void panel_block(const Matrix& w, const Panel& p, const Rows& in, int64_t t0) {
    const int64_t groups = w.groups(), lda = in.ldq, group = w.group;
    const int32_t offset = offset_of(w);
    const int8_t* a = in.q + t0 * lda;
    const int32_t* sums = in.sum + t0 * in.lds;
    const float* sa = in.scale + t0 * in.lds;
    F y[2 * M];
    TK_EACH(t, 2 * M, y[t] = fzero(););
    for (int64_t g = 0; g < groups; g++, a += group, sums++, sa++) {
        I d[2 * M];
        TK_EACH(t, M, d[t] = d[M + t] = MIN ? izero() : iset1(-offset * sums[t * in.lds]););
        panel_dots<M, BITS>(p.codes + g * group * 32, group, a, lda, d);
        const F s0 = fload(p.scales + g * 32), s1 = fload(p.scales + g * 32 + 16);
        TK_EACH(t, M, {
            const F s = fset1(sa[t * in.lds]);
            y[t] = fma(f_of(d[t]), fmul(s0, s), y[t]);
            y[M + t] = fma(f_of(d[M + t]), fmul(s1, s), y[M + t]);
            if (MIN) {
                const F sum = fset1(sa[t * in.lds] * float(sums[t * in.lds]));
                y[t] = fma(fload(p.minima + g * 32), sum, y[t]);
                y[M + t] = fma(fload(p.minima + g * 32 + 16), sum, y[M + t]);
            }
        });
    }
    TK_EACH(t, M, {
        fstore(p.y + t * 16, y[t]);
        fstore(p.y + (WIDE + t) * 16, y[M + t]);
    });
}

typedef void (*PanelBlock)(const Matrix&, const Panel&, const Rows&, int64_t);

template <int BITS, bool MIN>
PanelBlock panel_for(int64_t left, int64_t* m) {
    *m = left < WIDE ? left : WIDE;
    switch (*m) {
#if defined(__AVX512F__)
        case 6: return panel_block<6, BITS, MIN>;
        case 5: return panel_block<5, BITS, MIN>;
#endif
        case 4: return panel_block<4, BITS, MIN>;
        case 3: return panel_block<3, BITS, MIN>;
        case 2: return panel_block<2, BITS, MIN>;
        default: return panel_block<1, BITS, MIN>;
    }
}

PanelBlock panel_kernel(const Matrix& w, int64_t left, int64_t* m) {
    if (w.bits == 4) return w.minima ? panel_for<4, true>(left, m) : panel_for<4, false>(left, m);
    return w.minima ? panel_for<8, true>(left, m) : panel_for<8, false>(left, m);
}

void linear_panel(const Matrix& w, const Rows& in, int64_t count, int64_t t0, int64_t t1, const Store& to, void* scratch) {
    const Panel p = panel_of(w, scratch);
    for (int64_t tile = t0; tile < t1; tile += 2) {
        const bool two = tile + 1 < t1;
        unpack_tile(w, w.data + tile * w.tile_bytes(), 0, p);
        if (two) unpack_tile(w, w.data + (tile + 1) * w.tile_bytes(), 1, p);
        for (int64_t t = 0, m = 0; t < count; t += m) {
            panel_kernel(w, count - t, &m)(w, p, in, t);
            for (int64_t i = 0; i < m; i++) {
                store_tile(to, t + i, tile, fload(p.y + i * 16));
                if (two) store_tile(to, t + i, tile + 1, fload(p.y + (WIDE + i) * 16));
            }
        }
    }
}

bool same_shape(const Matrix& a, const Matrix& b) {
    return a.bits == b.bits && a.group == b.group && a.minima == b.minima && a.cols == b.cols;
}

void gated_panel(const Matrix& gate, const Matrix& up, const Rows& in, int64_t count, int64_t t0, int64_t t1,
                 const Store& to, void* scratch) {
    const Panel p = panel_of(gate, scratch);
    for (int64_t tile = t0; tile < t1; tile++) {
        unpack_tile(gate, gate.data + tile * gate.tile_bytes(), 0, p);
        unpack_tile(up, up.data + tile * up.tile_bytes(), 1, p);
        for (int64_t t = 0, m = 0; t < count; t += m) {
            panel_kernel(gate, count - t, &m)(gate, p, in, t);
            for (int64_t i = 0; i < m; i++)
                store_gated(to, t + i, tile, fload(p.y + i * 16), fload(p.y + (WIDE + i) * 16));
        }
    }
}

}  // namespace

int64_t linear_int_scratch(const Matrix& w) {
    return 128 + 2 * WIDE * 64 + w.groups() * 256 + w.cols * 32;
}

void linear_int(const Matrix& w, const Rows& in, int64_t count, int64_t t0, int64_t t1, const Store& to, void* scratch) {
    if (count >= PANEL_FROM) return linear_panel(w, in, count, t0, t1, to, scratch);
    for (int64_t tile = t0; tile < t1; tile++)
        for (int64_t t = 0; t < count; t += NARROW) {
            const int64_t m = count - t < NARROW ? count - t : NARROW;
            F y[NARROW];
            narrow_kernel(w, m)(w, w.data + tile * w.tile_bytes(), in, t, y);
            for (int64_t i = 0; i < m; i++) store_tile(to, t + i, tile, y[i]);
        }
}

void gated_int(const Matrix& gate, const Matrix& up, const Rows& in, int64_t count, int64_t t0, int64_t t1,
               const Store& to, void* scratch) {
    if (count >= PANEL_FROM && same_shape(gate, up)) return gated_panel(gate, up, in, count, t0, t1, to, scratch);
    for (int64_t tile = t0; tile < t1; tile++)
        for (int64_t t = 0; t < count; t += NARROW) {
            const int64_t m = count - t < NARROW ? count - t : NARROW;
            F g[NARROW], u[NARROW];
            narrow_kernel(gate, m)(gate, gate.data + tile * gate.tile_bytes(), in, t, g);
            narrow_kernel(up, m)(up, up.data + tile * up.tile_bytes(), in, t, u);
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
