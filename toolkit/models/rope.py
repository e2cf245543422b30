"""Rotary frequencies from a ``RopeSpec``, and factors of queries by position: where every runner gets its numbers.

The arithmetic follows transformers' (powers of float32 exponents, float32 afterwards), so that the result is equal
to within one unit in the last place.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.models.spec.parts import QueryScale, RopeSpec

F32 = NDArray[np.float32]


def inv_freq(rope: RopeSpec, long: bool = False) -> tuple[F32, float]:
    """Inverse frequencies, float32 [rotary_dim / 2], and the factor that multiplies cos and sin.

    The angle of element pair j at position p is ``p * inv_freq[j]``. ``long`` picks the second set of ``dynamic`` (NTK
    base for ``max_position``) and ``longrope`` (``long_factor``); for other kinds both sets are the same.
    """
    if rope.kind == "default":
        return _plain(rope.theta, rope.rotary_dim), 1.0
    if rope.kind == "linear":
        return _plain(rope.theta, rope.rotary_dim) / np.float32(rope.factor), 1.0
    if rope.kind == "proportional":
        turning = np.arange(rope.rotary_dim // 2) < rope.turning
        return np.where(turning, _plain(rope.theta, rope.rotary_dim) / np.float32(rope.factor), np.float32(0)), 1.0
    if rope.kind == "dynamic":
        return _plain(ntk_theta(rope, rope.max_position) if long else rope.theta, rope.rotary_dim), 1.0
    if rope.kind == "llama3":
        return _llama3(rope), 1.0
    if rope.kind == "yarn":
        return _yarn(rope), 1.0 if rope.attention_factor is None else rope.attention_factor
    if rope.kind == "longrope":
        factors = np.asarray(rope.long_factor if long else rope.short_factor, np.float32)
        scaled = factors * _powers(rope.theta, rope.rotary_dim)
        own = rope.long_attention_factor if long else None
        factor = rope.attention_factor if own is None else own
        return np.float32(1.0) / scaled, 1.0 if factor is None else factor
    raise ValueError(f"unknown rope kind {rope.kind!r}")


def query_scale(scale: QueryScale, positions: NDArray[np.int64]) -> F32:
    """What queries at ``positions`` are multiplied by, float32."""
    if scale.form == "log":
        return np.maximum(1.0, np.log(positions + 1.0) / math.log(scale.length)).astype(np.float32)
    found = 1.0 + scale.factor * np.log1p((positions + scale.offset) // scale.length)
    return np.asarray(found, np.float32)


def _powers(theta: float, dim: int) -> F32:
    """theta ** (2j / dim), correctly rounded to float32 from float32 exponents."""
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return np.power(np.float64(np.float32(theta)), exponents.astype(np.float64)).astype(np.float32)


def _plain(theta: float, dim: int) -> F32:
    return np.float32(1.0) / _powers(theta, dim)


def ntk_theta(rope: RopeSpec, length: Any) -> Any:
    """Base that lets the slowest pair reach ``length`` (NTK-aware scaling, u/bloc97 and u/emozilla 2023); of a float64
    tensor of lengths those of each."""
    stretch = rope.factor * length / rope.original_max_position - (rope.factor - 1)
    return rope.theta * stretch ** (rope.rotary_dim / (rope.rotary_dim - 2))


def _llama3(rope: RopeSpec) -> F32:
    """Llama 3.1: long wavelengths divided by ``factor``, short ones kept, a blend between."""
    freq = _plain(rope.theta, rope.rotary_dim)
    factor = np.float32(rope.factor)
    low, high = np.float32(rope.low_freq_factor), np.float32(rope.high_freq_factor)
    original = np.float32(rope.original_max_position)
    wavelength = np.float32(2 * math.pi) / freq
    span = rope.high_freq_factor - rope.low_freq_factor or 1.0  # Llama 4 Scout: both 1, so that nothing is blended
    smooth = (original / wavelength - low) / np.float32(span)
    blended = (np.float32(1.0) - smooth) * freq / factor + smooth * freq
    result = np.where(wavelength > original / low, freq / factor, freq)
    medium = ~(wavelength < original / high) & ~(wavelength > original / low)
    return np.where(medium, blended, result).astype(np.float32)


def _yarn(rope: RopeSpec) -> F32:
    """YaRN (Peng et al. 2023): fast pairs extrapolate, slow pairs interpolate, a linear ramp between."""
    dim = rope.rotary_dim

    def pair_of(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # avoids dividing by zero
    ramp = (np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    keep = np.float32(1.0) - np.clip(ramp, np.float32(0), np.float32(1))
    powers = _powers(rope.theta, dim)
    interpolated = np.float32(1.0) / (np.float32(rope.factor) * powers)
    return (interpolated * (np.float32(1.0) - keep) + keep / powers).astype(np.float32)
