"""Matrices whose columns stand in another order in a file than in the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from toolkit.artifacts.canonical import Codebook, Dense, Fp4, GroupInt, Weight


def take_columns(weight: Weight, order: Tensor) -> Weight:
    """``weight[:, order]``; ``order``: int64 [in]. Codes stay codes where whole groups move, else it becomes Dense."""
    if isinstance(weight, Dense):
        return Dense(weight.weight[:, order])
    if not isinstance(weight, GroupInt | Codebook | Fp4) or getattr(weight, "group_index", None) is not None:
        return Dense(weight.dequantize()[:, order])
    groups = _moved(order, weight.group_size)
    if groups is None:
        return Dense(weight.dequantize()[:, order])
    changed: dict[str, Any] = {"codes": weight.codes[:, order]}
    for name in ("scales", "zeros", "minima"):
        if (found := getattr(weight, name, None)) is not None:
            changed[name] = found[:, groups]
    if getattr(weight, "super_scales", None) is not None:
        changed["super_scales"] = None  # a super-block's groups no longer stand together
    return replace(weight, **changed)


def _moved(order: Tensor, size: int) -> Tensor | None:
    """The order of the groups, where each stays whole."""
    if len(order) % size:
        return None
    blocks = order.view(-1, size)
    whole = bool((blocks == blocks[:, :1] + blocks.new_tensor(range(size))).all()) and not bool(
        (blocks[:, 0] % size).any()
    )
    return blocks[:, 0] // size if whole else None
