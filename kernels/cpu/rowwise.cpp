// Work on one row at a time: quantization of activations, norms, rope, Hadamard, activations, conversions.
#include "ops_isa.h"

namespace tk {
namespace TK_ISA {

namespace {

constexpr int64_t GATHER = 1024;  // columns gathered at a time

// The greatest |x|, as its bits: of numbers from 0 on they are in the numbers' order, NaN behind them all. A maximum of floats would
// forget a NaN at the next number.
TK_INLINE I largest(const float* x, int64_t n, I top) {
    for (int64_t k = 0; k < n; k += 16) top = imax(top, as_i(fabs(fload(x + k))));
    return top;
}

TK_INLINE float number_of(I top) { return bits_to_float(uint32_t(hmax(top))); }

// Codes of x, and their sum added to `total`. |x| * inverse is at most 127 after rounding, so that codes are summed as they are.
TK_INLINE I codes_of(const float* x, int64_t n, F inverse, I total, int8_t* q) {
    for (int64_t k = 0; k < n; k += 16) {
        const I code = i_of(fmul(fload(x + k), inverse));
        store_s8(q + k, code);
        total = iadd(total, code);
    }
    return total;
}

TK_INLINE F inverse_of(float amax) { return fset1(amax > 1e-30f ? 127.0f / amax : 0.0f); }

TK_INLINE void tell(float amax, I total, float* scale, int32_t* sum) {
    *scale = amax / 127.0f;
    *sum = amax < INFINITY ? hsum(total) : 0;  // codes of what is no number are any
}

TK_INLINE void quantize_group(const float* x, int64_t group, int8_t* q, float* scale, int32_t* sum) {
    const float amax = number_of(largest(x, group, izero()));
    tell(amax, codes_of(x, group, inverse_of(amax), izero(), q), scale, sum);
}

void quantize_gathered(const float* x, const int32_t* perm, int64_t group, int8_t* q, float* scale, int32_t* sum) {
    float part[GATHER];
    auto gather = [&](int64_t from) {
        const int64_t n = group - from < GATHER ? group - from : GATHER;
        for (int64_t k = 0; k < n; k++) part[k] = x[perm[from + k]];
        return n;
    };
    I top = izero();
    for (int64_t k = 0; k < group; k += GATHER) top = largest(part, gather(k), top);
    const float amax = number_of(top);
    I total = izero();
    for (int64_t k = 0; k < group; k += GATHER) {
        const int64_t n = group > GATHER ? gather(k) : group;
        total = codes_of(part, n, inverse_of(amax), total, q + k);
    }
    tell(amax, total, scale, sum);
}

}  // namespace

// Symmetric int8 by groups: scale = max|x| / 127, q = round(x / scale), sum = sum of q. Where a group holds NaN its scale is NaN.
void quantize(const float* x, const int32_t* perm, int64_t group, int64_t g0, int64_t g1, int8_t* q, float* scale,
              int32_t* sum) {
    for (int64_t g = g0; g < g1; g++) {
        int8_t* to = q + g * group;
        if (perm) quantize_gathered(x, perm + g * group, group, to, scale + g, sum + g);
        else if (group == 64) quantize_group(x + g * 64, 64, to, scale + g, sum + g);
        else quantize_group(x + g * group, group, to, scale + g, sum + g);
    }
}

void rms_norm(const float* x, const float* w, int64_t n, float eps, float* out) {
    const int64_t whole = n / 16 * 16;
    F a = fzero(), b = fzero();
    int64_t k = 0;
    for (; k + 32 <= whole; k += 32) {
        const F u = fload(x + k), v = fload(x + k + 16);
        a = fma(u, u, a);
        b = fma(v, v, b);
    }
    for (; k < whole; k += 16) a = fma(fload(x + k), fload(x + k), a);
    float total = hsum(fadd(a, b));
    for (; k < n; k++) total += x[k] * x[k];
    const float r = 1.0f / sqrtf(total / float(n) + eps);
    for (k = 0; k < whole; k += 16) fstore(out + k, fmul(fmul(fload(x + k), fset1(r)), fload(w + k)));
    for (; k < n; k++) out[k] = x[k] * r * w[k];
}

void layer_norm(const float* x, const float* w, const float* b, int64_t n, float eps, float* out) {
    const int64_t whole = n / 16 * 16;
    F a = fzero();
    int64_t k = 0;
    for (; k < whole; k += 16) a = fadd(a, fload(x + k));
    float total = hsum(a);
    for (; k < n; k++) total += x[k];
    const float mean = total / float(n);
    a = fzero();
    for (k = 0; k < whole; k += 16) {
        const F d = fsub(fload(x + k), fset1(mean));
        a = fma(d, d, a);
    }
    total = hsum(a);
    for (; k < n; k++) total += (x[k] - mean) * (x[k] - mean);
    const float r = 1.0f / sqrtf(total / float(n) + eps);
    for (k = 0; k < whole; k += 16) {
        const F y = fmul(fmul(fsub(fload(x + k), fset1(mean)), fset1(r)), fload(w + k));
        fstore(out + k, b ? fadd(y, fload(b + k)) : y);
    }
    for (; k < n; k++) out[k] = (x[k] - mean) * r * w[k] + (b ? b[k] : 0.0f);
}

void add_scaled(float* y, const float* x, float alpha, int64_t n) {
    int64_t k = 0;
    for (; k + 16 <= n; k += 16) fstore(y + k, fma(fload(x + k), fset1(alpha), fload(y + k)));
    for (; k < n; k++) y[k] = y[k] + alpha * x[k];
}

void rope(float* x, const float* cos, const float* sin, int64_t rotary) {
    const int64_t half = rotary / 2;
    int64_t i = 0;
    for (; i + 16 <= half; i += 16) {
        const F a = fload(x + i), b = fload(x + half + i), c = fload(cos + i), s = fload(sin + i);
        fstore(x + i, fsub(fmul(a, c), fmul(b, s)));
        fstore(x + half + i, fma(a, s, fmul(b, c)));
    }
    for (; i < half; i++) {
        const float a = x[i], b = x[half + i];
        x[i] = a * cos[i] - b * sin[i];
        x[half + i] = b * cos[i] + a * sin[i];
    }
}

namespace {

// Of lanes a and b whose numbers differ by H: a + b and a - b, as if each were added alone.
template <int H>
TK_INLINE F sums_and_differences(F x) {
    static const float one[4][16] = {
        {1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1},
        {1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1},
        {1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1},
        {1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1},
    };
    return fma(x, fload(one[H == 1 ? 0 : H == 2 ? 1 : H == 4 ? 2 : 3]), fswap<H>(x));
}

void turn_lanes(float* v, int64_t block) {
    for (int64_t i = 0; i < block; i += 16) {
        F x = fload(v + i);
        x = sums_and_differences<8>(sums_and_differences<4>(sums_and_differences<2>(sums_and_differences<1>(x))));
        fstore(v + i, x);
    }
    for (int64_t h = 16; h < block; h *= 2)
        for (int64_t i = 0; i < block; i += 2 * h)
            for (int64_t j = i; j < i + h; j += 16) {
                const F a = fload(v + j), b = fload(v + j + h);
                fstore(v + j, fadd(a, b));
                fstore(v + j + h, fsub(a, b));
            }
}

// Of blocks that fill no register.
void turn_few(float* v, int64_t block) {
    for (int64_t h = 1; h < block; h *= 2)
        for (int64_t i = 0; i < block; i += 2 * h)
            for (int64_t j = i; j < i + h; j++) {
                const float a = v[j], b = v[j + h];
                v[j] = a + b;
                v[j + h] = a - b;
            }
}

}  // namespace

// Orthonormal Walsh-Hadamard transform of blocks as long as the largest power of two that divides n.
void hadamard(float* x, int64_t n) {
    const int64_t block = n & -n;
    const float norm = 1.0f / sqrtf(float(block));
    for (float* v = x; v < x + n; v += block) {
        (block < 16 ? turn_few : turn_lanes)(v, block);
        for (int64_t i = 0; i < block; i++) v[i] *= norm;
    }
}

void activate(float* x, int64_t n, int32_t activation) {
    for (int64_t k = 0; k < n; k += 16) fstore(x + k, apply_activation(fload(x + k), activation));
}

void xielu(float* x, int64_t n, float above, float below, float slope) {
    for (int64_t k = 0; k < n; k += 16) {
        const F v = fload(x + k), high = fmax(fzero(), v), low = fmin(fzero(), v);  // NaN stays NaN: see fexp
        const F bent = fmul(fset1(below), fsub(fsub(fexp(low), fset1(1.0f)), low));
        fstore(x + k, fma(v, fset1(slope), fma(fmul(high, high), fset1(above), bent)));
    }
}

// y *= act(x), or y *= x where activation is -1.
void multiply(float* y, const float* x, int64_t n, int32_t activation) {
    for (int64_t k = 0; k < n; k += 16) {
        const F by = load_part(x + k, n - k);
        store_part(y + k, n - k, fmul(load_part(y + k, n - k), activation < 0 ? by : apply_activation(by, activation)));
    }
}

void to_bf16(const float* x, uint16_t* out, int64_t n) {
    for (int64_t k = 0; k < n; k += 16) store_bf16(out + k, fload(x + k));
}

float row_max(const float* x, int64_t n, int64_t* index, int32_t* has_nan) {
    F top = fset1(-INFINITY), poison = fzero();
    int64_t k = 0;
    for (; k + 16 <= n; k += 16) {
        const F v = fload(x + k);
        top = fmax(v, top);
        poison = fma(v, fzero(), poison);  // NaN where v is NaN (or infinite)
    }
    float best = hmax(top);
    float bad = hsum(poison);
    for (; k < n; k++) {
        best = x[k] > best ? x[k] : best;
        bad += x[k] * 0.0f;
    }
    *has_nan = 0;
    *index = 0;
    if (bad != bad)
        for (int64_t i = 0; i < n; i++)
            if (x[i] != x[i]) *has_nan = 1;
    if (!*has_nan) {
        int64_t i = 0;
        while (i + 64 <= n && hmax(fmax(fmax(fload(x + i), fload(x + i + 16)), fmax(fload(x + i + 32), fload(x + i + 48)))) < best)
            i += 64;
        while (i < n && x[i] != best) i++;
        *index = i < n ? i : 0;
    }
    return best;
}

int64_t at_least(const float* x, int64_t n, float low, int32_t* ids) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) {  // no branch: which way it goes is hard to foresee
        ids[count] = int32_t(i);
        count += x[i] >= low;
    }
    return count;
}

double sum_exp(const float* x, int64_t n, float max, float scale) {
    double total = 0.0;
    int64_t k = 0;
    while (k + 16 <= n) {
        F s = fzero();
        for (int64_t end = k + 1024; k + 16 <= n && k < end; k += 16)
            s = fadd(s, fexp(fmul(fsub(fload(x + k), fset1(max)), fset1(scale))));
        total += double(hsum(s));
    }
    for (; k < n; k++) total += double(expf((x[k] - max) * scale));
    return total;
}

void scale_logits(float* x, int64_t n, float scale, float softcap) {
    for (int64_t k = 0; k < n; k += 16) {
        F v = fmul(fload(x + k), fset1(scale));
        if (softcap > 0.0f) v = fmul(fset1(softcap), ftanh(fdiv(v, fset1(softcap))));
        fstore(x + k, v);
    }
}

}  // namespace TK_ISA
}  // namespace tk
