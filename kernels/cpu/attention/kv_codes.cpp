// Cells of codes of up to 8 bits to bytes, four of a lane side by side, and queries to the integers that multiply them (codes.h).
#include "ops_isa.h"

#if defined(TK_READS_CODES)
#include "attention/codes.h"

namespace tk {
namespace TK_ISA {
namespace {

// What a shuffle takes, byte by byte of its result.
template <class At>
TK_INLINE B bytes_of(At at) {
    uint8_t from[64];
    for (int i = 0; i < 64; i++) from[i] = uint8_t(at(i));
    return bload(from);
}

// The same, number by number.
template <class At>
TK_INLINE B numbers_of(At at) {
    int32_t from[16];
    for (int i = 0; i < 16; i++) from[i] = at(i);
    return iload(from);
}

// A register has four lanes of four groups of four bytes. Byte i of it: which lane, which group of the lane, which byte.
constexpr int lane_of(int i) { return i / 16; }
constexpr int group_of(int i) { return i / 4 % 4; }

// Four rows of 16 bytes to 16 groups of four, one of each row: first the rows' groups change places, then bytes in a lane.
struct Turn {
    B groups = numbers_of([](int i) { return i % 4 * 4 + i / 4; });
    B bytes = bytes_of([](int i) { return i % 4 * 4 + group_of(i); });
    __attribute__((always_inline)) B operator()(B x) const { return _mm512_shuffle_epi8(_mm512_permutexvar_epi32(groups, x), bytes); }
};

TK_INLINE B four_rows(const uint8_t* p, int64_t row) {
    B x = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i*)p));
    x = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i*)(p + row)), 1);
    x = _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i*)(p + 2 * row)), 2);
    return _mm512_inserti32x4(x, _mm_loadu_si128((const __m128i*)(p + 3 * row)), 3);
}

TK_INLINE B with_sixteen(B codes, B bits, B mask) {
    return _mm512_mask_add_epi8(codes, _mm512_test_epi8_mask(bits, mask), codes, _mm512_set1_epi8(16));
}

// 16 bytes of upper bits, one a token: each to the four bytes of its token.
TK_INLINE B spread(const uint8_t* p, B bytes) { return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p)), bytes); }

template <int BITS>
void keys_to_bytes(int64_t d, const uint8_t* kc, uint8_t* out) {
    const Turn turn;
    // two rows of pairs of elements: each row's groups of tokens side by side, then each byte twice
    const B groups = numbers_of([](int i) { return i % 4 / 2 * 4 + i / 4; });
    const B twice = bytes_of([](int i) { return i % 4 / 2 * 8 + group_of(i); });
    const B own = bytes_of([](int i) { return lane_of(i) * 4 + group_of(i); });
    const B bit[] = {bytes_of([](int i) { return 1 << i % 4; }), bytes_of([](int i) { return 16 << i % 4; })};
    const B low = _mm512_set1_epi16(0x000f), high = _mm512_set1_epi16(0x0f00);
    auto byte = [](int n) { return iset1(int32_t(uint32_t(48) << 8 * n)); };
    for (int64_t i = 0; i < d; i += 4) {
        if (BITS == 8) {
            bstore(out + i * 16, turn(bload(kc + i * 16)));
            continue;
        }
        B x = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)(kc + i * 8)));
        x = _mm512_shuffle_epi8(_mm512_permutexvar_epi32(groups, x), twice);
        x = ior(iand(x, low), iand(ishr(x, 4), high));
        if (BITS == 5) x = with_sixteen(x, spread(kc + d * 8 + i / 8 * 16, own), bit[i / 4 % 2]);
        if (BITS == 6) {
            const B h = spread(kc + d * 8 + i / 4 * 16, own);
            x = ior(ior(x, iand(ishl(h, 4), byte(0))), ior(iand(ishl(h, 2), byte(1)), ior(iand(h, byte(2)), iand(ishr(h, 2), byte(3)))));
        }
        bstore(out + i * 16, x);
    }
}

// The upper bits of 16 columns of four rows, two bytes a row.
TK_INLINE uint64_t upper_bits(const uint8_t* p, int64_t row) {
    uint64_t all = 0;
    TK_EACH(j, 4, {
        uint16_t x;
        memcpy(&x, p + j * row, 2);
        all |= uint64_t(x) << 16 * j;
    });
    return all;
}

template <int BITS>
void values_to_bytes(int64_t d, const uint8_t* vc, int64_t tokens, uint8_t* out) {
    const int64_t row = d * BITS / 8;
    const Turn turn;
    // 16 bytes of pairs of columns a row: the groups that hold 16 columns, then each row's byte of a pair twice
    const B groups[] = {numbers_of([](int i) { return i % 4 * 4 + i / 8; }), numbers_of([](int i) { return i % 4 * 4 + 2 + i / 8; })};
    const B twice = bytes_of([](int i) { return i % 4 * 4 + lane_of(i) % 2 * 2 + group_of(i) / 2; });
    const B shift = numbers_of([](int i) { return i % 2 * 4; }), low = _mm512_set1_epi8(15);
    const B own = bytes_of([](int i) { return i % 4 * 2 + lane_of(i) / 2; });
    const B bit = bytes_of([](int i) { return 1 << (lane_of(i) * 4 + group_of(i)) % 8; });
    for (int64_t t = 0; t < tokens; t += 4, vc += 4 * row, out += 4 * d) {
        if (BITS == 8)
            for (int64_t i = 0; i < d; i += 16) bstore(out + i * 4, turn(four_rows(vc + i, row)));
        for (int64_t i = 0; BITS < 8 && i < d; i += 32) {  // of 16 columns at the end eight bytes behind them are read too
            const B pairs = four_rows(vc + i / 2, row);
            TK_EACH(half, 2, {
                const int64_t col = i + 16 * half;
                if (col == d) return;
                B x = _mm512_shuffle_epi8(_mm512_permutexvar_epi32(groups[half], pairs), twice);
                x = iand(_mm512_srlv_epi32(x, shift), low);
                if (BITS == 5) x = with_sixteen(x, _mm512_shuffle_epi8(_mm512_set1_epi64(int64_t(upper_bits(vc + d / 2 + col / 8, row))), own), bit);
                bstore(out + col * 4, x);
            });
        }
    }
}

}  // namespace

void kv_bytes(int32_t type, int64_t d, const uint8_t* kc, const uint8_t* vc, int64_t tokens, uint8_t* k_out, uint8_t* v_out) {
    const int keys = key_bits(type), values = value_bits(type);
    (keys == 8 ? keys_to_bytes<8> : keys == 6 ? keys_to_bytes<6> : keys == 5 ? keys_to_bytes<5> : keys_to_bytes<4>)(d, kc, k_out);
    (values == 8 ? values_to_bytes<8> : values == 5 ? values_to_bytes<5> : values_to_bytes<4>)(d, vc, tokens, v_out);
}

void query_codes(const float* x, int64_t d, uint8_t* out) {
    F top = fzero(), lost = fzero();
    for (int64_t i = 0; i < d; i += 16) {
        const F v = fload(x + i);
        top = fmax(fabs(v), top);
        lost = fadd(lost, fsub(v, v));  // NaN where x has no finite number
    }
    const float most = hmax(top);
    const F inverse = fset1(to_integers(most));
    I sum = izero();
    for (int64_t i = 0; i < d; i += 16) {
        const I v = i_of(fmul(fload(x + i), inverse));
        store_bytes(v, (int8_t*)out + i, (int8_t*)out + d + i);
        sum = iadd(sum, v);
    }
    const float factor = most / MOST;
    const QueryTail tail{factor, factor * float(hsum(sum)) + hsum(lost)};
    memcpy(out + 2 * d, &tail, sizeof tail);
}

}  // namespace TK_ISA
}  // namespace tk
#endif
