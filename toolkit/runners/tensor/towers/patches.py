"""Rows and columns of patches, as towers and projectors put them in order."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from toolkit.models.eyes.vision import MERGES, Stage


def joined(tiles: Tensor, grid: tuple[int, int]) -> Tensor:
    """Square tiles side by side, [rows, columns, numbers]."""
    side = round(tiles.shape[1] ** 0.5)
    return tiles.view(*grid, side, side, -1).transpose(1, 2).flatten(2, 3).flatten(0, 1)


def lined(grid: Tensor, newline: Tensor) -> Tensor:
    """Its lines one after another, ``newline`` behind each."""
    return torch.cat([grid, newline.expand(len(grid), 1, -1)], 1).flatten(0, 1)


def ordered(x: Tensor, order: Tensor | None) -> Tensor:
    """Tokens that stand as ``order`` has them, as they stood before."""
    return x if order is None else torch.empty_like(x).index_copy_(0, order, x)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[tokens, heads, head_dim], element i turned with i + head_dim / 2."""
    wide = x.float()
    first, second = wide.chunk(2, -1)
    return (wide * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]).to(x.dtype)


def merged(tiles: Tensor, rows: int, columns: int, stage: Stage) -> Tensor:
    f = stage.factor
    if rows % f or columns % f:  # zeros below and to the right
        tiles = functional.pad(tiles.unflatten(1, (rows, columns)), (0, 0, 0, -columns % f, 0, -rows % f)).flatten(1, 2)
    blocks = tiles.unflatten(1, (-(-rows // f), f, -(-columns // f), f))
    if stage.kind == "pool":
        return blocks.mean((2, 4)).flatten(1, 2)
    return blocks.permute(*MERGES[stage.kind]).flatten(3).flatten(1, 2)
