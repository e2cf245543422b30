"""Small helpers inside kernels: rounding, codes to floating point, Hadamard turns.

Integer-to-float conversions run at a quarter of the rate of other instructions and would bind the quantized kernels.
Codes are therefore placed in the mantissa of a constant, and the constant is subtracted: about 1.4 instructions for an
int4 element and 1 (fp16) or 2.5 (bf16) for an int8 one. The interpreter takes the plain conversion instead.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import INTERPRETED

EMULATE = tl.constexpr(INTERPRETED)  # the interpreter cuts bf16 off instead of rounding it

# Bytes b0..b3 in one register; two results of two 16-bit floats each. 0x6400 is 1024 in fp16, 0x4300 is 128 in bf16.
_NIBBLES_FP16 = """{
.reg .b32 t, c;
mov.b32 c, 0x64006400;
SHIFT
and.b32 t, t, 0x0F0F0F0F;
prmt.b32 $0, t, 0x64646464, 0x4140;
prmt.b32 $1, t, 0x64646464, 0x4342;
sub.f16x2 $0, $0, c;
sub.f16x2 $1, $1, c;
}"""
_NIBBLES_BF16 = """{
.reg .b32 t, c, one;
mov.b32 c, 0xC300C300;
mov.b32 one, 0x3F803F80;
SHIFT
and.b32 t, t, 0x0F0F0F0F;
prmt.b32 $0, t, 0x43434343, 0x4140;
prmt.b32 $1, t, 0x43434343, 0x4342;
fma.rn.bf16x2 $0, $0, one, c;
fma.rn.bf16x2 $1, $1, one, c;
}"""
LOW_FP16 = tl.constexpr(_NIBBLES_FP16.replace("SHIFT", "mov.b32 t, $2;"))
HIGH_FP16 = tl.constexpr(_NIBBLES_FP16.replace("SHIFT", "shr.u32 t, $2, 4;"))
LOW_BF16 = tl.constexpr(_NIBBLES_BF16.replace("SHIFT", "mov.b32 t, $2;"))
HIGH_BF16 = tl.constexpr(_NIBBLES_BF16.replace("SHIFT", "shr.u32 t, $2, 4;"))
BYTES_FP16 = tl.constexpr("""{
.reg .b32 c;
mov.b32 c, 0x64006400;
prmt.b32 $0, $2, 0x64646464, 0x4140;
prmt.b32 $1, $2, 0x64646464, 0x4342;
sub.f16x2 $0, $0, c;
sub.f16x2 $1, $1, c;
}""")
# 0x4B000000 is 2^23 in fp32: its lowest mantissa byte counts units
BYTES_BF16 = tl.constexpr("""{
.reg .b32 r0, r1, r2, r3;
.reg .f32 f0, f1, f2, f3, c;
mov.f32 c, 0f4B000000;
prmt.b32 r0, $2, 0x4B000000, 0x7440;
prmt.b32 r1, $2, 0x4B000000, 0x7441;
prmt.b32 r2, $2, 0x4B000000, 0x7442;
prmt.b32 r3, $2, 0x4B000000, 0x7443;
mov.b32 f0, r0;
mov.b32 f1, r1;
mov.b32 f2, r2;
mov.b32 f3, r3;
sub.f32 f0, f0, c;
sub.f32 f1, f1, c;
sub.f32 f2, f2, c;
sub.f32 f3, f3, c;
cvt.rn.bf16x2.f32 $0, f1, f0;
cvt.rn.bf16x2.f32 $1, f3, f2;
}""")


@triton.jit
def cast(x, DTYPE: tl.constexpr):
    """float32 -> DTYPE, to nearest, halves to even."""
    if EMULATE and DTYPE == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        up = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        x = tl.where(x == x, up, x)
    return x.to(DTYPE)


@triton.jit
def exact_float(codes):
    """Whole numbers below 2^23 -> float32 without a conversion: the lowest bits of the mantissa of 2^23 count units."""
    return (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def widen(codes, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """uint8 -> DTYPE, exactly."""
    if ASM and DTYPE == tl.float16:
        return tl.inline_asm_elementwise(BYTES_FP16, "=&r,=&r,r", [codes], tl.float16, is_pure=True, pack=4)
    elif ASM and DTYPE == tl.bfloat16:
        return tl.inline_asm_elementwise(BYTES_BF16, "=&r,=&r,r", [codes], tl.bfloat16, is_pure=True, pack=4)
    else:
        return exact_float(codes).to(DTYPE)


@triton.jit
def low_nibble(codes, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Bits 0-3 of uint8 as DTYPE."""
    if ASM and DTYPE == tl.float16:
        return tl.inline_asm_elementwise(LOW_FP16, "=&r,=&r,r", [codes], tl.float16, is_pure=True, pack=4)
    elif ASM and DTYPE == tl.bfloat16:
        return tl.inline_asm_elementwise(LOW_BF16, "=&r,=&r,r", [codes], tl.bfloat16, is_pure=True, pack=4)
    else:
        return exact_float(codes & 15).to(DTYPE)


@triton.jit
def high_nibble(codes, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Bits 4-7 of uint8 as DTYPE."""
    if ASM and DTYPE == tl.float16:
        return tl.inline_asm_elementwise(HIGH_FP16, "=&r,=&r,r", [codes], tl.float16, is_pure=True, pack=4)
    elif ASM and DTYPE == tl.bfloat16:
        return tl.inline_asm_elementwise(HIGH_BF16, "=&r,=&r,r", [codes], tl.bfloat16, is_pure=True, pack=4)
    else:
        return exact_float(codes >> 4).to(DTYPE)


@triton.jit
def scale_and_zero(params):
    """Two float16 in an int32 (the first one lowest) -> two float32."""
    first = (params & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    second = (params >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def round_even(x):
    """To the nearest integer, halves to even; |x| < 2^22. Adding 1.5·2^23 leaves no room for a fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def hadamard(x, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Turn each run of BLOCK elements of the float32 rows of ``x`` [HEADS, WIDTH] by a normalised Hadamard matrix.

    The same additions in the same order as the reference, so the result is the same bit for bit.
    """
    i = tl.broadcast_to(tl.arange(0, WIDTH)[None, :], (HEADS, WIDTH))
    for stage in tl.static_range(0, 10):
        if 2**stage < BLOCK:
            other = tl.gather(x, i ^ (2**stage), 1)
            x = tl.where((i & (2**stage)) == 0, x + other, other - x)
    return x * (1.0 / BLOCK) ** 0.5


@triton.jit
def to_float8(x, DTYPE: tl.constexpr):
    """float32 -> DTYPE, to nearest even; |x| does not exceed its largest number."""
    if EMULATE:  # the interpreter does not round halves to even: leave it nothing to round
        LEAST: tl.constexpr = -6 if DTYPE == tl.float8e4nv else -14
        DIGITS: tl.constexpr = 3 if DTYPE == tl.float8e4nv else 2
        x = round_to_grid(x, LEAST, DIGITS)
    return x.to(DTYPE)


@triton.jit
def round_to_grid(x, LEAST: tl.constexpr, DIGITS: tl.constexpr):
    """float32 to the nearest number with DIGITS bits of mantissa and exponents from LEAST on, halves to even."""
    exponent = tl.maximum(((x.to(tl.int32, bitcast=True) >> 23) & 255) - 127, LEAST) - DIGITS
    unit = ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    return round_even(x / unit) * unit


@triton.jit
def divide(x, scale):
    """x / scale, rounded as IEEE does, for float32 ``x`` and the ``scale`` of ``row_scale``, which is broadcast.

    With the reciprocal correctly rounded, one correction of the quotient suffices (Markstein, "Computation of
    elementary functions on the IBM RISC System/6000", 1990): three instructions instead of about fifteen.
    """
    if EMULATE:  # the interpreter does not fuse
        return tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    else:
        inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
        inverse = tl.broadcast_to(tl.where(scale < 1.2e-38, 0.0, inverse), x.shape)  # it would be infinite
        quotient = x * inverse
        return tl.fma(tl.fma(-quotient, tl.broadcast_to(scale, x.shape), x), inverse, quotient)


@triton.jit
def encode(x, DTYPE: tl.constexpr, TOP: tl.constexpr):
    """float32 -> int8 or float8 codes of at most TOP, or float16 that hold e4m3 (TOP 448) or e5m2 numbers."""
    if DTYPE == tl.int8:
        return tl.minimum(tl.maximum(round_even(x), -TOP), TOP).to(tl.int8)
    elif DTYPE == tl.float16:
        LEAST: tl.constexpr = -6 if TOP == 448.0 else -14
        DIGITS: tl.constexpr = 3 if TOP == 448.0 else 2
        return round_to_grid(tl.minimum(tl.maximum(x, -TOP), TOP), LEAST, DIGITS).to(tl.float16)
    else:
        return to_float8(tl.minimum(tl.maximum(x, -TOP), TOP), DTYPE)


@triton.jit
def row_scale(peak, TOP: tl.constexpr):
    """Scale of rows whose greatest magnitudes are ``peak`` (a tensor): peak / TOP, rounded as IEEE does; 1 for 0."""
    scale = tl.div_rn(peak, tl.full(peak.shape, TOP, tl.float32))
    return tl.where(scale == 0.0, 1.0, scale)
