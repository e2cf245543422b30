"""Plain rounding of float weights to canonical forms, without calibration."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from toolkit.artifacts.canonical import FP4_VALUES, BlockFp8, ChannelInt8, Fp4, GroupInt
from toolkit.errors import ToolkitError

E4M3_MAX = 448.0
_SMALLEST = 1e-6  # of a tile's largest value, so that no scale is 0
_AT_ONCE = 1 << 18  # weights of a large matrix that are rounded together: what a core keeps near


def check_finite(weight: Tensor, name: str) -> None:
    """Raise ToolkitError that names the weight if it holds NaN or infinity."""
    if not bool(torch.isfinite(weight).all()):
        raise ToolkitError(f"{name}: holds NaN or infinity; nothing can be rounded")


def to_channel_int8(weight: Tensor, name: str = "") -> ChannelInt8:
    """Float [out, in] to int8, the largest value of a row at 127; a row of zeros has scale 1."""
    check_finite(weight, name)
    x = weight.float()
    scales = x.abs().amax(1) / 127
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    return ChannelInt8((x / scales[:, None]).round_().clamp_(-127, 127).to(torch.int8), scales)


Change = Callable[[Tensor, slice], Tensor]
"""What some rows of a matrix, float32 [rows, in], become before they are rounded, and which rows they are."""


def to_group_int(weight: Tensor, bits: int, group: int, change: Change | None = None) -> GroupInt:
    """Float [out, in] to integers in groups of ``group`` inputs with float16 scales, some rows at a time.

    8 bits: symmetric around 128, the largest value of a group at 127 from it; 4 bits: with zeros.
    """
    rows, cols = weight.shape
    codes = torch.empty((rows, cols), dtype=torch.uint8)
    scales = torch.empty((rows, cols // group), dtype=torch.float16)
    zeros = torch.full(scales.shape, 128, dtype=torch.uint8)
    step_rows = max(_AT_ONCE // cols, 1)
    for a in range(0, rows, step_rows):
        part = slice(a, a + step_rows)
        x = weight[part].float()
        x = (x if change is None else change(x, part)).unflatten(1, (-1, group))
        low, high = x.amin(-1).clamp(max=0), x.amax(-1).clamp(min=0)
        scales[part] = (torch.maximum(-low, high) / 127 if bits == 8 else (high - low) / 15).to(torch.float16)
        step = scales[part].float().clamp(min=2.0**-24)
        if bits == 8:
            rounded = torch.round(x / step[..., None]).clamp(-127, 127) + 128
        else:
            zeros[part] = torch.round(-low / step).clamp(0, 15).to(torch.uint8)
            rounded = (torch.round(x / step[..., None]) + zeros[part][..., None]).clamp(0, 15)
        codes[part] = rounded.to(torch.uint8).flatten(1)
    return GroupInt(codes, scales, zeros, bits, group)


def to_block_fp8(
    weight: Tensor, name: str = "", *, block: tuple[int, int] = (128, 128), power_of_two: bool = False
) -> BlockFp8:
    """Float [out, in] to float8_e4m3fn with one scale a tile; ``power_of_two``: scales rounded up to powers of two."""
    check_finite(weight, name)
    x = weight.float()
    rows, columns = x.shape
    padded = torch.nn.functional.pad(x, (0, -columns % block[1], 0, -rows % block[0]))
    tiles = padded.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))  # [row tiles, rows, column tiles, columns]
    scales = tiles.abs().amax((1, 3)).clamp_(min=_SMALLEST) / E4M3_MAX
    if power_of_two:
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
    scaled = tiles / scales[:, None, :, None]
    codes = scaled.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    flat = codes.view(torch.uint8).flatten(2, 3).flatten(0, 1)[:rows, :columns].contiguous()
    return BlockFp8(flat.view(torch.float8_e4m3fn), scales, block)


def to_mxfp4(weight: Tensor, name: str = "") -> Fp4:
    """Float [out, in] to mxfp4 (OCP Microscaling Formats 1.0): nearest e2m1 codes in blocks of 32.

    The specification's exponent (6.3), floor(log2(largest)) − 2, cuts off what lies between 6 and 8 times the scale;
    the one above does not. Each block takes the exponent that loses less.
    """
    check_finite(weight, name)
    if weight.shape[1] % 32:
        raise ToolkitError(f"{name}: {weight.shape[1]} input features are no multiple of mxfp4's blocks of 32")
    blocks = weight.float().unflatten(1, (-1, 32))
    low = torch.floor(torch.log2(blocks.abs().amax(-1).clamp(min=2.0**-120))) - 2
    values = torch.tensor(FP4_VALUES, device=weight.device)
    (codes, lost), (above, lost_above) = (_fp4_at(blocks, exponent, values) for exponent in (low, low + 1))
    better = lost_above < lost
    codes, exponent = torch.where(better[..., None], above, codes), torch.where(better, low + 1, low)
    return Fp4(codes.flatten(1).cpu(), (exponent + 127).clamp(0, 254).to(torch.uint8).cpu(), 32)


def _fp4_at(blocks: Tensor, exponent: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of ``blocks`` [..., 32] with the scale 2^exponent [...], and the squared error of each block."""
    scale = torch.exp2(exponent)[..., None]
    codes = nearest_fp4(blocks / scale)
    return codes, (values[codes.long()] * scale - blocks).square().sum(-1)


def nearest_fp4(x: Tensor) -> Tensor:
    """The e2m1 code, uint8, nearest to each value; beyond 6 the largest, ties to the code with an even mantissa."""
    values = torch.tensor(FP4_VALUES[:8], device=x.device)
    size = x.abs()
    borders = (values[1:] + values[:-1]) / 2
    low = torch.bucketize(size, borders)  # a value on a border stays below it
    tied = (low < 7) & (size == borders[low.clamp(max=6)]) & (low % 2 == 1)
    code = (low + tied.to(low.dtype)).to(torch.uint8)
    return code | (torch.signbit(x).to(torch.uint8) << 3)
