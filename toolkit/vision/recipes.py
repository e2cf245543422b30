"""Preparing a picture for a model's tower, by its ``Recipe``: the numbers that the model's authors trained on.

Resizing is Pillow's, with its filters and its rounding to 8 bits, as the authors' processors have it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import UsageError
from toolkit.models.eyes.pictures import Picture, Recipe, shrunk, unpadded
from toolkit.vision.pixels import Pixels, Tile, array, bfloat16, cut, resized
from toolkit.vision.slices import lined, overlapping, slices
from toolkit.vision.squares import boxed, crop, mined, padded, square

if TYPE_CHECKING:
    from PIL.Image import Image

Size = tuple[int, int]
LONGEST = 4096  # side that "split" never goes beyond
STEEPEST = 200  # ratio of the sides that is taken


def prepare(recipe: Recipe, image: Image, alone: bool = True) -> Picture:
    """``image`` (RGB) as the tower wants it. ``alone``: it is the only one of its conversation, and may be cut into
    tiles where the recipe has that for single pictures. Raises UsageError for a shape that the model does not take.
    """
    tiles, grid = tiles_of(recipe, image, alone)
    return made_of(recipe, tiles, grid, (image.height, image.width))


def tiles_of(recipe: Recipe, image: Image, alone: bool) -> tuple[list[Pixels], Size]:
    """What ``prepare`` makes numbers of, and the grid: uint8 [height, width, 3], or float32 [3, height, width] from 0
    to 255 where it was resized in floating point."""
    _, found = check_shape(image)
    try:
        tiles, grid = _KINDS[recipe.kind](recipe, image, alone)
        return [np.asarray(tile) for tile in tiles], grid
    except (OverflowError, MemoryError, ValueError) as e:
        raise UsageError(f"{found}, which cannot be resized: {str(e) or type(e).__name__}") from e


def made_of(recipe: Recipe, tiles: Sequence[Pixels], grid: Size, size: Size) -> Picture:
    """What ``tiles_of`` has found in a picture of this ``size``, as its numbers."""
    made = [(_rounded if recipe.rounded else normed)(tile, recipe.mean, recipe.std) for tile in tiles]
    if recipe.high:
        made[-1] = normed(tiles[-1], recipe.high_mean, recipe.high_std)
    first = sum(1 for _ in takewhile(lambda tile: tile.shape == made[0].shape, made))
    parts = [np.stack(some) for some in (made[:first], made[first:]) if some]
    return as_picture(recipe, parts, grid, size, _tokens(recipe, grid, size, len(tiles) - bool(recipe.high)))


def check_shape(image: Image) -> tuple[Size, str]:
    """Its (height, width), and that in words. Raises UsageError for one that no model takes."""
    found = f"image: found {image.width} x {image.height} pixels"
    if max(image.size) > STEEPEST * min(image.size):
        raise UsageError(f"{found}, expected sides of a ratio of at most {STEEPEST}")
    return (image.height, image.width), found


def as_picture(recipe: Recipe, parts: Sequence[NDArray[np.float32]], grid: Size, size: Size, tokens: int) -> Picture:
    """One of tiles, those of one size together."""
    digest = blake2b(repr((recipe.kind, grid, size, [part.shape for part in parts])).encode(), digest_size=32)
    for part in parts:
        digest.update(np.ascontiguousarray(part).data)
    more = parts[1] if len(parts) > 1 else None
    return Picture(parts[0], grid, size, tokens, digest.digest(), more, recipe.numbered)


def normed(tile: Tile, mean: tuple[float, ...], std: tuple[float, ...]) -> NDArray[np.float32]:
    shift, width = (np.array(x, np.float32).reshape(3, 1, 1) for x in (mean, std))
    numbers = array(tile) / np.float32(255)
    numbers -= shift
    numbers /= width
    return numbers


def _rounded(tile: Tile, mean: tuple[float, ...], std: tuple[float, ...]) -> NDArray[np.float32]:
    """As ``normed``, each step in bfloat16, as Llama 4's authors have it."""
    shift, width = (bfloat16(np.array(x, np.float32).reshape(3, 1, 1)) for x in (mean, std))
    return bfloat16(bfloat16(bfloat16(array(tile) * np.float32(1 / 255)) - shift) / width)


def _tokens(recipe: Recipe, grid: Size, size: Size, tiles: int) -> int:
    if recipe.kind in ("fit", "area", "fill"):
        return grid[0] * grid[1]
    if recipe.kind == "canvas":
        return 1
    side = math.isqrt(recipe.per_tile)
    if recipe.kind == "overlap":
        high, wide = (n * (side - 2 * recipe.overlap) + 2 * recipe.overlap for n in grid)
        return side * (side + 1) + high * (wide + 1) + 4
    if recipe.kind in ("lined", "framed"):
        return tiles * recipe.per_tile + 1 + (grid[0] + 1) * side
    if recipe.kind != "anyres":
        return tiles * recipe.per_tile
    if tiles == 1:
        return recipe.per_tile + 1
    (top, bottom), (left, right) = unpadded(size, (grid[0] * side, grid[1] * side))
    lines = (bottom - top, right - left)
    rows, columns = shrunk(lines, side, recipe.most_tiles) or lines
    return recipe.per_tile + rows * (columns + 1)


def _on_canvas(recipe: Recipe, image: Image, alone: bool) -> tuple[list[Image], Size]:
    from PIL import Image as pillow

    tile = recipe.size[0]
    scales = {(h, w): min(h / image.height, w / image.width) for h, w in recipe.canvases}
    enough = [scale for scale in scales.values() if scale >= 1]
    chosen = min(enough) if enough else max(scales.values())
    high, wide = min((size for size in scales if scales[size] == chosen), key=lambda size: size[0] * size[1])
    height, width = min(max(image.height, tile), high), min(max(image.width, tile), wide)
    down, across = height / image.height, width / image.width
    if across < down:
        height = min(max(math.floor(image.height * across), 1), height)
    else:
        width = min(max(math.floor(image.width * down), 1), width)
    canvas = pillow.new("RGB", (wide, high))
    canvas.paste(resized(image, (height, width), recipe.resample), (0, 0))
    return list(cut(canvas, recipe.size)), (high // tile, wide // tile)


def _canvas_whole(recipe: Recipe, image: Image, alone: bool) -> tuple[list[Image], Size]:
    tiles, grid = _on_canvas(recipe, image, alone)
    return [*tiles, *([resized(image, recipe.size, recipe.resample)] if len(tiles) > 1 else ())], grid


def _scan(recipe: Recipe, image: Image, alone: bool) -> tuple[list[Image], Size]:
    rows, columns = _parts(recipe, image)
    height, width = -(-image.height // rows), -(-image.width // columns)
    parts = [image]
    if rows * columns > 1 and min(height, width) >= recipe.least:
        parts += cut(image, (height, width))
    return [resized(part, recipe.size, recipe.resample) for part in parts], (1, 1)


def _parts(recipe: Recipe, image: Image) -> Size:
    """Rows and columns that it is cut into; (1, 1): not at all."""
    short, long = sorted((image.height, image.width))
    if not recipe.most or long / short < recipe.steep:
        return 1, 1
    count = min(int(long / short + 0.5), long // recipe.least)
    count = min(max(count, 2), recipe.most)
    return (1, count) if image.width >= image.height else (count, 1)


def _anyres(recipe: Recipe, image: Image, alone: bool) -> tuple[list[Image], Size]:
    from PIL import Image as pillow

    if recipe.pad and not alone:
        return [resized(padded(image, recipe), recipe.size, recipe.resample)], (1, 1)
    height, width = _canvas(recipe.canvases, image)
    across, down = width / image.width, height / image.height
    if across < down:
        size = (min(math.ceil(image.height * across), height), width)
    else:
        size = (height, min(math.ceil(image.width * down), width))
    canvas = pillow.new("RGB", (width, height))
    canvas.paste(resized(image, size, recipe.resample), ((width - size[1]) // 2, (height - size[0]) // 2))
    whole = resized(image, recipe.size, recipe.resample)
    return [whole, *cut(canvas, recipe.size)], (height // recipe.size[0], width // recipe.size[1])


def _framed(recipe: Recipe, image: Image, alone: bool) -> tuple[list[Image], Size]:
    colour = tuple(int(m * 255) for m in recipe.mean)
    height, width = _canvas(recipe.canvases, image) if alone else recipe.size
    whole, large = (_in_the_middle(recipe, image, size, colour) for size in (recipe.size, (height, width)))
    return [whole, *cut(large, recipe.size)], (height // recipe.size[0], width // recipe.size[1])


def _in_the_middle(recipe: Recipe, image: Image, size: Size, colour: tuple[int, ...]) -> Image:
    """``image`` in the middle of ``size``, as large as fits: Pillow's ``pad``, which before 13 refuses what is so long
    that its short side would round to nothing."""
    from PIL import Image as pillow

    height, width = size
    if image.width * height > image.height * width:
        height = max(1, round(image.height / image.width * width))
    else:
        width = max(1, round(image.width / image.height * height))
    canvas = pillow.new("RGB", size[::-1], colour)
    middle = (round((size[1] - width) * 0.5), round((size[0] - height) * 0.5))
    canvas.paste(resized(image, (height, width), recipe.resample), middle)
    return canvas


def _canvas(canvases: tuple[Size, ...], image: Image) -> Size:
    """The one that keeps most of the picture's pixels, of those the smallest."""

    def worth(canvas: Size) -> tuple[int, int]:
        scale = min(canvas[1] / image.width, canvas[0] / image.height)
        kept = min(int(image.width * scale) * int(image.height * scale), image.width * image.height)
        return kept, kept - canvas[0] * canvas[1]

    return max(canvases, key=worth)


def _tiles(recipe: Recipe, image: Image, alone: bool) -> tuple[list[Image], Size]:
    rows, columns = _nearest_grid(recipe, image)
    size = (rows * recipe.size[0], columns * recipe.size[1])
    found = list(cut(resized(image, size, recipe.resample), recipe.size))
    if len(found) > 1:
        found.append(resized(image, recipe.size, recipe.resample))
    return found, (rows, columns)


def _nearest_grid(recipe: Recipe, image: Image) -> Size:
    """Rows and columns nearest in ratio; of equal ones the larger, while the picture fills more than half of it."""
    count = range(1, recipe.most + 1)
    grids = [(rows, columns) for columns in count for rows in count if recipe.least <= rows * columns <= recipe.most]
    best, nearest = (1, 1), math.inf
    for rows, columns in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        off = abs(image.width / image.height - columns / rows)
        large = image.width * image.height > 0.5 * recipe.size[0] * recipe.size[1] * rows * columns
        if off < nearest or (off == nearest and large):
            best, nearest = (rows, columns), off
    return best


def _split(recipe: Recipe, image: Image, alone: bool) -> tuple[list[Image], Size]:
    tile = recipe.size
    image = resized(image, _longest(image, recipe.long), recipe.resample)
    if not recipe.most:
        return [resized(image, tile, recipe.resample)], (0, 0)
    image = resized(image, _whole_tiles(image, tile[0]), recipe.resample)
    if (image.height, image.width) == tile:
        return [image], (0, 0)
    whole = resized(image, tile, recipe.resample)
    return [*cut(image, tile), whole], (image.height // tile[0], image.width // tile[1])


def _longest(image: Image, long: int) -> Size:
    """The long side to ``long``, the other even, neither beyond LONGEST."""
    ratio = image.width / image.height
    if image.width >= image.height:
        other = int(long / ratio)
        height, width = max(other + other % 2, 1), long
    else:
        other = int(long * ratio)
        height, width = long, max(other + other % 2, 1)
    ratio = width / height
    if width >= height and width > LONGEST:
        height, width = int(LONGEST / ratio), LONGEST
    elif height > width and height > LONGEST:
        height, width = LONGEST, int(LONGEST * ratio)
    return max(height, 1), max(width, 1)


def _whole_tiles(image: Image, tile: int) -> Size:
    ratio = image.width / image.height
    if image.width >= image.height:
        width = math.ceil(image.width / tile) * tile
        return math.ceil(int(width / ratio) / tile) * tile, width
    height = math.ceil(image.height / tile) * tile
    return height, math.ceil(int(height * ratio) / tile) * tile


def _fit(recipe: Recipe, image: Image, alone: bool) -> tuple[list[Image], Size]:
    height, width = image.height, image.width
    if (ratio := max(height, width) / recipe.long) > 1:
        height, width = max(int(height / ratio), 1), max(int(width / ratio), 1)
    grid = (-(-height // recipe.unit), -(-width // recipe.unit))
    return [resized(image, (grid[0] * recipe.unit, grid[1] * recipe.unit), recipe.resample)], grid


def area_grid(recipe: Recipe, size: Size, frames: int = 1, counted: int = 1) -> Size:
    """Rows and columns of tokens, of kind "area"; of so many ``frames`` that all together have ``least`` to ``most``
    pixels, where ``counted`` of them are looked at for that."""
    (height, width), unit = size, recipe.unit
    if (scale := recipe.short / min(height, width)) > 1:
        height, width = int(height * scale), int(width * scale)
    rows, columns = round(height / unit), round(width / unit)
    if counted * rows * columns * unit**2 > recipe.most:
        scale = math.sqrt(frames * height * width / recipe.most)
        rows, columns = (max(1, math.floor(side / scale / unit)) for side in (height, width))
    elif counted * rows * columns * unit**2 < recipe.least:
        scale = math.sqrt(recipe.least / (frames * height * width))
        rows, columns = (math.ceil(side * scale / unit) for side in (height, width))
    return rows, columns


def _area(recipe: Recipe, image: Image, alone: bool) -> tuple[list[Image], Size]:
    rows, columns = area_grid(recipe, (image.height, image.width))
    unit = recipe.unit
    return [resized(image, (rows * unit, columns * unit), recipe.resample)], (rows, columns)


def _fill(recipe: Recipe, image: Image, alone: bool) -> tuple[list[Image], Size]:
    unit, most = recipe.unit, recipe.most // recipe.unit**2
    scale = math.sqrt(recipe.most / (image.height * image.width))
    rows, columns = (math.floor(side * scale / unit) for side in (image.height, image.width))
    if not rows:
        rows, columns = 1, min(image.width // image.height, most)
    elif not columns:
        rows, columns = min(image.height // image.width, most), 1
    return [resized(image, (rows * unit, columns * unit), recipe.resample)], (rows, columns)


_KINDS: dict[str, Callable[[Recipe, Image, bool], tuple[Sequence[Tile], Size]]] = {
    "square": square,
    "crop": crop,
    "boxed": boxed,
    "mined": mined,
    "canvas": _on_canvas,
    "canvas_whole": _canvas_whole,
    "scan": _scan,
    "anyres": _anyres,
    "tiles": _tiles,
    "split": _split,
    "fit": _fit,
    "area": _area,
    "fill": _fill,
    "framed": _framed,
    "lined": lined,
    "overlap": overlapping,
    "slices": slices,
}
