"""Which GGML types hold a canonical weight without changing a number, and the weight in such a type's layout."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from toolkit.artifacts.canonical import ChannelInt8, Codebook, Dense, Fp4, GroupInt, Weight
from toolkit.artifacts.gguf.blocks import BLOCKS, FLOATS, BlockType

# From the smallest; what "auto" tries in turn for a weight that is quantized already.
ORDER = (
    "Q2_K",
    "Q3_K",
    "IQ4_XS",
    "Q4_K",
    "IQ4_NL",
    "MXFP4",
    "Q4_0",
    "Q4_1",
    "Q5_K",
    "Q5_0",
    "Q5_1",
    "Q6_K",
    "Q8_0",
    "F16",
    "F32",
)


def smallest(weight: Weight) -> str:
    """The smallest type that holds ``weight`` exactly; F32 holds everything."""
    if isinstance(weight, Dense):
        return {v: k for k, v in FLOATS.items()}.get(weight.weight.dtype, "F32")
    return next(kind for kind in ORDER if fit(weight, kind) is not None)


def fit(weight: Weight, kind: str) -> Weight | None:
    """``weight`` in the layout of ``kind``, dequantizing to the same bits, or None where that cannot be."""
    if kind in FLOATS:
        return _as_float(weight, FLOATS[kind])
    block = BLOCKS[kind]
    if weight.shape[1] % block.columns:
        return None
    if isinstance(weight, ChannelInt8):
        codes = (weight.weight.to(torch.int16) + 128).to(torch.uint8)
        zeros = torch.full((weight.shape[0], 1), 128, dtype=torch.uint8)
        weight = GroupInt(codes, weight.scales[:, None], zeros, 8, weight.shape[1])
    if isinstance(weight, Fp4):
        powers = weight.scales.dtype == torch.uint8 and weight.global_scale is None
        return weight if kind == "MXFP4" and powers and weight.group_size == block.group else None
    if isinstance(weight, Codebook):
        supers = block.supers == (weight.super_scales is not None)
        same = kind.startswith("IQ4") and supers and weight.group_size == block.group
        return weight if same and (block.supers or weight.scales.dtype == torch.float16) else None
    if not isinstance(weight, GroupInt) or block.table or weight.group_index is not None:
        return None
    if block.supers:
        return weight if _has_layout(weight, block) else None
    if weight.super_scales is not None:
        return None
    return _as_signed(weight, block) if block.zero is not None else _as_affine(weight, block)


def _as_float(weight: Weight, dtype: torch.dtype) -> Dense | None:
    if isinstance(weight, Dense) and weight.weight.dtype == dtype:
        return weight
    exact = weight.dequantize()
    cast = exact.to(dtype)
    return Dense(cast) if torch.equal(cast.float(), exact) else None


def _has_layout(weight: GroupInt, block: BlockType) -> bool:
    """Whether a weight with super-scales came from this very type."""
    supers = weight.super_scales
    if supers is None or (weight.bits, weight.group_size) != (block.bits, block.group):
        return False
    same_blocks = supers.d.shape[1] * block.columns == weight.shape[1]
    return same_blocks and (supers.dmin is None) == (block.zero is not None)


def _half(scales: Tensor) -> Tensor | None:
    """The numbers as float16, None where one changes."""
    if scales.dtype == torch.float16:
        return scales
    cast = scales.half()
    return cast if torch.equal(cast.float(), scales.float()) else None


def _spread(values: Tensor, times: int) -> Tensor:
    return values if times == 1 else values.repeat_interleave(times, dim=1)


def _as_signed(weight: GroupInt, block: BlockType) -> GroupInt | None:
    """w = (code - zero) * scale with one fixed zero: any zero points do, if the differences fit the type's range."""
    assert block.zero is not None
    scales = _half(weight.scales)
    if weight.zeros is None or scales is None or weight.group_size % block.group:
        return None
    zeros = weight.zeros.to(torch.int16).repeat_interleave(weight.group_size, dim=1)
    codes = weight.codes.to(torch.int16) - zeros + block.zero
    if bool((codes < 0).any()) or bool((codes >= 1 << block.bits).any()):
        return None
    scales = _spread(scales, weight.group_size // block.group)
    fixed = torch.full(scales.shape, block.zero, dtype=torch.uint8)
    return GroupInt(codes.to(torch.uint8), scales, fixed, block.bits, block.group)


def _as_affine(weight: GroupInt, block: BlockType) -> GroupInt | None:
    """w = code * scale + minimum."""
    if weight.minima is None or weight.bits > block.bits or weight.group_size % block.group:
        return None
    scales, minima = _half(weight.scales), _half(weight.minima)
    if scales is None or minima is None:
        return None
    times = weight.group_size // block.group
    return replace(
        weight, scales=_spread(scales, times), minima=_spread(minima, times), bits=block.bits, group_size=block.group
    )
