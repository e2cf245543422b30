"""Operands of PTX instructions: registers, constants and addresses, and numbers of 16 bits."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gpu.ptx.warp import LANES, SPECIAL, Warp

TYPES: dict[str, Any] = {
    "pred": np.bool_, "f64": np.float64, "f32": np.float32, "f16": np.uint16, "bf16": np.uint16,
    **{f"{kind}{bits}": getattr(np, f"{name}int{bits}")
       for kind, name in (("s", ""), ("u", "u"), ("b", "u")) for bits in (8, 16, 32, 64)},
}  # fmt: skip


def bfloat16(x: np.ndarray) -> np.ndarray:
    """float64 to bfloat16's bits, to nearest even, at once."""
    u = np.ascontiguousarray(x, np.float64).view(np.uint64)
    u = (u + np.uint64((1 << 44) - 1) + (u >> np.uint64(45) & np.uint64(1))) >> np.uint64(45) << np.uint64(45)
    return (u.view(np.float64).astype(np.float32).view(np.uint32) >> 16).astype(np.uint32)


def float16(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float64).astype(np.float16).view(np.uint16).astype(np.uint32)


def wide(half: str, bits: np.ndarray) -> np.ndarray:
    """The numbers of 16 bits in a word's low half, in float64."""
    low = bits.astype(np.uint32) & 0xFFFF
    if half.startswith("bf16"):
        return (low << 16).view(np.float32).astype(np.float64)
    return low.astype(np.uint16).view(np.float16).astype(np.float64)


def packed(half: str, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    rounded = bfloat16 if half.startswith("bf16") else float16
    return rounded(low) | rounded(high) << 16


class Operands:
    """What reads and writes those of a kernel. ``symbols``: where its parameters lie; ``named``: the types of registers
    that were declared by their names."""

    def __init__(self, symbols: Mapping[str, int]) -> None:
        self.width = {"%p": "pred", "%rs": "b16", "%f": "b32", "%r": "b32", "%rd": "b64", "%fd": "b64"}
        self.symbols = symbols
        self.named: dict[str, str] = {}

    def type_of(self, register: str) -> str:
        return self.named.get(register) or self.width[re.match(r"%[a-z]+", register)[0]]  # type: ignore[index]

    def get(self, operand: str, kind: str) -> Callable[[Warp], np.ndarray]:
        """What reads an operand as ``kind``."""
        wanted = np.dtype(TYPES[kind])
        if operand in SPECIAL:
            return lambda w: w.place[operand].view(wanted)
        if operand in self.named or operand.startswith("%"):
            if np.dtype(TYPES[self.type_of(operand)]).itemsize == wanted.itemsize:
                return lambda w: w.registers[operand].view(wanted)
            return lambda w: w.registers[operand].astype(wanted)
        if operand.startswith("0f"):
            value = np.full(LANES, int(operand[2:], 16), np.uint32).view(np.float32)
        elif operand.startswith("0d"):
            value = np.full(LANES, int(operand[2:], 16), np.uint64).view(np.float64)
        elif re.match(r"-?\d|-?0x", operand):
            bits = int(operand.rstrip("U"), 0) & ((1 << 8 * wanted.itemsize) - 1)
            value = np.full(LANES, bits, f"u{wanted.itemsize}")
        else:
            value = np.full(LANES, self.symbols.get(operand, 0), f"u{wanted.itemsize}")  # shared memory begins at 0
        return lambda w: value.view(wanted)

    def put(self, operand: str) -> Callable[[Warp, np.ndarray], None]:
        if operand == "_":
            return lambda w, value: None
        kept = np.dtype(TYPES[self.type_of(operand)])

        def write(w: Warp, value: np.ndarray) -> None:
            w.put(operand, value.view(kept) if value.dtype.itemsize == kept.itemsize else value.astype(kept))

        return write

    def address(self, operand: str, kind: str) -> Callable[[Warp], np.ndarray]:
        """Of ``[name+offset]``."""
        name, _, offset = operand.strip("[]").replace(" ", "").partition("+")
        read, more = self.get(name.strip(), kind), int(offset or "0")
        return lambda w: read(w).astype(np.int64) + more
