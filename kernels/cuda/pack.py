"""Weights in the order in which the CUDA kernels read them, and back; ``linear.h`` describes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

STEP, TILE = 64, 16  # inputs and outputs that a warp takes at a time
_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Packed:
    """An integer weight [n_out, n_in] packed for the CUDA kernels.

    ``codes``: int32 [tiles, steps, words]; ``scales``: [tiles, groups, 16] of two bytes, or float32 [16·tiles] where
    all inputs of a row share one; ``zeros``: uint8 shaped as scales, or None: the middle of the range everywhere;
    ``order``: int32 [n_in] or None: input i of the packed weight is input ``order[i]`` (act-order, groups made
    consecutive); ``group_size``: inputs a scale; ``scale_dtype``: of the scales that were packed.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    order: Tensor | None
    bits: int
    n_out: int
    n_in: int
    group_size: int
    scale_dtype: torch.dtype

    @property
    def whole(self) -> bool:
        """Whether all inputs of a row share one scale."""
        return self.group_size == self.n_in

    @property
    def tiles(self) -> int:
        return self.codes.shape[0]

    @property
    def steps(self) -> int:
        return self.codes.shape[1]


def unsupported_form(
    bits: int, n_in: int, group_size: int, *, minima: bool = False, scale_dtype: torch.dtype = torch.float16
) -> str | None:
    """Why no CUDA kernel takes weights of this form, in one line, or None."""
    if bits not in (4, 8):
        return f"takes weights of 4 or 8 bits, not {bits}"
    if minima:
        return "takes weights with zero points, not with minima"
    if n_in % STEP:
        return f"takes a multiple of {STEP} inputs, not {n_in}"
    if group_size == n_in:
        return None
    if group_size < 32 or group_size & (group_size - 1):
        return f"takes groups of 32, 64, 128 … inputs or one for all, not of {group_size}"
    if scale_dtype not in _HALVES:
        return f"takes 16-bit scales, not {str(scale_dtype).removeprefix('torch.')}"
    return None


def pack(codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, group_index: Tensor | None = None) -> Packed:
    """Pack w = (code - zero)·scale.

    ``codes``: uint8 [out, in], a code a byte; ``scales``: [out, groups]; ``zeros``: uint8 [out, groups], None for
    2**(bits - 1); ``group_index``: int32 [in], the group of each input where groups are not consecutive. All on one
    device, where the result is too. ValueError where ``unsupported_form`` has a reason, or groups are of unequal sizes.
    """
    n_out, n_in = codes.shape
    groups = scales.shape[1]
    group_size = n_in // groups
    reason = unsupported_form(bits, n_in, group_size, scale_dtype=scales.dtype)
    if reason is not None or group_size * groups != n_in:
        raise ValueError(reason or f"{groups} groups do not divide {n_in} inputs")
    if zeros is not None and bits == 4 and bool((zeros > 63).any()):
        raise ValueError("takes zero points up to 63 with 4 bits")
    order = None
    if codes.numel() * bits >= 8 << 32:
        raise ValueError("takes weights of up to 4 GiB")  # offsets in the kernels have 32 bits
    if group_index is not None:
        order = _sorted(group_index, groups, group_size)
        codes = codes[:, order.long()]
    padding = -n_out % TILE
    words = (_pack4 if bits == 4 else _pack8)(F.pad(codes, (0, 0, 0, padding)))
    middle = 1 << (bits - 1)
    if zeros is not None and bool((zeros == middle).all()):
        zeros = None
    if group_size == n_in:
        stored = F.pad(scales[:, 0].float(), (0, padding))
        offsets = None if zeros is None else F.pad(zeros[:, 0], (0, padding))
    else:
        stored, offsets = _tiled(scales), None if zeros is None else _tiled(zeros)
    return Packed(words, stored, offsets, order, bits, n_out, n_in, group_size, scales.dtype)


def unpack(packed: Packed) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The exact inverse of ``pack``: (codes, scales, zeros, group_index); zeros are spelled out."""
    codes = (_unpack4 if packed.bits == 4 else _unpack8)(packed.codes)[: packed.n_out]
    index = None
    if packed.order is not None:
        order = packed.order.long()
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(packed.n_in, device=order.device)
        codes, index = codes[:, inverse], (inverse // packed.group_size).int()

    def rows(t: Tensor) -> Tensor:
        flat = t[:, None] if packed.whole else t.transpose(1, 2).flatten(0, 1)
        return flat[: packed.n_out].contiguous()

    scales = rows(packed.scales).to(packed.scale_dtype)
    if packed.zeros is None:
        zeros = torch.full(scales.shape, 1 << (packed.bits - 1), dtype=torch.uint8, device=codes.device)
    else:
        zeros = rows(packed.zeros)
    return codes.contiguous(), scales, zeros, index


def _sorted(group_index: Tensor, groups: int, group_size: int) -> Tensor:
    """The inputs group by group, those of a group in their own order."""
    sizes = torch.bincount(group_index.long(), minlength=groups)
    if len(sizes) != groups or bool((sizes != group_size).any()):
        raise ValueError(f"takes an act-order index with {group_size} inputs in each of {groups} groups")
    return torch.argsort(group_index.long(), stable=True).int()


def _tiled(values: Tensor) -> Tensor:
    """[out, groups] -> [tiles, groups, 16], rows padded with zeros."""
    return F.pad(values, (0, 0, 0, -values.shape[0] % TILE)).unflatten(0, (-1, TILE)).transpose(1, 2).contiguous()


def _fragments(codes: Tensor) -> Tensor:
    """[out, in] as [tile, step, j, g, t, i, p, h, e]: row 2g + h of a tile, input 32j + 8t + 4i + 2p + e of a step."""
    tiles, steps = codes.shape[0] // TILE, codes.shape[1] // STEP
    return codes.view(tiles, 8, 2, steps, 2, 4, 2, 2, 2).permute(0, 3, 4, 1, 5, 6, 7, 2, 8)


def _from_fragments(fragments: Tensor) -> Tensor:
    tiles, steps = fragments.shape[:2]
    return fragments.permute(0, 3, 7, 1, 2, 4, 5, 6, 8).reshape(tiles * TILE, steps * STEP)


def _places(bits: int) -> list[tuple[int, int, int, int]]:
    """(p, h, e, shift) of the codes in a word; with 8 bits p stays 0, for each p has a word of its own."""
    if bits == 4:
        return [(p, h, e, 4 * (h + 2 * p) + 16 * e) for p in (0, 1) for h in (0, 1) for e in (0, 1)]
    return [(0, h, e, 8 * (2 * h + e)) for h in (0, 1) for e in (0, 1)]


def _pack4(codes: Tensor) -> Tensor:
    parts = _fragments(codes)
    words = torch.zeros(parts.shape[:6], dtype=torch.int32, device=codes.device)
    for p, h, e, shift in _places(4):
        words |= parts[..., p, h, e].int() << shift
    return words.permute(0, 1, 3, 4, 2, 5).flatten(2).contiguous()  # [tile, step, lane, j, i]


def _pack8(codes: Tensor) -> Tensor:
    parts = _fragments(codes)
    words = torch.zeros(parts.shape[:7], dtype=torch.int32, device=codes.device)
    for _, h, e, shift in _places(8):
        words |= parts[..., h, e].int() << shift
    return words.flatten(2).contiguous()  # [tile, step, j, lane, i, p]


def _unpack4(words: Tensor) -> Tensor:
    words = words.view(*words.shape[:2], 8, 4, 2, 2).permute(0, 1, 4, 2, 3, 5)
    parts = torch.empty(*words.shape, 2, 2, 2, dtype=torch.uint8, device=words.device)
    for p, h, e, shift in _places(4):
        parts[..., p, h, e] = (words >> shift & 15).to(torch.uint8)
    return _from_fragments(parts)


def _unpack8(words: Tensor) -> Tensor:
    words = words.view(*words.shape[:2], 2, 8, 4, 2, 2)
    parts = torch.empty(*words.shape, 2, 2, dtype=torch.uint8, device=words.device)
    for _, h, e, shift in _places(8):
        parts[..., h, e] = (words >> shift & 255).to(torch.uint8)
    return _from_fragments(parts)
