"""Codes of a KV cache read two at a time, as int16, for products of few rows.

Tensor cores take pairs of 16-bit numbers along the sum. ``ldmatrix`` brings pairs of bytes to the lanes that need them,
for keys as they lie, for values turned. So a word's low bytes are one operand, its high bytes another, and nothing goes
through registers and back to shared memory to be turned.

A byte alone in an fp16 number is a subnormal one, its code times 2^-24, exactly, which tensor cores multiply as any
other. So one permutation makes two numbers, and no instruction subtracts; ``CODE_UNIT`` goes into factors of sums.
Instructions an element: 0.5 for eight bits and e5m2, 0.6 for four, 1.3 for six, 1.75 for e4m3.
"""

from __future__ import annotations

import triton
import triton.language as tl

CODE_UNIT = 2.0**24  # what codes are to be multiplied by; float8 numbers have the factors of ``cache_codes``
HIGH_NIBBLES = tl.constexpr(16.0)  # high nibbles stay where they are: so much larger

_SIX_HIGH = ("shl.b32 h, $2, 4;", "shl.b32 h, $2, 2;", "mov.b32 h, $2;", "shr.u32 h, $2, 2;")


@triton.constexpr_function
def _numbers_assembly(form: str, odd: bool) -> str:
    """Low or (``odd``) high bytes of int16 to fp16."""
    if form != "e4m3":
        select = {"int8": ("0x4240", "0x4341"), "e5m2": ("0x2404", "0x3414")}[form][odd]
        return f"prmt.b32 $0, $1, 0, {select};"
    place = "mov.b32 s, $1;\nshr.u32 t, $1, 1;" if odd else "shl.b32 s, $1, 8;\nshl.b32 t, $1, 7;"
    join = "and.b32 t, t, 0x3F803F80;\nlop3.b32 $0, s, 0x80008000, t, 0xEA;"
    return f"{{\n.reg .b32 s, t;\n{place}\n{join}\n}}"


@triton.constexpr_function
def _nibbles_assembly(high: bool, odd: bool) -> str:
    """Bits 0-3 or (``high``) 4-7 of the low or (``odd``) high bytes of int16 to fp16."""
    place = "shr.u32 t, $1, 8;" if odd else "mov.b32 t, $1;"
    return f"{{\n.reg .b32 t;\n{place}\nand.b32 $0, t, {'0x00F000F0' if high else '0x000F000F'};\n}}"


@triton.constexpr_function
def _six_assembly(quarter: int, odd: bool) -> str:
    """Codes of ``quarter``, of the low or (``odd``) high bytes, to fp16; $1: low nibbles, $2: high bits."""
    low = "shr.u32 t, $1, 4;" if quarter > 1 else "mov.b32 t, $1;"
    lines = (
        *("{", ".reg .b32 t, h;", low, "and.b32 t, t, 0x0F0F0F0F;", _SIX_HIGH[quarter]),
        *("lop3.b32 t, h, 0x30303030, t, 0xEA;", f"prmt.b32 $0, t, 0, {'0x4341' if odd else '0x4240'};", "}"),
    )
    return "\n".join(lines)


@triton.jit
def _byte(words, ODD: tl.constexpr):
    """The low bytes of int16, or the high ones, as int32."""
    return (words.to(tl.int32) >> (8 if ODD else 0)) & 0xFF


@triton.jit
def numbers(words, FORM: tl.constexpr, ODD: tl.constexpr, ASM: tl.constexpr):
    """The low bytes (ODD: the high bytes) of int16 as fp16: int8 codes, or float8 as ``cache_codes.float8`` has it."""
    if ASM:
        code: tl.constexpr = _numbers_assembly(FORM, ODD)
        found = tl.inline_asm_elementwise(code, "=r,r", [words], tl.int16, is_pure=True, pack=2)
    elif FORM == "int8":
        found = _byte(words, ODD).to(tl.int16)
    elif FORM == "e4m3":
        byte = _byte(words, ODD)
        found = (((byte & 0x80) << 8) | ((byte & 0x7F) << 7)).to(tl.int16)
    else:
        found = (_byte(words, ODD) << 8).to(tl.int16)
    return found.to(tl.float16, bitcast=True)


@triton.jit
def nibbles(words, HIGH: tl.constexpr, ODD: tl.constexpr, ASM: tl.constexpr):
    """Bits 0-3 (HIGH: 4-7, ``HIGH_NIBBLES`` too large) of the low bytes (ODD: the high ones) of int16 as fp16."""
    if ASM:
        code: tl.constexpr = _nibbles_assembly(HIGH, ODD)
        found = tl.inline_asm_elementwise(code, "=r,r", [words], tl.int16, is_pure=True, pack=2)
    else:
        found = (_byte(words, ODD) & (0xF0 if HIGH else 0x0F)).to(tl.int16)
    return found.to(tl.float16, bitcast=True)


@triton.jit
def six_bit_pairs(low, high, QUARTER: tl.constexpr, ODD: tl.constexpr, ASM: tl.constexpr):
    """``cache_codes.six_bits`` of the low bytes (ODD: the high ones) of int16 as fp16."""
    if ASM:
        code: tl.constexpr = _six_assembly(QUARTER, ODD)
        found = tl.inline_asm_elementwise(code, "=r,r,r", [low, high], tl.int16, is_pure=True, pack=2)
    else:
        nibble = (_byte(low, ODD) >> (4 if QUARTER > 1 else 0)) & 15
        found = (nibble | ((_byte(high, ODD) >> (2 * QUARTER)) & 3) << 4).to(tl.int16)
    return found.to(tl.float16, bitcast=True)
