// From integer codes to operands of the tensor cores, without an integer-to-float conversion.
//
// A number whose exponent makes the last bit of its mantissa worth one is that integer when a code is put into these bits:
// 0x6400 | c is 1024 + c in float16, 0x4300 | c is 128 + c in bfloat16 (c < 128), 0x4b000000 | c is 2^23 + c in float32. Taking
// away 1024 + zero (…) leaves code - zero, exactly. In float16 a code four bits higher up counts sixteenfold; the
// multiplication by 1/16 costs nothing in the addition that is there anyway.
#pragma once

#include "hardware.cuh"

namespace tk {

// The zeros of a lane's two rows, in the form that `fragment` takes. `prepare` makes them of bytes `place` and place + 1
// of a word.
struct Zeros {
    uint32_t first, second;
};

// A pair of 16-bit numbers: this high byte, and in the low one byte `place` of `word`.
TK_DEVICE uint32_t pair_below(uint32_t high, uint32_t word, int place) {
    return choose_bytes(word, high, 0x4040 + 0x0101 * place);
}

template <class T, int BITS>
struct Codes;

template <>
struct Codes<Half, 4> {
    static constexpr uint32_t MIDDLE = 8;  // the zero of a symmetric grid
    static constexpr int WORDS = 1;        // of codes, for a lane's operand of one product

    static TK_DEVICE Zeros prepare(uint32_t word, int place) {  // -(1024 + zero), -(64 + zero)
        constexpr uint32_t ONE = 0x3c003c00, MORE = 0x63806380;
        return {pair_below(0xe4, word, place), fma_pair<Half>(pair_below(0xe4, word, place + 1), ONE, MORE)};
    }

    // code - zero, exactly. Nibble r + 4e of `words` belongs to register r, element e.
    static TK_DEVICE void fragment(uint32_t (&a)[4], const uint32_t* words, const Zeros& zeros) {
        constexpr uint32_t ONE = 0x3c003c00, SIXTEENTH = 0x2c002c00;
        const uint32_t low = words[0], high = words[0] >> 8;
        a[0] = fma_pair<Half>(and_or<0x000f000f, 0x64006400>(low), ONE, zeros.first);
        a[1] = fma_pair<Half>(and_or<0x00f000f0, 0x64006400>(low), SIXTEENTH, zeros.second);
        a[2] = fma_pair<Half>(and_or<0x000f000f, 0x64006400>(high), ONE, zeros.first);
        a[3] = fma_pair<Half>(and_or<0x00f000f0, 0x64006400>(high), SIXTEENTH, zeros.second);
    }
};

template <>
struct Codes<Bf16, 4> {
    static constexpr uint32_t MIDDLE = 8;
    static constexpr int WORDS = 1;

    static TK_DEVICE Zeros prepare(uint32_t word, int place) {  // -(128 + zero)
        return {pair_below(0xc3, word, place), pair_below(0xc3, word, place + 1)};
    }

    static TK_DEVICE void fragment(uint32_t (&a)[4], const uint32_t* words, const Zeros& zeros) {
        constexpr uint32_t ONE = 0x3f803f80;
#pragma unroll
        for (int r = 0; r < 4; ++r)
            a[r] = fma_pair<Bf16>(and_or<0x000f000f, 0x43004300>(words[0] >> 4 * r), ONE,
                                  r % 2 ? zeros.second : zeros.first);
    }
};

template <>
struct Codes<Half, 8> {
    static constexpr uint32_t MIDDLE = 128;
    static constexpr int WORDS = 2;

    static TK_DEVICE Zeros prepare(uint32_t word, int place) {
        return {pair_below(0xe4, word, place), pair_below(0xe4, word, place + 1)};
    }

    // Byte 2·(r % 2) + e of word r / 2 belongs to register r, element e.
    static TK_DEVICE void fragment(uint32_t (&a)[4], const uint32_t* words, const Zeros& zeros) {
        constexpr uint32_t ONE = 0x3c003c00, EXPONENT = 0x64646464;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            a[2 * i] = fma_pair<Half>(choose_bytes(words[i], EXPONENT, 0x4140), ONE, zeros.first);
            a[2 * i + 1] = fma_pair<Half>(choose_bytes(words[i], EXPONENT, 0x4342), ONE, zeros.second);
        }
    }
};

// Eight bits of code and bfloat16's eight of precision: by way of float32.
template <>
struct Codes<Bf16, 8> {
    static constexpr uint32_t MIDDLE = 128;
    static constexpr int WORDS = 2;

    static TK_DEVICE Zeros prepare(uint32_t word, int place) {
        return {choose_bytes(word, 0x4b000000, 0x7440 + place), choose_bytes(word, 0x4b000000, 0x7441 + place)};
    }

    static TK_DEVICE void fragment(uint32_t (&a)[4], const uint32_t* words, const Zeros& zeros) {
        constexpr uint32_t EXPONENT = 0x4b000000;
        const float first = float_of_bits(zeros.first), second = float_of_bits(zeros.second);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float e0 = float_of_bits(choose_bytes(words[i], EXPONENT, 0x7440)) - first;
            const float o0 = float_of_bits(choose_bytes(words[i], EXPONENT, 0x7441)) - first;
            const float e1 = float_of_bits(choose_bytes(words[i], EXPONENT, 0x7442)) - second;
            const float o1 = float_of_bits(choose_bytes(words[i], EXPONENT, 0x7443)) - second;
            a[2 * i] = choose_bytes(bits_of_float(e0), bits_of_float(o0), 0x7632);
            a[2 * i + 1] = choose_bytes(bits_of_float(e1), bits_of_float(o1), 0x7632);
        }
    }
};

}  // namespace tk
