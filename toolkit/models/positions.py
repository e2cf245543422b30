"""Slopes of ALiBi. Press et al., "Train Short, Test Long" (2022)."""

from __future__ import annotations

import struct


def alibi_slopes(heads: int, most: float = 8.0) -> tuple[float, ...]:
    """2^(-most · i / heads) for head i = 1 … heads; where ``heads`` is no power of two, those of the power below, then
    every second one of the power above."""
    power = 1 << (heads.bit_length() - 1)
    found = [2.0 ** (-most * i / power) for i in range(1, power + 1)]
    found += [2.0 ** (-most * i / (2 * power)) for i in range(1, 2 * power, 2)]
    return tuple(found[:heads])


def to_bfloat16(x: float) -> float:
    """The nearest number that bfloat16 has, of two equally near the even one."""
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    found: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return found
