"""Tiles of pictures, as Pillow has them or as arrays: resized, cut, made numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels: TypeAlias = NDArray[np.uint8] | NDArray[np.float32]
Tile: TypeAlias = "Image | Pixels"
CUBIC = -0.75  # the slope of torch's curves


def array(tile: Tile) -> NDArray[np.float32]:
    """float32 [3, height, width], 0 to 255."""
    if isinstance(tile, np.ndarray) and tile.dtype == np.float32:
        return cast(NDArray[np.float32], tile)
    return np.asarray(tile, np.float32).transpose(2, 0, 1)


def bfloat16(numbers: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rounded to bfloat16, to even where two are as near."""
    bits = numbers.astype(np.float32).view(np.uint32)
    return ((bits + (((bits >> 16) & 1) + 0x7FFF)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def resized(image: Image, size: tuple[int, int], resample: int) -> Image:
    """To ``size`` (height, width)."""
    from PIL.Image import Resampling

    return image if (image.height, image.width) == size else image.resize((size[1], size[0]), Resampling(resample))


def cut(image: Image, tile: tuple[int, int]) -> Iterator[Image]:
    """Its tiles, line by line."""
    for top in range(0, image.height, tile[0]):
        for left in range(0, image.width, tile[1]):
            yield image.crop((left, top, min(left + tile[1], image.width), min(top + tile[0], image.height)))


def cut_array(pixels: NDArray[np.float32], tile: tuple[int, int]) -> list[NDArray[np.float32]]:
    """Whole tiles of [3, height, width], line by line."""
    rows, columns = (range(0, side, step) for side, step in zip(pixels.shape[1:], tile, strict=True))
    return [pixels[:, y : y + tile[0], x : x + tile[1]] for y in rows for x in columns]


def straight(pixels: NDArray[np.float32], size: tuple[int, int]) -> NDArray[np.float32]:
    """As ``curved``, by lines between two neighbours."""
    for axis, wanted in ((1, size[0]), (2, size[1])):
        count, shape = pixels.shape[axis], [1, 1, 1]
        shape[axis] = wanted
        at = ((np.arange(wanted) + 0.5) * (count / wanted) - 0.5).clip(0)
        first = at.astype(np.int64)
        share = (at - first).astype(np.float32).reshape(shape)
        near, far = pixels.take(first, axis), pixels.take((first + 1).clip(0, count - 1), axis)
        pixels = near + (far - near) * share
    return pixels


def curved(pixels: NDArray[np.float32], size: tuple[int, int]) -> NDArray[np.float32]:
    """[3, height, width] to ``size`` by cubic curves through four neighbours, whatever lies between them left out:
    torch's ``interpolate`` without antialias."""
    for axis, wanted in ((1, size[0]), (2, size[1])):
        pixels = _curved(pixels, axis, wanted)
    return pixels


def _curved(pixels: NDArray[np.float32], axis: int, wanted: int) -> NDArray[np.float32]:
    count = pixels.shape[axis]
    at = (np.arange(wanted) + 0.5) * (count / wanted) - 0.5
    first = np.floor(at).astype(np.int64)
    far = np.abs(at - first - np.arange(-1, 3)[:, None])  # of the four neighbours
    near = (CUBIC + 2) * far**3 - (CUBIC + 3) * far**2 + 1
    weights = np.where(far <= 1, near, CUBIC * (far**3 - 5 * far**2 + 8 * far - 4)).astype(np.float32)
    shape = [1, 1, 1]
    shape[axis] = wanted
    taken = ((first + k).clip(0, count - 1) for k in range(-1, 3))
    found = [pixels.take(at, axis) * w.reshape(shape) for at, w in zip(taken, weights, strict=True)]
    return sum(found[1:], found[0])
