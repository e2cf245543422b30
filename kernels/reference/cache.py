"""How keys and values are coded in a cache; ``attention`` has the layout."""

from __future__ import annotations

import torch
from torch import Tensor


def hadamard(x: Tensor) -> Tensor:
    """Turn the last dimension by a block-diagonal, normalised Hadamard matrix; its own inverse. Keeps dtype.

    Blocks are as large as the largest power of two that divides the dimension (80 -> 5 blocks of 16).
    """
    dim = x.shape[-1]
    block = dim & -dim
    h, step = x.float().unflatten(-1, (-1, block)), 1
    while step < block:
        a, b = h.unflatten(-1, (-1, 2, step)).unbind(-2)
        h = torch.stack([a + b, a - b], dim=-2).flatten(-3)
        step *= 2
    return (h * block**-0.5).flatten(-2).to(x.dtype)


def quantize_heads(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """[..., head_dim] -> (uint8 codes, packed when bits is 6 or 4; float16 (scale, zero) [..., 2]).

    Asymmetric: scale = (max - min) / (2^bits - 1), zero = -min / scale, both as stored in float16; a constant
    row gets the smallest scale that keeps zero within float16. ``bits`` 8, 6 or 4.
    """
    h, top = x.float(), (1 << bits) - 1
    low, high = h.amin(-1, keepdim=True), h.amax(-1, keepdim=True)
    floor = torch.maximum(low.abs(), high.abs()) / 60000
    scale = torch.maximum((high - low) / top, floor).clamp(min=2.0**-14, max=65504.0).half()
    zero = (-low / scale.float()).clamp(-65504.0, 65504.0).half()
    codes = (h / scale.float() + zero.float()).round().clamp(0, top).nan_to_num(0).to(torch.uint8)
    if bits < 8:
        first, second = (codes & 15).chunk(2, dim=-1)
        packed = first | (second << 4)
        if bits == 6:
            a, b, c, d = (codes >> 4).chunk(4, dim=-1)
            packed = torch.cat([packed, a | (b << 2) | (c << 4) | (d << 6)], dim=-1)
        codes = packed
    return codes, torch.cat([scale, zero], dim=-1)


def dequantize_heads(codes: Tensor, params: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Inverse of ``quantize_heads``; computed in float32, rounded to ``dtype``."""
    if bits < 8:
        low = codes if bits == 4 else codes[..., : codes.shape[-1] * 2 // 3]
        high = codes[..., low.shape[-1] :]
        codes = torch.cat([low & 15, low >> 4], dim=-1)
        if bits == 6:
            codes = codes | (torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], dim=-1) << 4)
    scale, zero = params.float().split(1, dim=-1)
    return ((codes.float() - zero) * scale).to(dtype)


def key_bits(bits: int) -> int:
    """Bits of a key in a cache of ``bits``; see the module."""
    return {4: 6, 44: 4}.get(bits, bits)


def value_bits(bits: int) -> int:
    """Bits of a value likewise."""
    return 4 if bits == 44 else bits


def turns(bits: int) -> bool:
    """Whether keys are turned by the Hadamard matrix."""
    return bits in (4, 44)


def is_float8(dtype: torch.dtype) -> bool:
    """Whether a cache of ``dtype`` is stored divided by a scale."""
    return dtype in (torch.float8_e4m3fn, torch.float8_e5m2)


def to_cache(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """``x`` as a floating point cache of ``dtype`` holds it; float8 is x / scale, cut off at the largest number."""
    if not is_float8(dtype):
        return x.to(dtype)
    top = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-top, top).to(dtype)


def slots_of(cache: Tensor) -> Tensor:
    """[slots, kv_heads, width], float8 as bytes: what indexing functions take."""
    return (cache.view(torch.uint8) if is_float8(cache.dtype) else cache).flatten(0, 1)
