"""Small floats inside kernels: e2m1 (fp4) and e4m3 (fp8) codes to 16-bit floats, by permuting bytes.

A byte permutation is a table of eight entries, and e2m1 has eight magnitudes: one instruction finds the upper bytes of
four codes, another the lower ones (all zero in fp16): about 2.5 instructions an element in bf16, 2 in fp16. e4m3 is
shifted into an fp16 and so means 1/256 of its value, which goes into a scale.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Codes in the low halves of bytes b0..b3 -> two results of two 16-bit floats each.
_SELECT = """{
.reg .b32 t, m, s, h, l, low, high;
SHIFT
and.b32 m, t, 0x07070707;
shr.u32 s, m, 4;
or.b32 m, m, s;
prmt.b32 m, m, 0, 0x4420;
"""
_SIGN = """shl.b32 s, t, 4;
and.b32 s, s, 0x80808080;
or.b32 h, h, s;
"""
_FP4_FP16 = f"""{_SELECT}mov.b32 low, 0x3E3C3800;
mov.b32 high, 0x46444240;
prmt.b32 h, low, high, m;
{_SIGN}prmt.b32 $0, h, 0, 0x1404;
prmt.b32 $1, h, 0, 0x3424;
}}"""
_FP4_BF16 = f"""{_SELECT}mov.b32 low, 0x3F3F3F00;
mov.b32 high, 0x40404040;
prmt.b32 h, low, high, m;
mov.b32 low, 0xC0800000;
mov.b32 high, 0xC0804000;
prmt.b32 l, low, high, m;
{_SIGN}prmt.b32 $0, l, h, 0x5140;
prmt.b32 $1, l, h, 0x7362;
}}"""
FP4_LOW_FP16 = tl.constexpr(_FP4_FP16.replace("SHIFT", "mov.b32 t, $2;"))
FP4_HIGH_FP16 = tl.constexpr(_FP4_FP16.replace("SHIFT", "shr.u32 t, $2, 4;"))
FP4_LOW_BF16 = tl.constexpr(_FP4_BF16.replace("SHIFT", "mov.b32 t, $2;"))
FP4_HIGH_BF16 = tl.constexpr(_FP4_BF16.replace("SHIFT", "shr.u32 t, $2, 4;"))
E4M3_FP16 = tl.constexpr("""{
.reg .b32 a, s;
prmt.b32 a, $2, 0, 0x1404;
and.b32 s, a, 0x80008000;
shr.u32 a, a, 1;
and.b32 a, a, 0x3F803F80;
or.b32 $0, a, s;
prmt.b32 a, $2, 0, 0x3424;
and.b32 s, a, 0x80008000;
shr.u32 a, a, 1;
and.b32 a, a, 0x3F803F80;
or.b32 $1, a, s;
}""")


@triton.jit
def fp4(packed, PLANE: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """The e2m1 codes in the low (PLANE 0) or high halves of bytes, as DTYPE."""
    if ASM and DTYPE == tl.float16 and PLANE == 0:
        return tl.inline_asm_elementwise(FP4_LOW_FP16, "=&r,=&r,r", [packed], tl.float16, is_pure=True, pack=4)
    elif ASM and DTYPE == tl.float16:
        return tl.inline_asm_elementwise(FP4_HIGH_FP16, "=&r,=&r,r", [packed], tl.float16, is_pure=True, pack=4)
    elif ASM and DTYPE == tl.bfloat16 and PLANE == 0:
        return tl.inline_asm_elementwise(FP4_LOW_BF16, "=&r,=&r,r", [packed], tl.bfloat16, is_pure=True, pack=4)
    elif ASM and DTYPE == tl.bfloat16:
        return tl.inline_asm_elementwise(FP4_HIGH_BF16, "=&r,=&r,r", [packed], tl.bfloat16, is_pure=True, pack=4)
    else:
        code = (packed >> (4 * PLANE)).to(tl.int32)
        exponent = (code >> 1) & 3
        fraction = (code & 1).to(tl.float32) * 0.5
        power = ((tl.maximum(exponent, 1) + 126) << 23).to(tl.float32, bitcast=True)  # 2 ** (exponent - 1)
        value = tl.where(exponent == 0, fraction, (1.0 + fraction) * power)
        return tl.where((code & 8) == 0, value, -value).to(DTYPE)


@triton.jit
def e4m3_as_fp16(codes, ASM: tl.constexpr):
    """uint8 that hold e4m3 numbers -> float16 of 1/256 of their values (NaN becomes 1.875)."""
    if ASM:
        return tl.inline_asm_elementwise(E4M3_FP16, "=&r,=&r,r", [codes], tl.float16, is_pure=True, pack=4)
    else:
        wide = codes.to(tl.int32)
        return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def float8_as_fp16(codes, E4M3: tl.constexpr, ASM: tl.constexpr):
    """uint8 that hold e4m3 numbers, as float16 of 1/256 of them, or e5m2 numbers, as float16."""
    if E4M3:
        return e4m3_as_fp16(codes, ASM)
    else:
        return (codes.to(tl.int16) << 8).to(tl.float16, bitcast=True)


@triton.jit
def block_scale(scales, E8M0: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """uint8 that hold e8m0 exponents, or e4m3 numbers, as DTYPE."""
    if E8M0:
        value = (scales.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        value = e4m3_as_fp16(scales, ASM).to(tl.float32) * 256.0
    return value.to(DTYPE)  # at most 4 bits of mantissa: nothing to round
