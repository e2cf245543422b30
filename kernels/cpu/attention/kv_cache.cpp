// Keys and values in stored form: writing one token, and loading a cell of 16 tokens for the attention kernel.
#include "ops_isa.h"

namespace tk {
namespace TK_ISA {
namespace {

struct Affine {
    uint16_t scale, minimum;  // float16
};

// Scale and minimum of n values on a grid of `levels` steps, as they will be read back.
Affine affine_of(const float* x, int64_t n, float levels) {
    F low = fset1(INFINITY), high = fset1(-INFINITY);
    for (int64_t i = 0; i < n; i += 16) {
        low = fmin(fload(x + i), low);
        high = fmax(fload(x + i), high);
    }
    float lo = -hmax(fsub(fzero(), low)), hi = hmax(high);
    lo = lo > -65504.0f ? (lo < 65504.0f ? lo : 65504.0f) : -65504.0f;
    hi = hi > -65504.0f ? (hi < 65504.0f ? hi : 65504.0f) : -65504.0f;
    const uint16_t minimum = float_to_f16(lo);
    const float range = hi - f16_to_float(minimum);
    return {float_to_f16(range > 0.0f ? range / levels : 0.0f), minimum};
}

// Codes 0..levels of 16 values.
TK_INLINE I codes_of(const float* x, F minimum, F inverse, float levels) {
    const F c = fmul(fsub(fload(x), minimum), inverse);
    return i_of(fmin(fmax(c, fzero()), fset1(levels)));
}

// Codes of one token's head. Element i of `low` lies at low[i * stride], or two a byte where there are fewer than 8 bits;
// `high` holds the upper two bits of 6-bit codes, four a byte, or the upper one of 5-bit codes, eight a byte.
template <int BITS>
void write_ints(int64_t d, const float* x, uint8_t* low, uint8_t* high, int64_t stride, uint8_t* params) {
    constexpr float levels = float((1 << BITS) - 1);
    const Affine a = affine_of(x, d, levels);
    memcpy(params, &a, 4);
    const float scale = f16_to_float(a.scale);
    const F minimum = fset1(f16_to_float(a.minimum)), inverse = fset1(scale > 0.0f ? 1.0f / scale : 0.0f);
    for (int64_t i = 0; i < d; i += 16) {
        int32_t c[16];
        istore(c, codes_of(x + i, minimum, inverse, levels));
        if (BITS == 8)
            for (int j = 0; j < 16; j++) low[(i + j) * stride] = uint8_t(c[j]);
        else
            for (int j = 0; j < 8; j++) low[(i / 2 + j) * stride] = uint8_t((c[2 * j] & 15) | (c[2 * j + 1] & 15) << 4);
        if (BITS == 6)
            for (int j = 0; j < 4; j++) {
                const int32_t* q = c + 4 * j;
                high[(i / 4 + j) * stride] = uint8_t(q[0] >> 4 | q[1] >> 4 << 2 | q[2] >> 4 << 4 | q[3] >> 4 << 6);
            }
        if (BITS == 5)
            for (int j = 0; j < 2; j++) {
                int bits = 0;
                for (int e = 0; e < 8; e++) bits |= c[8 * j + e] >> 4 << e;
                high[(i / 8 + j) * stride] = uint8_t(bits);
            }
    }
}

void write_ints_of(int bits, int64_t d, const float* x, uint8_t* low, uint8_t* high, int64_t stride, uint8_t* params) {
    if (bits == 8) write_ints<8>(d, x, low, high, stride, params);
    else if (bits == 6) write_ints<6>(d, x, low, high, stride, params);
    else if (bits == 5) write_ints<5>(d, x, low, high, stride, params);
    else write_ints<4>(d, x, low, high, stride, params);
}

TK_INLINE I pair_bf16(F even, F odd) { return ior(bf16_bits(even), ishl(bf16_bits(odd), 16)); }

// 16 consecutive codes of a value row of d numbers as floats. `bits`: 8, 5 or 4.
TK_INLINE F value_codes(const uint8_t* row, int64_t d, int64_t i, int bits) {
    if (bits == 8) return f_of(load_u8(row + i));
    uint8_t c[16];
#if defined(__AVX2__)
    const __m128i x = _mm_loadl_epi64((const __m128i*)(row + i / 2)), low = _mm_set1_epi8(15);
    _mm_storeu_si128((__m128i*)c, _mm_unpacklo_epi8(_mm_and_si128(x, low), _mm_and_si128(_mm_srli_epi16(x, 4), low)));
#else
    for (int j = 0; j < 8; j++) {
        c[2 * j] = row[i / 2 + j] & 15;
        c[2 * j + 1] = row[i / 2 + j] >> 4;
    }
#endif
    if (bits == 5) {
        uint16_t high;
        memcpy(&high, row + d / 2 + i / 8, 2);
#if defined(__AVX2__)
        const __m128i each = _mm_set1_epi64x(int64_t(0x8040201008040201u));
        const __m128i both = _mm_unpacklo_epi64(_mm_set1_epi8(char(high & 255)), _mm_set1_epi8(char(high >> 8)));
        const __m128i set = _mm_cmpeq_epi8(_mm_and_si128(both, each), each);
        _mm_storeu_si128((__m128i*)c, _mm_or_si128(_mm_loadu_si128((const __m128i*)c), _mm_and_si128(set, _mm_set1_epi8(16))));
#else
        for (int j = 0; j < 16; j++) c[j] = uint8_t(c[j] | (high >> j & 1) << 4);
#endif
    }
    return f_of(load_u8(c));
}

// Codes of elements i and i + 1 of 16 keys at 6 bits; `low` holds their low bits, `high` the high ones of elements
// i & ~3 and on. The odd code is put together 16 times too large, which no shift to the right has to undo.
TK_INLINE void six_bits(I low, I high, bool second, F* a, F* b) {
    const I even = second ? iand(high, iset1(48)) : ishl(iand(high, iset1(3)), 4);
    const I odd = second ? ishl(iand(high, iset1(192)), 2) : ishl(iand(high, iset1(12)), 6);
    *a = f_of(ior(iand(low, iset1(15)), even));
    *b = fmul(f_of(ior(iand(low, iset1(240)), odd)), fset1(0.0625f));
}

// `bits`: 8, 6, 5 or 4.
void load_int_keys(int64_t d, int bits, const uint8_t* kc, const uint8_t* kp, bool to_bf16, void* out) {
    F scale, minimum;
    load_f16_pairs(kp, &scale, &minimum);
    for (int64_t i = 0; i < d; i += 2) {
        F a, b;
        if (bits < 6) {
            const I both = load_u8(kc + i * 8);
            a = f_of(iand(both, iset1(15)));
            b = fmul(f_of(iand(both, iset1(240))), fset1(0.0625f));
            if (bits == 5) {
                const I high = load_u8(kc + d * 8 + i / 8 * 16);
                const int bit = 1 << i % 8;
                a = fma(f_of(iand(high, iset1(bit))), fset1(16.0f / float(bit)), a);
                b = fma(f_of(iand(high, iset1(2 * bit))), fset1(8.0f / float(bit)), b);
            }
        } else if (bits == 6) {
            six_bits(load_u8(kc + i * 8), load_u8(kc + d * 8 + i / 4 * 16), i & 2, &a, &b);
        } else {
            a = f_of(load_u8(kc + i * 16));
            b = f_of(load_u8(kc + i * 16 + 16));
        }
        a = fma(a, scale, minimum);
        b = fma(b, scale, minimum);
        if (to_bf16) {
            istore((int32_t*)out + i * 8, pair_bf16(a, b));
        } else {
            fstore((float*)out + i * 16, a);
            fstore((float*)out + i * 16 + 16, b);
        }
    }
}

void load_int_values(int64_t d, int bits, const uint8_t* vc, const uint8_t* vp, bool to_bf16, int64_t tokens, void* out) {
    const int64_t row = d * bits / 8;
    for (int64_t t = 0; t < tokens; t += 2) {
        const bool two = t + 1 < tokens;
        uint16_t p[4] = {0, 0, 0, 0};
        memcpy(p, vp + 4 * t, two ? 8 : 4);
        const F s0 = fset1(f16_to_float(p[0])), m0 = fset1(f16_to_float(p[1]));
        const F s1 = fset1(f16_to_float(p[2])), m1 = fset1(f16_to_float(p[3]));
        for (int64_t i = 0; i < d; i += 16) {
            const F a = fma(value_codes(vc + t * row, d, i, bits), s0, m0);
            const F b = two ? fma(value_codes(vc + (t + 1) * row, d, i, bits), s1, m1) : fzero();
            if (to_bf16) {
                istore((int32_t*)out + t / 2 * d + i, pair_bf16(a, b));
            } else {
                fstore((float*)out + t * d + i, a);
                if (two) fstore((float*)out + (t + 1) * d + i, b);
            }
        }
    }
}

// 32 interleaved 16-bit numbers (a0 b0 a1 b1 …) as two rows of floats.
TK_INLINE void split_pairs(const uint8_t* p, bool bf16, F* a, F* b) {
    if (bf16) {
        *a = load_half<0>(p);
        *b = load_half<1>(p);
        return;
    }
    load_f16_pairs(p, a, b);
}

void load_half(int64_t d, bool bf16, const uint8_t* kc, const uint8_t* vc, bool to_bf16, int64_t tokens, void* k_out,
               void* v_out) {
    F a, b;
    for (int64_t i = 0; k_out && i < d; i += 2) {
        split_pairs(kc + i * 32, bf16, &a, &b);
        if (to_bf16) {
            istore((int32_t*)k_out + i * 8, pair_bf16(a, b));
        } else {
            fstore((float*)k_out + i * 16, a);
            fstore((float*)k_out + i * 16 + 16, b);
        }
    }
    for (int64_t t = 0; t < tokens; t += 2)
        for (int64_t i = 0; i < d; i += 16) {
            split_pairs(vc + (t / 2 * d + i) * 4, bf16, &a, &b);
            if (to_bf16) {
                istore((int32_t*)v_out + t / 2 * d + i, pair_bf16(a, b));
            } else {
                fstore((float*)v_out + t * d + i, a);
                if (t + 1 < tokens) fstore((float*)v_out + (t + 1) * d + i, b);
            }
        }
}

}  // namespace

void kv_write(int32_t type, int64_t d, const float* k, const float* v, uint8_t* kc, uint8_t* vc, uint8_t* kp,
              uint8_t* vp, int64_t lane, int32_t clear_next) {
    if (type >= KV_INT8) {
        uint8_t* row = vc + lane * d * value_bits(type) / 8;
        if (k) write_ints_of(key_bits(type), d, k, kc + lane, kc + d * 8 + lane, 16, kp + 4 * lane);
        write_ints_of(value_bits(type), d, v, row, row + d / 2, 1, vp + 4 * lane);
    } else if (type == KV_F32) {
        for (int64_t i = 0; k && i < d; i++) ((float*)kc)[i * 16 + lane] = k[i];
        memcpy((float*)vc + lane * d, v, size_t(d) * 4);
    } else {
        uint16_t* kh = (uint16_t*)kc;
        uint16_t* vh = (uint16_t*)vc + lane / 2 * d * 2 + lane % 2;
        auto halves = [&](const float* x, uint16_t* out) { type == KV_BF16 ? store_bf16(out, fload(x)) : store_f16(out, fload(x)); };
        for (int64_t i = 0; i < d; i += 16) {
            uint16_t a[16];
            halves(v + i, a);
            for (int64_t j = 0; j < 16; j++) vh[(i + j) * 2] = a[j];
            if (!k) continue;
            halves(k + i, a);
            for (int64_t j = 0; j < 16; j += 2) memcpy(kh + ((i + j) / 2 * 16 + lane) * 2, a + j, 4);
        }
        // the partner lane is multiplied by probability 0 until it is written: it must hold a finite number
        if (clear_next && lane % 2 == 0)
            for (int64_t i = 0; i < d; i++) vh[i * 2 + 1] = 0;
    }
}

void kv_cell(int64_t d, const float* k, const float* v, int64_t ld, uint8_t* kc, uint8_t* vc) {
    auto pairs = [&](const float* x, int64_t i, int64_t t) { return pair_bf16(fload(x + t * ld + i), fload(x + (t + 1) * ld + i)); };
    for (int64_t i = 0; i < d; i += 16) {
        int32_t keys[8 * 16];
        for (int64_t t = 0; t < 16; t += 2) {
            istore((int32_t*)vc + t / 2 * d + i, pairs(v, i, t));
            istore(keys + t * 8, pairs(k, i, t));
        }
        key_cell(16, 1, keys, kc + i * 32);
    }
}

void kv_load(int32_t type, int64_t d, const uint8_t* kc, const uint8_t* vc, const uint8_t* kp, const uint8_t* vp,
             int32_t bf16, int64_t tokens, void* k_out, void* v_out) {
    if (type >= KV_INT8) {
        if (k_out) load_int_keys(d, key_bits(type), kc, kp, bf16, k_out);
        load_int_values(d, value_bits(type), vc, vp, bf16, tokens, v_out);
    } else {
        load_half(d, type == KV_BF16, kc, vc, bf16, tokens, k_out, v_out);
    }
}

#if defined(__AVX512F__)
namespace {

// Lanes of 64 bits of a and b: the even or odd runs of `run` of them, alternating.
template <int RUN, bool ODD>
TK_INLINE B woven(B a, B b) {
    int64_t at[8];
    for (int i = 0; i < 8; i++) {
        const int from = (i & ~RUN) | (ODD ? RUN : 0);
        at[i] = from | (i & RUN ? 8 : 0);
    }
    return _mm512_permutex2var_epi64(a, _mm512_loadu_si512(at), b);
}

template <int RUN>
TK_INLINE void weave(B* x) {
    TK_EACH(i, 8, {
        if constexpr ((i & RUN) == 0) {
            const B a = x[i], b = x[i + RUN];
            x[i] = woven<RUN, false>(a, b);
            x[i + RUN] = woven<RUN, true>(a, b);
        }
    });
}

// 16 elements of 8 pairs of tokens. The 64 bits (d, d + 1) of a pair hold those of a pair of elements once their inner halves
// change places: what is left is to transpose 8 x 8 of them.
TK_INLINE void key_pairs(int64_t d, const uint8_t* values, uint8_t* keys) {
    const B swap = _mm512_set4_epi32(0x0f0e0b0a, 0x0d0c0908, 0x07060302, 0x05040100);
    B x[8];
    TK_EACH(p, 8, x[p] = _mm512_shuffle_epi8(bload(values + p * d * 4), swap););
    weave<1>(x);
    weave<2>(x);
    weave<4>(x);
    TK_EACH(j, 8, bstore(keys + j * 64, x[j]););
}

}  // namespace
#endif

void key_cell(int64_t d, int32_t bf16, const void* values, void* keys) {
    const float* v = (const float*)values;
    float* k = (float*)keys;
#if defined(__AVX512F__)
    for (int64_t i = 0; bf16 && i < d; i += 16) key_pairs(d, (const uint8_t*)values + i * 4, (uint8_t*)keys + i * 32);
#else
    for (int64_t pair = 0; bf16 && pair < 8; pair++)
        for (int64_t i = 0; i < d; i += 2) {
            // two elements of two tokens: their inner halves change places
            uint64_t x;
            memcpy(&x, (const uint8_t*)values + (pair * d + i) * 4, 8);
            x = (x & 0xffff00000000ffffu) | (x >> 16 & 0xffff0000u) | (x & 0xffff0000u) << 16;
            memcpy((uint8_t*)keys + i * 32 + pair * 8, &x, 8);
        }
#endif
    if (bf16) return;
    for (int64_t t = 0; t < 16; t += 4)
        for (int64_t i = 0; i < d; i += 4) {
#if defined(__AVX2__)
            __m128 a = _mm_loadu_ps(v + t * d + i), b = _mm_loadu_ps(v + (t + 1) * d + i);
            __m128 c = _mm_loadu_ps(v + (t + 2) * d + i), e = _mm_loadu_ps(v + (t + 3) * d + i);
            _MM_TRANSPOSE4_PS(a, b, c, e);
            _mm_storeu_ps(k + i * 16 + t, a);
            _mm_storeu_ps(k + i * 16 + 16 + t, b);
            _mm_storeu_ps(k + i * 16 + 32 + t, c);
            _mm_storeu_ps(k + i * 16 + 48 + t, e);
#else
            for (int64_t j = 0; j < 16; j++) k[(i + j % 4) * 16 + t + j / 4] = v[(t + j / 4) * d + i + j % 4];
#endif
        }
}

}  // namespace TK_ISA
}  // namespace tk
