"""Where the patches of pictures stand: their grid, their windows, how places turn them, and places of another size."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.models.eyes.vision import Tower

Places = list[tuple[int, int]]  # rows and columns of the patches of each tile
Floats = NDArray[np.float32]


def patch_grid(part: Floats, patch: int) -> tuple[int, int]:
    """Rows and columns of the patches of tiles, [tiles, 3, height, width]."""
    _, _, height, width = part.shape
    return height // patch, width // patch


def windows(places: Places, side: int) -> tuple[NDArray[np.int64], list[int]]:
    """The patches of each tile in the order of its windows, and how many there are in each."""
    order: list[NDArray[np.int64]] = []
    lengths: list[int] = []
    at = 0
    for rows, columns in places:
        across = -(-columns // side)
        window = (np.arange(rows)[:, None] // side * across + np.arange(columns) // side).reshape(-1)
        order.append(np.argsort(window, kind="stable") + at)
        lengths += np.bincount(window).tolist()
        at += rows * columns
    return np.concatenate(order), lengths


def turns(tower: Tower, places: Places) -> tuple[Floats, Floats] | None:
    """cos and sin of every token's rotation, [tokens, head_dim / 2]; None where positions are learned alone."""
    if tower.positions == "learned" and not tower.turned:
        return None
    d, theta = tower.head_dim, np.float32(tower.theta)
    if tower.positions != "interlaced":
        by_row = by_column = theta ** -(np.arange(0, d // 2, 2, dtype=np.float32) / np.float32(d // 2))
    else:
        both = theta ** -(np.arange(0, d, 2, dtype=np.float32) / np.float32(d))
        by_row, by_column = both[::2], both[1::2]
    angles = []
    for rows, columns in places:
        y, x = (a.reshape(-1).astype(np.float32) + tower.turned for a in np.indices((rows, columns)))
        angle = np.concatenate([np.outer(y, by_row), np.outer(x, by_column)], 1)
        angles.append(np.pad(angle, ((int(tower.class_token), 0), (0, 0))))
    found = np.concatenate(angles)
    return np.cos(found), np.sin(found)


def sines(rows: int, columns: int, width: int) -> Floats:
    """[rows * columns, width]: half of the numbers tell the column, half the row, of each half one half sines."""
    frequencies = np.float32(10_000.0) ** -(np.arange(width // 4, dtype=np.float32) / np.float32(width // 4))
    found = []
    for places in np.indices((rows, columns), np.float32)[::-1]:
        angle = np.outer(places.reshape(-1), frequencies)
        found += [np.sin(angle), np.cos(angle)]
    return np.concatenate(found, 1)


def nearest(grid: tuple[int, int], learned: tuple[int, int]) -> NDArray[np.int64]:
    """For each patch of ``grid`` the one of ``learned`` at the same part of the way down and across."""
    down, across = (
        np.searchsorted(_steps(1 / of, 1.0, 1 / of), _steps(0.0, 1 - 1e-6, 1 / count), side="right")
        for count, of in zip(grid, learned, strict=True)
    )
    return (down[:, None] * learned[1] + across).reshape(-1)


def _steps(first: float, stop: float, step: float) -> Floats:
    return np.arange(first, stop, step).astype(np.float32)


def resized(values: Floats, shape: tuple[int, int], smooth: bool = False, edges: bool = False) -> Floats:
    """[rows, columns, numbers] at another number of rows and columns: by lines, or by curves where ``smooth`` (cubic
    convolution with -0.75). ``edges``: the middles of the places in the corners lie over one another, not their edges.
    """
    rows, columns = (between(n, to, smooth, edges) for n, to in zip(values.shape, shape, strict=False))
    return np.ascontiguousarray(np.einsum("ar,rcn,bc->abn", rows, values, columns, optimize=True), np.float32)


def between(count: int, wanted: int, smooth: bool, edges: bool) -> Floats:
    """The weight of each of ``count`` places in each of ``wanted`` ones between them, [wanted, count]."""
    at = np.arange(wanted, dtype=np.float32)
    if edges:
        at = at * np.float32((count - 1) / max(wanted - 1, 1))
    else:
        at = (at + np.float32(0.5)) * np.float32(count / wanted) - np.float32(0.5)
        at = at if smooth else np.maximum(at, 0)
    first = np.floor(at)
    weights = np.zeros((wanted, count), np.float32)
    for step in (-1, 0, 1, 2) if smooth else (0, 1):
        place = np.clip(first + step, 0, count - 1).astype(np.int64)
        np.add.at(weights, (np.arange(wanted), place), _kernel(np.abs(at - first - np.float32(step)), smooth))
    return weights


def _kernel(x: Any, smooth: bool) -> Any:
    """How much a place counts at the distance ``x``, below 2."""
    if not smooth:
        return 1 - x
    near = (1.25 * x - 2.25) * x * x + 1
    far = ((-0.75 * x + 3.75) * x - 6) * x + 3
    return np.where(x <= 1, near, far)
