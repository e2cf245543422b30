// Trellis codes on processors that permute 16 bytes at a time (AVX2): 32 places are looked up by sixteen shuffles. A shuffle gives nothing
// where a place's highest bit is set. So with places less 16 k each shows its table from the k-th sixteen on, and the tables hold what each
// sixteen changes of the one before.
#pragma once

#include <immintrin.h>

#include "linear/trellis_windows.h"

namespace tk {
namespace TK_ISA {
namespace {

// The table, plus 128: places under 128 and the others.
struct alignas(32) Changes {
    uint8_t low[8][32], high[8][32];

    explicit Changes(int bits) {
        const int8_t* table = trellis_table(bits);
        for (int k = 0; k < 8; k++)
            for (int i = 0; i < 32; i++) {
                const int8_t *a = table + 16 * k + i % 16, *b = a + 128;
                low[k][i] = uint8_t(a[0] ^ (k ? a[-16] : 128));
                high[k][i] = uint8_t(b[0] ^ (k ? b[-16] : 128));
            }
    }
};

TK_INLINE __m256i load_whole(const void* p) { return _mm256_load_si256((const __m256i*)p); }

// Codes of eight columns of eight rows, those of rows 4 to 7 in the upper half.
template <int BITS>
TK_INLINE __m256i load_rows(const uint8_t* codes) {
    if (BITS == 4) return _mm256_loadu_si256((const __m256i*)codes);
    const __m128i low = _mm_loadu_si128((const __m128i*)codes);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), BITS == 2 ? low : _mm_loadu_si128((const __m128i*)(codes + 8)), 1);
}

TK_INLINE __m256i cut_windows(const Windows& w, int half, __m256i x) {
    const __m256i even = _mm256_mullo_epi16(_mm256_shuffle_epi8(x, load_whole(w.even[half])), load_whole(w.even_up[half]));
    const __m256i odd = _mm256_mullo_epi16(_mm256_shuffle_epi8(x, load_whole(w.odd[half])), load_whole(w.odd_up[half]));
    return _mm256_or_si256(_mm256_srli_epi16(even, 8), _mm256_and_si256(odd, _mm256_set1_epi16(int16_t(0xff00))));
}

// (Assembly, for g++ 12 makes all shuffles first and has no registers left for their sums.)
TK_INLINE void add_changes(__m256i& sum, __m256i table, __m256i at) {
    __m256i x;
    __asm__("vpshufb %3, %2, %1\n\tvpxor %1, %0, %0" : "+x"(sum), "=&x"(x) : "x"(table), "x"(at));
}

// What four times 32 places hold: together, for each table is loaded once.
TK_INLINE void look_up(const Changes& c, const __m256i* places, __m256i* out) {
    __m256i at[4], low[4], high[4];
    TK_EACH(i, 4, {
        at[i] = _mm256_and_si256(places[i], _mm256_set1_epi8(127));
        low[i] = _mm256_shuffle_epi8(load_whole(c.low[0]), at[i]);
        high[i] = _mm256_shuffle_epi8(load_whole(c.high[0]), at[i]);
    });
    TK_EACH(k, 7, {
        const __m256i a = load_whole(c.low[k + 1]), b = load_whole(c.high[k + 1]);
        TK_EACH(i, 4, {
            __asm__("vpsubb %1, %0, %0" : "+x"(at[i]) : "xm"(_mm256_set1_epi8(16)));
            add_changes(low[i], a, at[i]);
            add_changes(high[i], b, at[i]);
        });
    });
    TK_EACH(i, 4, out[i] = _mm256_blendv_epi8(low[i], high[i], places[i]););
}

template <int BITS>
void expand_group_bytes(const uint8_t* codes, const uint8_t* bytes_before, int64_t columns, uint8_t* out) {
    static const Windows w(BITS);
    static const Changes c(BITS);
    const __m256i bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)bytes_before));
    __m256i old[2] = {_mm256_shuffle_epi8(bytes, load_whole(w.spread[0])), _mm256_shuffle_epi8(bytes, load_whole(w.spread[1]))};
    for (int64_t k = 0; k < columns; k += 8, codes += 16 * BITS, out += 128) {
        __m256i places[4], values[4];
        TK_EACH(h, 2, {
            const __m256i now = load_rows<BITS>(codes + 8 * BITS * h);
            const __m256i before = _mm256_shuffle_epi8(old[h], load_whole(w.last));
            places[h] = cut_windows(w, 0, _mm256_or_si256(_mm256_shuffle_epi8(now, load_whole(w.codes)), before));
            places[2 + h] = cut_windows(w, 1, now);
            old[h] = now;
        });
        look_up(c, places, values);
        TK_EACH(i, 4, _mm256_storeu_si256((__m256i*)(out + 32 * i), values[i]););
    }
}

}  // namespace
}  // namespace TK_ISA
}  // namespace tk
