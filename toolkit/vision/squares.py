"""Pictures made square: stretched, cut in the middle, or in the middle of the mean colour."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from toolkit.errors import UsageError
from toolkit.models.eyes.pictures import Recipe
from toolkit.vision.pixels import Tile, array, cut_array, resized, straight

if TYPE_CHECKING:
    from PIL.Image import Image

Size = tuple[int, int]
SQUARE = 10_000  # side of a square that a picture is padded to, at most


def square(recipe: Recipe, image: Image, alone: bool) -> tuple[list[Tile], Size]:
    return [resized(image, recipe.size, recipe.resample)], (1, 1)


def crop(recipe: Recipe, image: Image, alone: bool) -> tuple[list[Tile], Size]:
    return [_middle(recipe, image, recipe.short, recipe.size)], (1, 1)


def boxed(recipe: Recipe, image: Image, alone: bool) -> tuple[list[Tile], Size]:
    if not recipe.high:
        return [_in_box(recipe, image, recipe.size[0], recipe.mean)], (1, 1)
    of_large = recipe if recipe.high_resample is None else replace(recipe, resample=recipe.high_resample)
    large = _in_box(of_large, image, recipe.high, recipe.high_mean)
    return [_in_box(recipe, large, recipe.size[0], recipe.mean), large], (1, 1)


def mined(recipe: Recipe, image: Image, alone: bool) -> tuple[list[Tile], Size]:
    """Mini-Gemini's: a large square, and that made smaller without antialias, whole or in tiles, or both."""
    large, tile = array(_middle(recipe, image, recipe.high, (recipe.high,) * 2)), recipe.size[0]
    small = straight(large, (recipe.most * tile,) * 2)
    tiles = cut_array(small, recipe.size)
    if recipe.whole:
        tiles.insert(0, straight(small, recipe.size))
    return [*tiles, large], (recipe.most, recipe.most)


def padded(image: Image, recipe: Recipe, mean: tuple[float, ...] = ()) -> Image:
    """Square, the picture in the middle of the mean colour."""
    from PIL import Image as pillow

    side = max(image.height, image.width)
    if side > SQUARE:
        found = f"image: found {image.width} x {image.height} pixels"
        raise UsageError(f"{found}, expected sides of at most {SQUARE} for this model, which pads to a square")
    canvas = pillow.new("RGB", (side, side), tuple(int(m * 255) for m in mean or recipe.mean))
    canvas.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return canvas


def _middle(recipe: Recipe, image: Image, short: int, wanted: Size) -> Image:
    """The short side, or of a padded picture both, to ``short`` pixels; of that the middle."""
    if recipe.pad:
        image = padded(image, recipe)
    other = int(short * max(image.height, image.width) / min(image.height, image.width))
    size = (other, short) if image.height > image.width else (short, other)
    image = resized(image, size, recipe.resample)
    top, left = (size[0] - wanted[0]) // 2, (size[1] - wanted[1]) // 2
    return image.crop((left, top, left + wanted[1], top + wanted[0]))


def _in_box(recipe: Recipe, image: Image, side: int, mean: tuple[float, ...]) -> Image:
    scale = side / max(image.height, image.width)
    height, width = (max(round(length * scale), recipe.least) for length in (image.height, image.width))
    return padded(resized(image, (height, width), recipe.resample), recipe, mean)
