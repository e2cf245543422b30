"""Matrices of adapters in 8 bits, for linears whose own weights are integers. Imports torch.

Such a linear reads its input as integers in groups of columns, and so does A: codes in those groups, with a scale for
each group of a row. B has one scale a column, by which A's product is multiplied before it is rounded to 8 bits too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from toolkit.runners.native.packing.packed import BF16, INT, LANES, ONES, PackedMeta, PackedTensor, vector

MOST_ERROR = 0.02  # root mean square of what rounding changes, of a matrix; beyond it stays as it is
_GROUPS = (64, 48, 32, 16)  # columns of B whose inputs are rounded together


@dataclass(frozen=True)
class Pair:
    """What is added to a linear: ``b @ a``. ``a``: float32 [rank, in]; ``b``: float32 [out, rank]. ``group`` and
    ``perm``: how the linear reads its input, see ``PackedTensor``."""

    a: Tensor
    b: Tensor
    group: int
    perm: NDArray[np.int32] | None


Packed = tuple[PackedTensor, PackedTensor, PackedTensor]


def pack_pairs(pairs: Sequence[Pair]) -> list[Packed | None]:
    """A, B and B's scales of each; None where 8 bits would change one of the matrices by more than ``MOST_ERROR``.
    Those of one shape are packed together: by themselves the calls would take longer than the work."""
    alike: dict[Any, list[int]] = {}
    for i, pair in enumerate(pairs):
        alike.setdefault((pair.a.shape, pair.b.shape, pair.group, id(pair.perm)), []).append(i)
    found: list[Packed | None] = [None] * len(pairs)
    for places in alike.values():
        for place, packed in zip(places, _pack_alike([pairs[i] for i in places]), strict=True):
            found[place] = packed
    return found


def _pack_alike(pairs: Sequence[Pair]) -> list[Packed | None]:
    first = pairs[0]
    (rank, inputs), outputs, group = first.a.shape, first.b.shape[0], first.group
    a = torch.stack([pair.a for pair in pairs])
    if first.perm is not None:
        a = a[..., torch.from_numpy(first.perm).long()]
    more = -rank % LANES
    wide = rank + more
    a = _padded(a, (0, 0, 0, more)).view(len(pairs), wide, -1, group)
    b = _padded(torch.stack([pair.b for pair in pairs]), (0, more, 0, -outputs % LANES))
    a_scales, b_scales = _bfloat16_above(_largest(a, -1) / 127), _largest(b, 1) / 127
    fine = (_error(a, a_scales) < MOST_ERROR) & (_error(b, b_scales) < MOST_ERROR)
    a_tiles = _words(a, a_scales).view(len(pairs), wide // LANES, LANES, inputs // group, group // 4)
    headers = torch.zeros(*a_tiles.shape[:2], inputs // group, 64, dtype=torch.uint8)
    scales = a_scales.view(*a_tiles.shape[:2], LANES, -1).transpose(2, 3).bfloat16().contiguous()
    headers[..., : 2 * LANES] = scales.view(torch.uint8)
    a_codes = a_tiles.permute(0, 1, 3, 4, 2).contiguous().view(torch.uint8).flatten(3)
    a_data = torch.cat([headers, a_codes], dim=3).flatten(1).numpy()
    b_words = _words(b, b_scales).view(len(pairs), -1, LANES, wide // 4)
    b_data = b_words.transpose(2, 3).contiguous().view(torch.uint8).flatten(1).numpy()
    a_meta = PackedMeta(INT, wide, inputs, BF16, 8, group)
    b_meta = PackedMeta(INT, outputs, wide, ONES, 8, next(g for g in (wide, *_GROUPS) if g <= 64 and wide % g == 0))
    steps = b_scales[:, 0].numpy()
    return [
        (PackedTensor(a_data[i], a_meta), PackedTensor(b_data[i], b_meta), vector(steps[i])) if fine[i] else None
        for i in range(len(pairs))
    ]


def _padded(x: Tensor, by: tuple[int, ...]) -> Tensor:
    return torch.nn.functional.pad(x, by) if any(by) else x  # by nothing it would copy all the same


def _largest(x: Tensor, dim: int) -> Tensor:
    low, high = torch.aminmax(x, dim=dim, keepdim=True)
    return torch.maximum(-low, high)


def _bfloat16_above(x: Tensor) -> Tensor:
    """The least numbers of bfloat16 that are no smaller than these, which are at least 0."""
    return ((x.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)


def _error(x: Tensor, scales: Tensor) -> Tensor:
    """By how much rounding changes each of the matrices, root mean square, of its numbers': an error is anything within
    half a step."""
    steps = scales.square().sum((1, 2, *range(3, x.dim())))
    steps = steps * (x[0].numel() // scales[0].numel()) / 12
    sizes = torch.linalg.vector_norm(x.flatten(1), dim=1).square()
    return torch.where(sizes > 0, steps / sizes, 0).sqrt()


def _words(x: Tensor, scales: Tensor) -> Tensor:
    """Codes + 128, four of a row in a word."""
    factors = torch.where(scales > 1e-30, 1 / scales, 0)
    codes = (x * factors).add_(128.5).clamp_(1, 255.5).to(torch.uint8)
    return codes.view(torch.int32)
