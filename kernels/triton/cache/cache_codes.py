"""Codes of a KV cache: six-bit keys and float8 numbers to floating point, and float32 to float8 bytes.

A cache has one of the forms "float" (the activations' dtype), "int8", "int4" (six-bit keys, four-bit values), "e4m3"
and "e5m2". Float8 is handled as bytes, so that every GPU reads and writes the same: its bits are those of an fp16
number, for e5m2 as they are, for e4m3 256 times as small, a factor that is applied to sums instead of every number.
Instructions an element: 1.8 for six bits, 2 for e4m3, 0.5 for e5m2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..codes import round_even
from ..float_codes import e4m3_as_fp16

E4M3_UNIT = 256.0  # what numbers of ``float8`` are to be multiplied by in form e4m3; 1 in e5m2


def form_of(cache: Tensor, bits: int) -> str:
    """The form of a cache, see the module."""
    if bits:
        return f"int{bits}"
    return {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}.get(cache.dtype, "float")


def stored(cache: Tensor) -> Tensor:
    """The cache as kernels take it: float8 as bytes."""
    return cache.view(torch.uint8) if cache.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) else cache


@triton.constexpr_function
def six_bits_assembly(quarter: int, half: bool) -> str:
    """Codes of ``quarter`` as fp16 (``half``) or bf16 into $0 and $1; $2: bytes of low nibbles, $3: of high bits."""
    low = "mov.b32 t, $2;" if quarter < 2 else "shr.u32 t, $2, 4;"
    high = ("shl.b32 h, $3, 4;", "shl.b32 h, $3, 2;", "mov.b32 h, $3;", "shr.u32 h, $3, 2;")[quarter]
    magic = "0x64646464" if half else "0x43434343"  # fp16 1024 + code, bf16 128 + code
    if half:
        bias, exact = "mov.b32 c, 0x64006400;", "sub.f16x2 {0}, {0}, c;"
    else:
        bias, exact = "mov.b32 c, 0xC300C300;\nmov.b32 one, 0x3F803F80;", "fma.rn.bf16x2 {0}, {0}, one, c;"
    lines = (
        *("{", ".reg .b32 t, h, c, one;", bias, low, "and.b32 t, t, 0x0F0F0F0F;", high),
        *("lop3.b32 t, h, 0x30303030, t, 0xEA;", f"prmt.b32 $0, t, {magic}, 0x4140;"),
        *(f"prmt.b32 $1, t, {magic}, 0x4342;", exact.format("$0"), exact.format("$1"), "}"),
    )
    return "\n".join(lines)


FROM_E5M2 = tl.constexpr("""{
prmt.b32 $0, $2, 0, 0x1404;
prmt.b32 $1, $2, 0, 0x3424;
}""")


@triton.jit
def six_bits(low, high, QUARTER: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Codes of a quarter of the head as DTYPE: four bits from a nibble of ``low``, two from ``high``."""
    if ASM and DTYPE == tl.float16:
        code: tl.constexpr = six_bits_assembly(QUARTER, True)
        return tl.inline_asm_elementwise(code, "=&r,=&r,r,r", [low, high], tl.float16, is_pure=True, pack=4)
    elif ASM and DTYPE == tl.bfloat16:
        other: tl.constexpr = six_bits_assembly(QUARTER, False)
        return tl.inline_asm_elementwise(other, "=&r,=&r,r,r", [low, high], tl.bfloat16, is_pure=True, pack=4)
    else:
        nibble = low & 15 if QUARTER < 2 else low >> 4
        return (nibble | ((high >> (2 * QUARTER)) & 3) << 4).to(tl.float32).to(DTYPE)


@triton.jit
def float8(codes, FORM: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Bytes as DTYPE (fp16 or float32), exactly: the numbers in form e5m2, 1/256 of them in e4m3; NaN is 480 there."""
    if FORM == "e4m3":
        h = e4m3_as_fp16(codes, ASM)
    elif ASM:
        h = tl.inline_asm_elementwise(FROM_E5M2, "=&r,=&r,r", [codes], tl.float16, is_pure=True, pack=4)
    else:
        h = (codes.to(tl.int32) << 8).to(tl.int16).to(tl.float16, bitcast=True)
    return h.to(DTYPE)


@triton.jit
def unpacked_here(x, TURN: tl.constexpr):
    """``x``, which the compiler may not move: values go into products by column, the cache has them by row.

    Left to itself it loads bytes in the order of the product, one by one, to unpack them there. Unpacked as they come
    and then turned in shared memory they take a fifth fewer instructions. An instruction with side effects stays.
    """
    if TURN and x.dtype == tl.float16:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.float16, is_pure=False, pack=2)
    elif TURN and x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.bfloat16, is_pure=False, pack=2)
    else:
        return x


@triton.jit
def float8_bytes(x, FORM: tl.constexpr):
    """float32 -> bytes of float8, to nearest, halves to even; what is too large becomes the largest number."""
    MANTISSA: tl.constexpr = 3 if FORM == "e4m3" else 2
    LEAST: tl.constexpr = -6 if FORM == "e4m3" else -14  # exponent of the smallest normal number
    TOP: tl.constexpr = 448.0 if FORM == "e4m3" else 57344.0
    size = tl.minimum(tl.abs(x), TOP)
    bits = size.to(tl.int32, bitcast=True)
    CUT: tl.constexpr = 23 - MANTISSA
    normal = ((bits + ((1 << (CUT - 1)) - 1) + ((bits >> CUT) & 1)) >> CUT) - ((LEAST + 126) << MANTISSA)
    tiny = round_even(tl.minimum(size, 2.0**LEAST) * 2.0 ** (MANTISSA - LEAST)).to(tl.int32)
    code = tl.where(size < 2.0**LEAST, tiny, normal)
    code = tl.where(x == x, code, 0x7F)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)
