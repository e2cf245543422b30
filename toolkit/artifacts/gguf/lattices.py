"""GGML's types of two bits and fewer, and of three on a lattice: read alone, to integers of 8 bits of the same numbers.

Of eight or four columns a code names a point of a table (``lattices.npz``: those of ggml-common.h, by the names of
types), signs and small scales do the rest. Three values a weight (TQ1_0, TQ2_0) stay integers of 2 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from toolkit.artifacts.canonical import GroupInt, Weight
from toolkit.base.lazy_dataclass import dataclass

Bytes = NDArray[Any]  # of uint8, [rows, blocks, bytes a block]
TABLES = Path(__file__).with_name("lattices.npz")
ZERO = 128  # the code that stands for 0
COLUMNS = 256
_EIGHT = np.arange(8, dtype=np.uint8)


@dataclass(frozen=True)
class LatticeType:
    """``size``: bytes of a block of ``COLUMNS`` columns."""

    size: int
    read: Callable[[Bytes], Weight]
    columns: int = COLUMNS


@cache
def _table(name: str) -> NDArray[np.int8]:
    with np.load(TABLES) as tables:
        found: NDArray[np.int8] = tables[name]
        return found


@cache
def _signs_of_seven() -> NDArray[np.uint8]:
    """By 7 bits the signs of eight numbers: the last makes their number even."""
    codes = np.arange(128, dtype=np.uint8)
    odd = np.unpackbits(codes[:, None], axis=1).sum(1) & 1
    return codes | (odd << 7).astype(np.uint8)


def _signed(points: NDArray[np.int8], signs: NDArray[Any]) -> NDArray[np.int8]:
    """Points […, n, 8 / m, m] with a bit of ``signs`` […, n] for each number: 1 is negative."""
    bits = (signs[..., None].astype(np.uint8) >> _EIGHT) & 1
    flat = points.reshape(bits.shape)
    return np.where(bits == 1, -flat, flat)


def _weight(values: NDArray[np.int8], scales: NDArray[np.float32], group: int) -> GroupInt:
    """Integers [rows, blocks, …] with a float32 scale for each ``group`` columns."""
    rows = len(values)
    codes = (values.reshape(rows, -1).astype(np.int16) + ZERO).astype(np.uint8)
    floats = torch.from_numpy(np.ascontiguousarray(scales.reshape(rows, -1), np.float32))
    return GroupInt(torch.from_numpy(codes), floats, torch.full(floats.shape, ZERO, dtype=torch.uint8), 8, group)


def _f16(raw: Bytes) -> NDArray[np.float32]:
    """Bytes [rows, blocks, 2] → [rows, blocks, 1]."""
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def _words(raw: Bytes, dtype: str) -> NDArray[Any]:
    return np.ascontiguousarray(raw).view(dtype)


def _halves(raw: Bytes) -> NDArray[np.uint8]:
    """Bytes [..., n] → their low and high four bits, [..., 2 n]."""
    return np.stack([raw & 15, raw >> 4], -1).reshape(*raw.shape[:-1], -1)


def _high_bits(raw: Bytes, bits: int) -> NDArray[np.uint16]:
    """Fields of so many bits of bytes [..., n], lowest first, as bits 8 and up: [..., 8 n / bits]."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    found = (raw[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    return found.reshape(*raw.shape[:-1], -1).astype(np.uint16) << np.uint16(8)


def _read_iq2_xxs(raw: Bytes) -> Weight:
    pairs = _words(raw[..., 2:], "<u4").reshape(*raw.shape[:2], 8, 2)
    points = _table("IQ2_XXS")[np.ascontiguousarray(pairs[..., :1]).view(np.uint8)]
    signs = _signs_of_seven()[(pairs[..., 1:] >> np.arange(0, 28, 7, dtype=np.uint32)) & 127]
    scales = _f16(raw[..., :2]) * (np.float32(0.5) + (pairs[..., 1] >> 28).astype(np.float32)) * np.float32(0.25)
    return _weight(_signed(points, signs), scales, 32)


def _read_iq2_xs(raw: Bytes) -> Weight:
    codes = _words(raw[..., 2:66], "<u2")
    scales = _f16(raw[..., :2]) * (np.float32(0.5) + _halves(raw[..., 66:])) * np.float32(0.25)
    return _weight(_signed(_table("IQ2_XS")[codes & 511], _signs_of_seven()[codes >> 9]), scales, 16)


def _read_iq2_s(raw: Bytes) -> Weight:
    codes = raw[..., 2:34] | _high_bits(raw[..., 66:74], 2)
    scales = _f16(raw[..., :2]) * (np.float32(0.5) + _halves(raw[..., 74:])) * np.float32(0.25)
    return _weight(_signed(_table("IQ2_S")[codes], raw[..., 34:66]), scales, 16)


def _read_iq3_xxs(raw: Bytes) -> Weight:
    words = _words(raw[..., 66:], "<u4")
    signs = _signs_of_seven()[(words[..., None] >> np.arange(0, 28, 7, dtype=np.uint32)) & 127]
    scales = _f16(raw[..., :2]) * (np.float32(0.5) + (words >> 28).astype(np.float32)) * np.float32(0.5)
    return _weight(_signed(_table("IQ3_XXS")[raw[..., 2:66]], signs.reshape(*raw.shape[:2], 32)), scales, 32)


def _read_iq3_s(raw: Bytes) -> Weight:
    codes = raw[..., 2:66] | _high_bits(raw[..., 66:74], 1)
    scales = _f16(raw[..., :2]) * (1 + 2 * _halves(raw[..., 106:]).astype(np.float32))
    return _weight(_signed(_table("IQ3_S")[codes], raw[..., 74:106]), scales, 32)


def _shifted(points: NDArray[np.int8], down: NDArray[np.bool_]) -> NDArray[np.int8]:
    """Points of -1, 0 and 1 an eighth up or ``down``, in eighths."""
    return 8 * points + np.where(down, -1, 1).astype(np.int8)[..., None]


def _read_iq1_s(raw: Bytes) -> Weight:
    more = _words(raw[..., 34:], "<u2")
    high = (more[..., None] >> np.arange(0, 12, 3, dtype=np.uint16)) & 7
    codes = raw[..., 2:34].reshape(*raw.shape[:2], 8, 4) | high << 8
    scales = _f16(raw[..., :2]) * (2 * ((more >> 12) & 7) + 1).astype(np.float32) / np.float32(8)
    return _weight(_shifted(_table("IQ1_S")[codes], (more & 0x8000 != 0)[..., None]), scales, 32)


def _read_iq1_m(raw: Bytes) -> Weight:
    words, more = _words(raw[..., 48:], "<u2"), _halves(raw[..., 32:48])
    whole = np.bitwise_or.reduce((words & 0xF000) >> np.array([12, 8, 4, 0], np.uint16), -1, keepdims=True)
    small = (words[..., None] >> np.arange(0, 12, 3, dtype=np.uint16)) & 7
    factors = (2 * small.reshape(*raw.shape[:2], 16) + 1).astype(np.float32) / np.float32(8)
    scales = whole.view(np.float16).astype(np.float32) * factors
    codes = raw[..., :32] | (more & 7).astype(np.uint16) << 8
    return _weight(_shifted(_table("IQ1_S")[codes], more & 8 != 0), scales, 16)


def _ternary(codes: NDArray[Any], scales: Bytes) -> GroupInt:
    """Codes 0, 1, 2 [rows, blocks, 256] of -1, 0 and 1."""
    floats = torch.from_numpy(np.ascontiguousarray(scales).view(np.int16)[..., 0].copy()).view(torch.float16)
    flat = torch.from_numpy(np.ascontiguousarray(codes.reshape(len(codes), -1), np.uint8))
    return GroupInt(flat, floats, torch.ones(floats.shape, dtype=torch.uint8), 2, COLUMNS)


def _read_tq1_0(raw: Bytes) -> Weight:
    def digits(packed: Bytes, count: int) -> NDArray[np.uint8]:
        """The first digits to base 3 of a byte's fraction of 256, a column of bytes after the other."""
        powers = 3 ** np.arange(count, dtype=np.uint16)
        low = (packed[..., None, :] * powers[:, None]).astype(np.uint8)
        return ((low.astype(np.uint16) * 3) >> 8).astype(np.uint8).reshape(*packed.shape[:2], -1)

    parts = digits(raw[..., :32], 5), digits(raw[..., 32:48], 5), digits(raw[..., 48:52], 4)
    return _ternary(np.concatenate(parts, -1), raw[..., 52:])


def _read_tq2_0(raw: Bytes) -> Weight:
    packed = raw[..., :64].reshape(*raw.shape[:2], 2, 1, 32)
    return _ternary((packed >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3, raw[..., 64:])


LATTICES = {
    "IQ2_XXS": LatticeType(66, _read_iq2_xxs),
    "IQ2_XS": LatticeType(74, _read_iq2_xs),
    "IQ3_XXS": LatticeType(98, _read_iq3_xxs),
    "IQ1_S": LatticeType(50, _read_iq1_s),
    "IQ3_S": LatticeType(110, _read_iq3_s),
    "IQ2_S": LatticeType(82, _read_iq2_s),
    "IQ1_M": LatticeType(56, _read_iq1_m),
    "TQ1_0": LatticeType(54, _read_tq1_0),
    "TQ2_0": LatticeType(66, _read_tq2_0),
}
