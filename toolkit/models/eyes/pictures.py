"""Pictures on their way to a tower: the recipe by which a family has them prepared, and what comes of it."""

from __future__ import annotations

import math
from dataclasses import field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from toolkit.base.lazy_dataclass import dataclass
from toolkit.models.eyes.fine import STEM
from toolkit.models.eyes.videos import Frame, Video

MOST_TILES = 24  # that a request may have a picture cut into, of kind "tiles"


@dataclass(frozen=True)
class Recipe:
    """How a picture is prepared, and what a prompt says where it stands.

    ``kind``: "square" (to ``size``, its sides' ratio be what it may), "crop" (the short side to ``short``, then the
    middle ``size``; ``pad``: made square first), "boxed" (the long side to ``size``, the short one at least ``least``,
    then made square), "canvas" (the one of ``canvases``, of up to ``most`` tiles, that it fits into with the least
    change, black where it does not reach), "canvas_whole" (so, and where that is several tiles the whole behind),
    "scan" (to ``size``; where one side is ``steep`` times the other at least it is also cut across that one into up to
    ``most`` parts, no side of them below ``least``), "anyres" (the canvas of ``canvases`` that holds most of it, cut
    into tiles of ``size``, and the whole), "tiles" (the grid of ``least`` to ``most`` tiles nearest in ratio, and the
    whole behind them), "split" (the long side to ``long``, cut into tiles of ``size``, and the whole behind), "fit"
    (the long side to at most ``long``, both to multiples of ``unit``), "area" (both to multiples of ``unit``, ``least``
    to ``most`` pixels in all; one with a side below ``short`` is enlarged first), "fill" (as large as ``most`` pixels
    and multiples of ``unit`` let both be, about in its own ratio), "lined" (the long side as many tiles as there can be
    of ``most``, white up to whole ones, and the whole of that before; ``below``: white behind alone, and no more tiles
    than it has by itself), "slices" (the grid of up to ``most`` slices nearest in ratio, all in their own ratio and of
    about ``size`` pixels, and so the whole before), "framed" (as "anyres", in the mean colour where it does not reach,
    the whole too; of many pictures each is one tile besides), "mined" (the middle of a square of ``high`` pixels, and
    made of it by lines ``most`` × ``most`` tiles of ``size``, before them the ``whole`` of those), "overlap" (the grid
    of up to ``most`` tiles that needs least change, black where it does not reach, tiles ``overlap`` tokens over the
    edges between them, and so the whole before). Sizes are (height, width). ``unit``: pixels along a side of what one
    token tells. ``resample``: Pillow's number of the filter. Numbers are ``(value / 255 - mean) / std``, ``rounded``:
    in bfloat16.

    ``mark``: what stands for a picture in what a chat template has written; ``written``: what is written for one where
    the template writes none; ``token``: what the rows take the place of. ``spelled``: how a mark is spelled: "plain"
    (all tokens, between ``before``, where {} is its number from 1 on, and ``after``), "lines" (line by line, ``before``
    between and ``after`` behind) or "split" (tile by tile, each named and begun by ``before``, the whole picture as
    ``after``) or "scan" (as "plain", the parts behind the whole, with words between) or "named" (tile by tile,
    numbered) or "parted" (as "plain", ``inner`` between tiles and behind lines of them, ``mark`` before the whole) or
    "slices" (the whole, then line by line; each slice between ``inner``, or where ``around`` they stand as the whole
    does and all of them between ``inner``). ``numbered``: a number stands before each picture, counted from 0. ``few``:
    only where a conversation has no more pictures they are cut, of kinds that ask for that. ``leads``: what a prompt
    may begin with, behind which all its pictures stand. ``high``: the side of a larger form, "boxed" and "mined" too,
    of which the other is made and which stands behind it, with ``high_mean``, ``high_std`` and, where
    that is another, ``high_resample``. ``per_tile``: tokens a
    tile, of kinds that have tiles; ``most_tiles``: as in ``VisionSpec``. ``video``: how videos are shown, None: not at
    all.
    """

    kind: Literal[
        "square",
        "crop",
        "boxed",
        "canvas",
        "canvas_whole",
        "scan",
        "anyres",
        "tiles",
        "split",
        "fit",
        "area",
        "fill",
        "lined",
        "slices",
        "framed",
        "overlap",
        "mined",
    ]
    size: tuple[int, int]
    unit: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resample: int = 3
    short: int = 0
    long: int = 0
    pad: bool = False
    canvases: tuple[tuple[int, int], ...] = ()
    least: int = 0
    most: int = 0
    steep: float = 0.0
    most_tiles: int = 0
    per_tile: int = 0
    spelled: Literal["plain", "lines", "split", "scan", "named", "parted", "slices"] = "plain"
    mark: str = "<image>"
    written: str = "<image>\n"
    token: str = "<image>"
    before: str = ""
    after: str = ""
    inner: tuple[str, str] = ("", "")
    around: bool = False
    numbered: bool = False
    few: int = 1
    below: bool = False
    whole: bool = False
    rounded: bool = False
    leads: tuple[str, ...] = ()
    overlap: int = 0
    high: int = 0
    high_mean: tuple[float, ...] = ()
    high_std: tuple[float, ...] = ()
    high_resample: int | None = None
    video: Video | None = None


@dataclass(frozen=True)
class Picture:
    """A picture prepared for a tower, as a request carries it.

    ``pixels``: float32 [tiles, 3, height, width]; of a video's 3 x frames that are one, those of a colour side by
    side. ``grid``: rows and columns of tiles (but for the whole picture's),
    of a single tile those of its tokens. ``size``: (height, width) before. ``tokens``: how many rows it becomes.
    ``digest``: of all that. ``more``: tiles
    of another size, which stand behind. ``numbered``: as in ``Recipe``. ``frame``: of a part of a video.
    """

    pixels: NDArray[np.float32] = field(repr=False)
    grid: tuple[int, int]
    size: tuple[int, int]
    tokens: int
    digest: bytes
    more: NDArray[np.float32] | None = field(default=None, repr=False)
    numbered: bool = False
    frame: Frame | None = None

    @property
    def parts(self) -> tuple[NDArray[np.float32], ...]:
        """All its tiles, those of one size together."""
        return (self.pixels,) if self.more is None else (self.pixels, self.more)


def most_patches(recipe: Recipe, merge: int) -> int:
    """That a tower reads of one picture at most, whatever is asked for, ``merge`` × ``merge`` of them a token."""
    if recipe.kind in ("fit", "area", "fill"):
        tokens = (recipe.long // recipe.unit) ** 2 if recipe.kind == "fit" else recipe.most // recipe.unit**2
        return max(tokens, 1) * merge**2
    tile = recipe.size[0] * recipe.size[1]
    if recipe.kind == "slices":
        return (recipe.most + 1) * (5 * tile // (4 * recipe.unit**2))  # sides of slices are rounded
    tiles = {
        "anyres": max((rows * columns // tile for rows, columns in recipe.canvases), default=0),
        "tiles": max(recipe.most, MOST_TILES),
        "overlap": recipe.most,
        "framed": max((rows * columns // tile for rows, columns in recipe.canvases), default=1),
        "scan": recipe.most,
        "lined": recipe.most,
        "mined": recipe.most**2 - 1 + recipe.whole,
        "canvas": recipe.most - 1,
        "canvas_whole": recipe.most,
        "split": math.ceil(recipe.long / max(recipe.size[0], 1)) ** 2,
    }
    each = max(recipe.per_tile, (recipe.size[0] // recipe.unit) ** 2)  # of queries there are fewer than of patches
    high = 3 * (recipe.high // recipe.unit) ** 2  # the scores of its whole attention, one head at a time, lie beside
    if recipe.kind == "mined":
        high = 2 * (recipe.high // STEM) ** 2
    return (tiles.get(recipe.kind, 0) + 1) * each * merge**2 + high


def framed(size: tuple[int, int], frame: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """(height, width) to which a picture of ``size`` is resized to fit into ``frame``, and where it begins there: in
    the middle."""
    one = np.float32
    scale = min(one(frame[1]) / one(size[1]), one(frame[0]) / one(size[0]))
    height, width = (max(int(one(side) * scale), 1) for side in size)
    return (height, width), ((frame[0] - height) // 2, (frame[1] - width) // 2)


def unpadded(size: tuple[int, int], grid: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """(first, stop) of the rows and of the columns of ``grid`` that a picture of ``size`` covers in the middle, its
    sides' ratio kept."""
    (height, width), (rows, columns) = size, grid
    if width / height > columns / rows:
        cut = (rows - int(round(height * (columns / width), 7))) // 2
        return (cut, rows - cut), (0, columns)
    cut = (columns - int(round(width * (rows / height), 7))) // 2
    return (0, rows), (cut, columns - cut)


def shrunk(grid: tuple[int, int], side: int, most_tiles: int) -> tuple[int, int] | None:
    """Rows and columns that a grid becomes which is clearly more than ``most_tiles`` tiles of ``side``; else None."""
    rows, columns = grid
    if not most_tiles or (ratio := (rows * columns / (most_tiles * side**2)) ** 0.5) <= 1.1:
        return None
    return int(rows // ratio), int(columns // ratio)
