"""How a model sees, as data: the tower that turns pictures into rows, the projector that makes the language model's
input of them, and the recipe by which pictures are prepared.

A family file with ``Family.vision`` maps ``config.json`` and ``preprocessor_config.json`` to these. Canonical names of
parameters begin with ``vision.``; ``tensors`` lists them all. Every one of them stays as dense as it is stored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Shapes = dict[str, tuple[int, ...]]
PREFIX = "vision."  # of every canonical name


@dataclass(frozen=True)
class Tower:
    """A vision transformer over the square patches of a picture.

    ``layers``: how many it has, ``taken``: how many are run. ``frames``: a picture counts as so many equal frames.
    ``positions``: "learned" (added), "axial" or "interlaced" (rotary: half of the frequencies turn by the row, half by
    the column; "interlaced" takes them in turn from one list, "axial" gives each axis a list of its own). ``grid``:
    rows and columns of the learned positions; ``stretched``: besides those that turn there are learned ones, resized to
    the picture's patches and added, ``smooth``: by curves, not lines, the edges of patches over one another and not the
    middles of those in the corners. ``gated``: the MLP has a gate. ``class_token``: one more token stands before the
    patches; it is dropped behind the last layer. ``pre_norm``: norm before the first layer, ``norm_first``: before
    positions are added, ``post_norm``: one behind the last, "stored" if it is there and not used. ``scaled``: what a
    layer adds is weighted by a vector. ``window``: side in patches of the windows within which all layers attend but
    those of ``full``; 0 = none. ``tiles``: a picture is so many tiles at most, in one of the ``shapes`` (rows,
    columns), and each tile attends to all: learned vectors tell where it stands, and behind the last norm ``over_all``
    more layers follow, what they add weighted by one number; what left the layers ``gathered`` stands beside their
    output, number by number.
    """

    layers: int
    taken: int
    hidden: int
    heads: int
    head_dim: int
    inner: int
    patch: int
    activation: Literal["quick_gelu", "gelu", "gelu_tanh", "silu"]
    norm: Literal["rms", "layer"]
    eps: float
    positions: Literal["learned", "axial", "interlaced"]
    grid: tuple[int, int] = (0, 0)
    theta: float = 10_000.0
    frames: int = 1
    gated: bool = False
    patch_bias: bool = True
    qkv_bias: bool = True
    o_bias: bool = True
    mlp_bias: bool = True
    qk_norm: bool = False
    class_token: bool = False
    pre_norm: bool = False
    post_norm: Literal["none", "stored", "used"] = "none"
    scaled: bool = False
    window: int = 0
    full: tuple[int, ...] = ()
    stretched: bool = False
    smooth: bool = False
    norm_first: bool = False
    tiles: int = 0
    shapes: tuple[tuple[int, int], ...] = ()
    over_all: int = 0
    gathered: tuple[int, ...] = ()

    @property
    def outputs(self) -> int:
        """Numbers of a row that leaves it."""
        return self.hidden * (1 + len(self.gathered))


@dataclass(frozen=True)
class Stage:
    """One step of a projector, from rows to rows.

    "rms", "layer": a norm with ``eps``, ``offset`` added to its weight; "linear"; "matrix": a linear stored [inputs,
    outputs] under the bare name; "gated": silu(gate_proj(x)) · up_proj(x); "gelu", "gelu_tanh"; "merge": each
    ``factor`` × ``factor`` rows of the picture's grid become one, the numbers of one row after those of another;
    "merge_turned": so, but column after column; "merge_channels": as "merge", each number of a row beside that of its
    neighbours; "pool": their mean.
    """

    kind: Literal[
        "rms",
        "layer",
        "linear",
        "matrix",
        "gated",
        "gelu",
        "gelu_tanh",
        "merge",
        "merge_turned",
        "merge_channels",
        "pool",
    ]
    name: str = ""
    inputs: int = 0
    outputs: int = 0
    bias: bool = False
    eps: float = 0.0
    factor: int = 1
    offset: float = 0.0


@dataclass(frozen=True)
class Branch:
    """What leaves the tower behind layer ``layer``, and its way to rows."""

    layer: int
    projector: tuple[Stage, ...]


@dataclass(frozen=True)
class VisionSpec:
    """``image_token``: the id whose places in a prompt the rows take, in their order.

    ``join``: the rows of a picture of several tiles are those of the tiles, one after another ("tiles"); or the whole
    picture's, then those of the tiles put together as the picture they make, what pads it cut away, each line ended
    by the vector ``vision.newline`` ("anyres"); ``most_tiles``: above so many tiles (and a little) that picture is
    shrunk, 0 = never. ``axes``: a token of a picture has 3 positions, in time, rows and columns.
    ``deep``: more rows of each picture, of which those of branch i are added behind layer i of the language model
    (Meng et al., "DeepStack", 2024); they stand beside the others, number after number.
    ``mutual``: tokens of pictures that stand together see each other, those behind them too. ``crossed``: a picture
    takes one place, and its rows none; cross layers read them for the tokens from there to the next picture, of
    pictures side by side the rows of all. ``language``: the family of the language model inside.
    """

    tower: Tower
    projector: tuple[Stage, ...]
    image_token: int
    join: Literal["tiles", "anyres"] = "tiles"
    most_tiles: int = 0
    axes: bool = False
    deep: tuple[Branch, ...] = ()
    mutual: bool = False
    crossed: bool = False
    language: str = ""

    @property
    def together(self) -> int:
        """Tokens that see each other both ways, 0 where none do."""
        rows, columns = self.tower.grid
        return (rows // self.merge) * (columns // self.merge) if self.mutual else 0

    @property
    def merge(self) -> int:
        """Side in patches of what becomes one row."""
        return max((s.factor for s in self.projector), default=1)


@dataclass(frozen=True)
class Recipe:
    """How a picture is prepared, and what a prompt says where it stands.

    ``kind``: "square" (to ``size``, its sides' ratio be what it may), "crop" (the short side to ``short``, then the
    middle ``size``; ``pad``: made square first), "boxed" (the long side to ``size``, the short one at least ``least``,
    then made square), "canvas" (the one of ``canvases``, of up to ``most`` tiles, that it fits into with the least
    change, black where it does not reach), "scan" (to ``size``; where one side is ``steep`` times the other at least it
    is also cut across that one into up to ``most`` parts, no side of them below ``least``), "anyres" (the canvas of
    ``canvases`` that holds most of it, cut into tiles of ``size``, and the whole), "tiles" (the grid of ``least`` to
    ``most`` tiles nearest in ratio, and the whole behind them), "split" (the long side to ``long``, cut into tiles of
    ``size``, and the whole behind), "fit" (the long side to at most ``long``, both to multiples of ``unit``), "area"
    (both to multiples of ``unit``, ``least`` to ``most`` pixels in all; one with a side below ``short`` is enlarged
    first). Sizes are (height, width). ``unit``: pixels along a side of what one token tells. ``resample``: Pillow's
    number of the filter. Numbers are ``(value / 255 - mean) / std``.

    ``mark``: what stands for a picture in what a chat template has written; ``written``: what is written for one where
    the template writes none; ``token``: what the rows take the place of. ``spelled``: how a mark is spelled: "plain"
    (all tokens, between ``before`` and ``after``), "lines" (line by line, ``before`` between and ``after`` behind) or
    "split" (tile by tile, each named and begun by ``before``, the whole picture as ``after``) or "scan" (as "plain",
    the parts behind the whole, with words between) or "named" (tile by tile, numbered). ``per_tile``: tokens a tile, of
    kinds that have tiles; ``most_tiles``: as in ``VisionSpec``.
    """

    kind: Literal["square", "crop", "boxed", "canvas", "scan", "anyres", "tiles", "split", "fit", "area"]
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
    spelled: Literal["plain", "lines", "split", "scan", "named"] = "plain"
    mark: str = "<image>"
    written: str = "<image>\n"
    token: str = "<image>"
    before: str = ""
    after: str = ""


@dataclass(frozen=True)
class Picture:
    """A picture prepared for a tower, as a request carries it.

    ``pixels``: float32 [tiles, 3, height, width]. ``grid``: rows and columns of tiles (but for the whole picture's),
    of a single tile those of its tokens. ``size``: (height, width) before. ``tokens``: how many rows it becomes.
    ``digest``: of all that.
    """

    pixels: NDArray[np.float32] = field(repr=False)
    grid: tuple[int, int]
    size: tuple[int, int]
    tokens: int
    digest: bytes


def tensors(spec: VisionSpec) -> Shapes:
    """Every parameter by its canonical name, with its shape as the tower works with it."""
    tower = spec.tower
    found: Shapes = {}
    patch = 3 * tower.frames * tower.patch**2
    _linear(found, "vision.patch", patch, tower.hidden, tower.patch_bias)
    if tower.class_token:
        found["vision.class"] = (tower.hidden,)
    if tower.positions == "learned" or tower.stretched:
        found["vision.position"] = (tower.grid[0] * tower.grid[1] + tower.class_token, tower.hidden)
    if tower.tiles:
        _tiles(found, tower)
    if tower.pre_norm:
        _norm(found, "vision.pre_norm", tower)
    for i in range(tower.layers):
        _layer(found, f"vision.layers.{i}", tower)
    if tower.post_norm != "none":
        _norm(found, "vision.post_norm", tower)
    for stage in (*spec.projector, *(stage for branch in spec.deep for stage in branch.projector)):
        if stage.kind == "linear":
            _linear(found, stage.name, stage.inputs, stage.outputs, stage.bias)
        elif stage.kind == "gated":
            for part in ("up_proj", "gate_proj"):
                _linear(found, f"{stage.name}.{part}", stage.inputs, stage.outputs, stage.bias)
        elif stage.kind == "matrix":
            found[stage.name] = (stage.inputs, stage.outputs)
        elif stage.kind in ("rms", "layer"):
            found[f"{stage.name}.weight"] = (stage.inputs,)
            if stage.kind == "layer":
                found[f"{stage.name}.bias"] = (stage.inputs,)
    if spec.join == "anyres":
        found["vision.newline"] = (spec.projector[-1].outputs,)
    return found


def _tiles(found: Shapes, tower: Tower) -> None:
    places = tower.grid[0] * tower.grid[1] + tower.class_token
    found["vision.position_gate"] = (1,)
    found["vision.tile_position"] = (len(tower.shapes) + 1, tower.tiles * places * tower.hidden)
    for name in ("vision.tile_before", "vision.tile_after"):
        found[name] = (len(tower.shapes) + 1, tower.tiles * tower.hidden)
        found[f"{name}_gate"] = (1,)
    for i in range(tower.over_all):
        _layer(found, f"vision.over_all.{i}", tower)
        found |= {f"vision.over_all.{i}.gate{k}": (1,) for k in (1, 2)}


def sizes(spec: VisionSpec) -> dict[str, int]:
    """How many numbers each parameter has that the tower cannot do without."""
    unused = "vision.post_norm." if spec.tower.post_norm == "stored" else "-"
    return {name: math.prod(shape) for name, shape in tensors(spec).items() if not name.startswith(unused)}


def _layer(found: Shapes, name: str, tower: Tower) -> None:
    width = tower.heads * tower.head_dim
    _norm(found, f"{name}.norm1", tower)
    for part in ("q", "k", "v"):
        _linear(found, f"{name}.{part}", tower.hidden, width, tower.qkv_bias)
    if tower.qk_norm:
        found |= {f"{name}.{part}_norm.weight": (width,) for part in ("q", "k")}
    _linear(found, f"{name}.o", width, tower.hidden, tower.o_bias)
    _norm(found, f"{name}.norm2", tower)
    for part in ("gate", "up") if tower.gated else ("up",):
        _linear(found, f"{name}.{part}", tower.hidden, tower.inner, tower.mlp_bias)
    _linear(found, f"{name}.down", tower.inner, tower.hidden, tower.mlp_bias)
    if tower.scaled:
        found |= {f"{name}.scale{k}": (tower.hidden,) for k in (1, 2)}


def _linear(found: Shapes, name: str, inputs: int, outputs: int, bias: bool) -> None:
    found[f"{name}.weight"] = (outputs, inputs)
    if bias:
        found[f"{name}.bias"] = (outputs,)


def _norm(found: Shapes, name: str, tower: Tower) -> None:
    found[f"{name}.weight"] = (tower.hidden,)
    if tower.norm == "layer":
        found[f"{name}.bias"] = (tower.hidden,)


def most_patches(recipe: Recipe, merge: int) -> int:
    """That a tower reads of one picture, at most, ``merge`` × ``merge`` of them a token."""
    if recipe.kind in ("fit", "area"):
        tokens = (recipe.long // recipe.unit) ** 2 if recipe.kind == "fit" else recipe.most // recipe.unit**2
        return max(tokens, 1) * merge**2
    tile = recipe.size[0] * recipe.size[1]
    tiles = {
        "anyres": max((rows * columns // tile for rows, columns in recipe.canvases), default=0),
        "tiles": recipe.most,
        "scan": recipe.most,
        "canvas": recipe.most - 1,
        "split": math.ceil(recipe.long / max(recipe.size[0], 1)) ** 2,
    }
    return (tiles.get(recipe.kind, 0) + 1) * recipe.per_tile * merge**2


def patch_numbers(spec: VisionSpec) -> int:
    """Held for each patch at the widest moment of a layer."""
    tower = spec.tower
    inside = max(4 * tower.heads * tower.head_dim, tower.inner * (1 + tower.gated))
    return 3 * tower.frames * tower.patch**2 + 2 * tower.hidden + inside


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
