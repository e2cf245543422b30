"""Pictures cut into as many tiles as their own shape asks for."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from toolkit.models.eyes.pictures import Recipe, framed
from toolkit.vision.pixels import Tile, array, curved, cut, resized

if TYPE_CHECKING:
    from PIL.Image import Image

Size = tuple[int, int]
WHITE = 255


def lined(recipe: Recipe, image: Image, alone: bool) -> tuple[list[Tile], Size]:
    """Phi-3-vision's: its long side as many tiles as fit, the short one white on both sides up to whole tiles; the
    whole of that first."""
    from PIL import Image as pillow

    tile, tall = recipe.size[0], image.height > image.width
    if tall:
        image = image.transpose(pillow.Transpose.TRANSPOSE)
    ratio = image.width / image.height
    columns = max(n for n in range(1, recipe.most + 1) if n * math.ceil(n / ratio) <= recipe.most)
    if recipe.below:
        columns = min(columns, -(-image.width // tile))
    height = max(int(columns * tile / ratio), 1)
    rows = -(-height // tile)
    canvas = pillow.new("RGB", (columns * tile, rows * tile), (WHITE,) * 3)
    image = resized(image, (height, columns * tile), recipe.resample)
    canvas.paste(image, (0, 0 if recipe.below else (rows * tile - height) // 2))
    if tall:
        canvas, rows, columns = canvas.transpose(pillow.Transpose.TRANSPOSE), columns, rows
    return [curved(array(canvas), recipe.size), *cut(canvas, recipe.size)], (rows, columns)


def slices(recipe: Recipe, image: Image, alone: bool) -> tuple[list[Tile], Size]:
    """MiniCPM-V's: the whole, then the slices of the grid nearest in ratio, all in their own ratio and of about as many
    pixels as ``size``, sides multiples of ``unit``."""
    size, grid = (image.width, image.height), _grid(recipe, image)
    if grid is None:
        return [_resized(recipe, image, _near(recipe, size, grow=True))], (0, 0)
    rows, columns = grid
    whole = _resized(recipe, image, _near(recipe, size, grow=False))
    part = (_whole(size[0], columns) / columns, _whole(size[1], rows) / rows)
    width, height = _near(recipe, part, grow=True)
    large = _resized(recipe, image, (width * columns, height * rows))
    return [whole, *cut(large, (height, width))], grid


def overlapping(recipe: Recipe, image: Image, alone: bool) -> tuple[list[Tile], Size]:
    """Molmo's: what the tower sees of a tile beyond its own part is that of its neighbours."""
    tile, shared = recipe.size[0], recipe.overlap * recipe.unit
    step, margins = tile - 2 * shared, 2 * shared
    grids = [(i, j) for i in range(1, recipe.most + 1) for j in range(1, recipe.most + 1) if i * j <= recipe.most]
    grids.sort(key=lambda grid: (grid[0] * grid[1], grid[0]))
    own = np.array([image.height - margins, image.width - margins], np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        scales = (np.array(grids) * step).astype(np.float32) / own
    least = scales.min(1)
    best = least.argmax() if (least < 1).all() else np.where(least < 1, 10e9, least).argmin()
    rows, columns = grids[int(best)]
    large = _framed(image, (rows * step + margins, columns * step + margins))
    cuts = [large[:, i * step :, j * step :][:, :tile, :tile] for i in range(rows) for j in range(columns)]
    return [_framed(image, recipe.size), *cuts], (rows, columns)


def _framed(image: Image, frame: Size) -> NDArray[np.float32]:
    """In the middle of black, resized by lines in floating point."""
    from PIL import Image as pillow

    (height, width), (top, left) = framed((image.height, image.width), frame)
    found = np.zeros((3, *frame), np.float32)
    for plane, colour in zip(found, image.split(), strict=True):
        numbers = pillow.fromarray(np.asarray(colour, np.float32))
        small = numbers.resize((width, height), pillow.Resampling.BILINEAR)
        plane[top : top + height, left : left + width] = np.asarray(small)
    return found


def _grid(recipe: Recipe, image: Image) -> Size | None:
    """Rows and columns, None where the picture is small enough."""
    count = min(math.ceil(image.width * image.height / (recipe.size[0] * recipe.size[1])), recipe.most)
    if count <= 1:
        return None
    counts = [n for n in (count - 1, count, count + 1) if 1 < n <= recipe.most]
    grids = [(n // columns, columns) for n in counts for columns in range(1, n + 1) if n % columns == 0]
    ratio = math.log(image.width / image.height)
    return min(grids, key=lambda grid: abs(ratio - math.log(grid[1] / grid[0])))


def _near(recipe: Recipe, size: tuple[float, float], grow: bool) -> Size:
    """(width, height) of about ``recipe.size`` pixels in the ratio of ``size``, or of its own where that is less."""
    width, height = size
    if grow or width * height > recipe.size[0] * recipe.size[1]:
        ratio = width / height
        height = int(recipe.size[0] / math.sqrt(ratio))
        width = int(height * ratio)
    return _whole(width, recipe.unit), _whole(height, recipe.unit)


def _whole(length: float, unit: int) -> int:
    return max(round(length / unit) * unit, unit)


def _resized(recipe: Recipe, image: Image, size: Size) -> Image:
    return resized(image, (size[1], size[0]), recipe.resample)
