"""Weights one below the other, as one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from toolkit.artifacts.canonical import BlockFp8, ByRow, Weight


def join_rows(parts: Sequence[Weight]) -> Weight | None:
    """The weights one below the other, or None where they are not of one form, or differ in what all rows share."""
    if len(parts) == 1:
        return parts[0]
    if any(type(part) is not type(parts[0]) for part in parts):
        return None
    tiles = [part for part in parts if isinstance(part, BlockFp8)]
    if len({tile.block for tile in tiles}) > 1:
        return None
    return _below(_under_one_table(tiles) if tiles else parts)


def _below(parts: Sequence[Any]) -> Any:
    """``join_rows`` of parts of one class."""
    first = parts[0]
    shared = [f.name for f in fields(first) if f.name not in first.BY_ROW]
    if not all(_same(getattr(first, name), getattr(part, name)) for name in shared for part in parts):
        return None
    joined: dict[str, Any] = {}
    for name in first.BY_ROW:
        values = [value for part in parts if (value := getattr(part, name)) is not None]
        if values and (len(values) < len(parts) or len({getattr(value, "dtype", None) for value in values}) > 1):
            return None
        if values:
            joined[name] = _below(values) if isinstance(values[0], ByRow) else torch.cat(values)
    return replace(first, **joined)


def _same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b or a == b


def _under_one_table(parts: Sequence[BlockFp8]) -> list[BlockFp8]:
    """The parts with the scales of them all, where they have not the same ones already: rows that were taken out of one
    weight have."""
    first = parts[0].scales
    if all(part.row_blocks is not None and _same(part.scales, first) for part in parts):
        return list(parts)
    scales = torch.cat([part.scales for part in parts])
    starts = itertools.accumulate((len(part.scales) for part in parts), initial=0)
    return [replace(p, scales=scales, row_blocks=p.block_of_rows() + n) for p, n in zip(parts, starts, strict=False)]
