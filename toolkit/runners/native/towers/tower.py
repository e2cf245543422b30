"""What a model sees with, on the native library: products, norms and attention are its own, numpy puts rows in order
between them. ``encoders.py`` says which class runs a tower.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.models.eyes.patches import Places, nearest, patch_grid, resized, sines, turns, windows
from toolkit.models.eyes.pictures import Picture, shrunk, unpadded
from toolkit.models.eyes.vision import MERGES, Stage, VisionSpec, tensors
from toolkit.models.routed import routed_tensors
from toolkit.runners.base import RunnerError
from toolkit.runners.native import library
from toolkit.runners.native.mixers import flat
from toolkit.runners.native.packing.packed import LANES, Floats, PackedWeights, floats
from toolkit.runners.native.tensors import Record, Tensors
from toolkit.runners.native.towers.tower_records import layer, norm, norm_of, parts_of, product, projected

_ORDERS = {*MERGES, "pool", "standard"}  # stages that numpy does
_PARTED = {"resample", "attend", "mine"}  # those that are several of the library's, rows put in order between them


def uncovered(vision: VisionSpec) -> str | None:
    """Why the library does not run what the model sees with, or None."""
    if vision.high is not None and vision.high.hidden % LANES:
        return f"the second tower has {vision.high.hidden} numbers a patch, no multiple of {LANES}"
    return None


def _ways(vision: VisionSpec) -> list[tuple[str, tuple[Stage, ...]]]:
    """The stages behind the tower, under the names of their records: those of tiles, of deep branches, and those that
    read the rows of whole pictures."""
    deep = [(f"deep{i}", branch.projector) for i, branch in enumerate(vision.deep)]
    return [("projector", vision.inside), *deep, ("whole", vision.behind)]


def matrices(vision: VisionSpec) -> dict[str, tuple[int, int]]:
    """Names and shapes of what it multiplies by, the tower's none where ``uncovered``; and of linears that tokens of
    pictures have."""
    tower = {} if uncovered(vision) else tensors(replace(vision, routed=()))
    shapes = {name: s for name, s in tower.items() if name.endswith(".weight")} | routed_tensors(vision.routed)
    mixing = {name: s for name, s in shapes.items() if len(s) > 1 and s[1] > 1}  # not channels by themselves
    return {name: (s[0], math.prod(s[1:])) for name, s in mixing.items()}


class NativeEncoder:
    """Pictures in, rows for the language model out. ``bf16``: products of bfloat16 where the processor has them."""

    def __init__(self, vision: VisionSpec, weights: PackedWeights, *, bf16: bool, threads: int) -> None:
        self.vision, self.tower = vision, vision.tower
        self._weights = weights
        self._library = library.load(library.library_path())
        tensors_of = Tensors(weights)
        self._at: dict[str, int] = {}
        self._widths: list[tuple[int, int]] = []
        record = {"bfloat16": bf16, "stages": [*self._stages(tensors_of)]}
        names, values = zip(*flat(record), strict=True)
        self.held = tensors_of.found  # which the library points into
        self._model = library.create(self._library.tk_tower_create, names, values, self.held, threads)
        if not self._model:
            raise RunnerError(f"the tower cannot be made: {library.error(self._library)}")

    def close(self) -> None:
        """Free what the library holds; does nothing the second time."""
        if self._model:
            self._library.tk_tower_free(self._model)
        self._model = None

    # -- the program

    def _stages(self, t: Tensors) -> Iterator[Record]:
        tower = self.tower
        patch = 3 * tower.frames * tower.patch**2
        if tower.patch_norm:
            made = norm_of(t, "vision.patch_norm", patch, tower.norm == "layer", tower.eps)
            yield self._stage("patch_norm", patch, patch, norm=made)
        yield self._stage("patch", patch, tower.hidden, product=product(t, "vision.patch", tower.patch_bias))
        if tower.pre_norm:
            yield self._stage("pre_norm", tower.hidden, tower.hidden, norm=norm(t, "vision.pre_norm", tower))
        for i in range(tower.taken):
            near = bool(tower.window) and i not in tower.full
            made = layer(t, tower, f"vision.layers.{i}", near)
            yield self._stage(f"layer{i}", tower.hidden, tower.hidden, layer=made)
        if tower.post_norm == "used":
            yield self._stage("post_norm", tower.hidden, tower.hidden, norm=norm(t, "vision.post_norm", tower))
        for i in range(tower.over_all):
            made = layer(t, tower, f"vision.over_all.{i}")
            yield self._stage(f"over_all{i}", tower.hidden, tower.hidden, layer=made)
        width = tower.outputs
        for way, stages in sorted(_ways(self.vision), key=lambda entry: entry[0].startswith("deep")):
            width = tower.hidden if way.startswith("deep") else width  # whole pictures' are those of the projector
            for i, stage in enumerate(stages):
                name = f"{way}.{i}"
                if stage.kind in _ORDERS:
                    width = width * (1 if stage.kind in ("pool", "standard") else stage.factor**2)
                    continue
                outputs = stage.outputs or width
                if stage.kind in _PARTED:
                    for part, (inputs, wide, record) in parts_of(t, stage).items():
                        yield self._stage(f"{name}.{part}", inputs, wide, **record)
                elif stage.kind == "beside":
                    yield self._stage(name, stage.inputs, outputs, product=product(t, stage.name, stage.bias))
                    outputs += width
                else:
                    yield self._stage(name, width, outputs, **projected(t, stage, width))
                width = outputs

    def _stage(self, name: str, inputs: int, outputs: int, **what: Any) -> Record:
        self._at[name] = len(self._widths)
        self._widths.append((inputs, outputs))
        return {"inputs": inputs, "outputs": outputs, **what}

    def _run(
        self,
        first: int,
        last: int,
        x: Floats,
        divisions: Sequence[Sequence[int]] = ((), ()),
        turned: tuple[Floats, Floats] | None = None,
        real: int | None = None,
        blank: NDArray[np.bool_] | None = None,
        across: int = 0,
    ) -> Floats:
        """Stages ``first`` to ``last`` of the rows ``x``. ``real``: where they are one segment, how many of them stand
        for something; ``blank``: which are zeros to attention; ``across``: columns of the grid that they are."""
        x = np.ascontiguousarray(x, np.float32)
        out = np.empty((len(x), self._widths[last][1]), np.float32)
        lengths = [np.asarray(d, np.int64) for d in divisions]
        angles = (None, None) if turned is None else tuple(np.ascontiguousarray(a, np.float32) for a in turned)
        arrays = library.TowerArrays(
            first, last + 1, len(x), x.shape[1], out.shape[1], library.address(x), library.address(out)
        )
        for i, length in enumerate(lengths):
            arrays.segments[i], arrays.lengths[i] = length.size, library.address(length)
        arrays.cos, arrays.sin = (library.address(a) for a in angles)
        sees = None if real is None else np.asarray([real], np.int64)
        arrays.real, arrays.blank, arrays.across = library.address(sees), library.address(blank), across
        if self._library.tk_tower_run(self._model, ctypes.byref(arrays)):
            raise RunnerError(library.error(self._library))
        return out

    # -- pictures

    def encode(self, pictures: Sequence[Picture]) -> list[Floats]:
        """The rows of each picture, [tokens, hidden of the language model], those of deep branches beside them."""
        parts = [part for picture in pictures for part in self._parts(picture)]
        places = [patch_grid(part, self.tower.patch) for part in parts for _ in part]
        numbers = np.concatenate([self._patches(part) for part in parts])
        x = self._placed(self._run(0, self._at["patch"], numbers), places)
        outputs = zip(_ways(self.vision), self._layers(x, places), strict=False)
        made = [self._rows(way, stages, x, places, pictures) for (way, stages), x in outputs]
        return [np.concatenate(rows, 1) for rows in zip(*made, strict=True)]

    def _parts(self, picture: Picture) -> tuple[Floats, ...]:
        """The tiles that the tower reads."""
        return picture.parts

    def _told(self, x: Floats, places: Places, pictures: Sequence[Picture]) -> Floats:
        """Rows of patches with what is learned of where they stand in the picture."""
        return x

    def _beside(self, pictures: Sequence[Picture]) -> Any:
        """What another tower gives, for the stage that reads it."""
        return None

    def _rows(
        self, way: str, stages: Sequence[Stage], x: Floats, places: Places, pictures: Sequence[Picture]
    ) -> list[Floats]:
        """What ``stages`` make of the rows ``x`` of all patches, by picture."""
        if self.tower.class_token:
            starts = np.cumsum([0, *(rows * columns + 1 for rows, columns in places[:-1])])
            x = np.delete(x, starts, 0)
        x = self._told(x, places, pictures)
        x, places = self._project(way, stages, x, places, self._beside(pictures))
        ends = np.cumsum([rows * columns for rows, columns in places])
        tiles = iter(np.split(x, ends[:-1]))
        return [self._whole([next(tiles) for part in self._parts(p) for _ in part], p) for p in pictures]

    def _patches(self, part: Floats) -> Floats:
        """[tiles, 3 or 3 x frames, height, width] to [all patches, numbers of one]."""
        size, frames = self.tower.patch, self.tower.frames
        rows, columns = patch_grid(part, size)
        pixels = part[:, :, : rows * size, : columns * size]
        order = (0, 2, 4, 3, 5, 1) if self.tower.patch_last else (0, 2, 4, 1, 3, 5)
        pixels = np.repeat(pixels, 3 * frames // part.shape[1], 1)
        x = pixels.reshape(len(pixels), -1, rows, size, columns, size).transpose(order)
        return x.reshape(len(pixels) * rows * columns, -1)

    def _placed(self, x: Floats, places: Places) -> Floats:
        """Rows of patches with the class token before each tile's, what stands for their places added."""
        tower = self.tower
        if tower.class_token:
            starts = np.cumsum([0, *(rows * columns for rows, columns in places[:-1])])
            x = np.insert(x, starts, floats(self._weights["vision.class"]), 0)
        if tower.norm_first:
            x = self._run(self._at["pre_norm"], self._at["pre_norm"], x)
        if tower.positions == "learned" and not (tower.stretched or tower.sides):
            learned = floats(self._weights["vision.position"]).reshape(-1, tower.hidden)
            x = x + np.concatenate([learned[self._learned(grid)] for grid in places])
        if tower.sides:
            of_column, of_row = floats(self._weights["vision.position"]).reshape(2, tower.sides, tower.hidden)
            near = {(rows, columns): of_row[:rows, None] + of_column[:columns] for rows, columns in set(places)}
            x = x + np.concatenate([near[grid].reshape(-1, tower.hidden) for grid in places])
        if tower.stretched:
            stored = floats(self._weights["vision.position"]).reshape(*tower.grid, tower.hidden)
            near = {grid: resized(stored, grid, tower.smooth, not tower.edges) for grid in set(places)}
            x = x + np.concatenate([near[grid].reshape(-1, tower.hidden) for grid in places])
        return x

    def _learned(self, grid: tuple[int, int]) -> NDArray[np.int64]:
        """Which of the learned positions the tokens of a tile have."""
        tower, first = self.tower, int(self.tower.class_token)
        if not tower.nearest:
            return np.arange(tower.grid[0] * tower.grid[1] + first)
        return np.concatenate([np.arange(first), nearest(grid, tower.grid) + first])

    def _layers(self, x: Floats, places: Places) -> list[Floats]:
        """What leaves the tower, that of deep branches last."""
        tower = self.tower
        whole = [rows * columns + tower.class_token for rows, columns in places]
        turned, near = turns(tower, places), whole
        order: Any = slice(None)
        if tower.window:
            order, near = windows(places, tower.window)
            x = x[order]
            turned = None if turned is None else (turned[0][order], turned[1][order])
        first = self._at["patch"] + 1 + (tower.pre_norm and tower.norm_first)
        last = self._at["patch"] + tower.pre_norm + tower.taken + (tower.post_norm == "used")
        deep, found = [branch.layer for branch in self.vision.deep], dict[int, Floats]()
        for i in sorted({*deep, *tower.also}):
            x = self._run(first, self._at[f"layer{i}"], x, (whole, near), turned)
            found[i], first = x, self._at[f"layer{i}"] + 1
        x = self._run(first, last, x, (whole, near), turned) if first <= last else x
        outputs = [np.concatenate([x, *(found[i] for i in tower.also)], 1), *(found[i] for i in deep)]
        back = np.argsort(order) if tower.window else slice(None)
        return [rows[back] for rows in outputs]

    def _project(
        self, way: str, stages: Sequence[Stage], x: Floats, places: Places, beside: Any = None
    ) -> tuple[Floats, Places]:
        """Rows of all tiles behind ``stages``, and each tile's rows and columns of them."""
        for ours, run in groupby(enumerate(stages), key=lambda entry: entry[1].kind in {*_ORDERS, *_PARTED, "beside"}):
            group = [*run]
            if not ours:
                x = self._run(self._at[f"{way}.{group[0][0]}"], self._at[f"{way}.{group[-1][0]}"], x)
                continue
            for i, stage in group:
                at = f"{way}.{i}"
                if stage.kind == "resample":
                    x, places = self._resampled(at, x, places, stage)
                elif stage.kind == "attend":
                    x, places = self._attended(at, x, places, stage)
                elif stage.kind == "mine":
                    x = self._mined(at, x, beside, stage)
                elif stage.kind == "standard":
                    shift, scale = (floats(self._weights[f"{stage.name}.{part}"]) for part in ("bias", "scale"))
                    x = (x * np.float32(stage.inputs**0.5) - shift) * scale
                elif stage.kind == "beside":
                    x = np.concatenate([self._run(self._at[at], self._at[at], beside), x], 1)
                else:
                    x, places = _merged(x, places, stage)
        return x, places

    def _mined(self, at: str, x: Floats, beside: Iterable[Floats], stage: Stage) -> Floats:
        """What each row finds in its own cells, added. ``beside``: those of some rows after the other."""

        def run(part: str, rows: Floats) -> Floats:
            return self._run(self._at[f"{at}.{part}_norm"], self._at[f"{at}.{part}"], rows)

        q, found, first = run("query", x), list[Floats](), 0
        for cells in beside:
            flat = cells.reshape(-1, stage.rows)
            k, v = (run(part, flat).reshape(*cells.shape[:2], 1, -1) for part in ("aux", "val"))
            found.append(_asked(q[first : first + len(cells), None], k, v))
            first += len(cells)
        return x + np.concatenate(found)

    def _attended(self, at: str, x: Floats, places: Places, stage: Stage) -> tuple[Floats, Places]:
        """What the means of neighbouring rows find in those."""
        near, places = _merged(x, places, replace(stage, kind="merge"))
        near = near.reshape(len(near), stage.factor**2, -1)  # token, neighbours, numbers

        def run(part: str, rows: Floats) -> Floats:
            return self._run(self._at[f"{at}.{part}"], self._at[f"{at}.{part}"], rows)

        q = run("q", near.mean(1)).reshape(len(near), stage.heads, -1)
        k, v = (run(of, near.reshape(-1, near.shape[2])).reshape(*near.shape[:2], stage.heads, -1) for of in "kv")
        return run("o", _asked(q, k, v)), places

    def _resampled(self, at: str, x: Floats, places: Places, stage: Stage) -> tuple[Floats, Places]:
        """What learned queries find in the rows of each tile."""

        def run(first: str, last: str, x: Floats) -> Floats:
            return self._run(self._at[f"{at}.{first}"], self._at[f"{at}.{last}"], x)

        rows, wide = stage.rows, stage.outputs
        x = run("kv_proj", "ln_kv", x)
        asked = run("ln_q", "ln_q", floats(self._weights[f"{stage.name}.query"]).reshape(rows, wide))
        if stage.placed:
            learned = floats(self._weights[f"{stage.name}.pos_embed"]).reshape(rows, wide)
            side = round(rows**0.5)
            stored = learned.reshape(side, side, wide)
            near = {grid: resized(stored, grid, smooth=True).reshape(-1, wide) for grid in set(places)}
            asked = asked + learned
        else:
            near = {grid: sines(*grid, wide) for grid in set(places)}
        q, ends = run("q", "q", asked), np.cumsum([rows * columns for rows, columns in places])[:-1]
        keys = np.split(run("k", "k", x + np.concatenate([near[grid] for grid in places])), ends)
        found = [_found(q, k, v, stage.heads) for k, v in zip(keys, np.split(run("v", "v", x), ends), strict=True)]
        return run("o", "proj", np.concatenate(found)), [(rows, 1)] * len(places)

    def _whole(self, tiles: list[Floats], picture: Picture) -> Floats:
        """The rows of a picture's tiles as those of the picture."""
        joined = self._joined(tiles, picture)
        joined, _ = self._project("whole", self.vision.behind, joined, [(len(joined), 1)])
        if self.vision.ends:
            begin, end = (floats(self._weights[f"vision.{name}"])[None] for name in ("begin", "end"))
            joined = np.concatenate([begin, joined, end])
        return joined if self.vision.scale == 1.0 else joined * np.float32(self.vision.scale)

    def _joined(self, tiles: list[Floats], picture: Picture) -> Floats:
        if self.vision.join == "tiles":
            return np.concatenate(tiles)
        newline = floats(self._weights["vision.newline"])[None]
        if picture.frame is not None and (shape := picture.frame.pooled):
            pooled = resized(_grid(tiles, (1, 1)), shape).reshape(-1, newline.shape[1])
            return np.concatenate([pooled, newline]) if picture.tokens > len(pooled) else pooled
        if self.vision.join == "lined":
            parts = [
                _lined(_grid(part, grid), newline) for part, grid in ((tiles[:1], (1, 1)), (tiles[1:], picture.grid))
            ]
            first, last = parts if self.vision.whole_first else parts[::-1]
            return np.concatenate([first, floats(self._weights["vision.separator"])[None], last])
        if len(tiles) == 1:
            return np.concatenate([tiles[0], newline])
        grid = _grid(tiles[1:], picture.grid)
        (top, bottom), (left, right) = unpadded(picture.size, (grid.shape[0], grid.shape[1]))
        lines = grid[top:bottom, left:right]
        if shape := shrunk((lines.shape[0], lines.shape[1]), round(len(tiles[0]) ** 0.5), self.vision.most_tiles):
            lines = resized(lines, shape)
        return np.concatenate([tiles[0], _lined(lines, newline)])


def _grid(tiles: list[Floats], grid: tuple[int, int]) -> Floats:
    """Square tiles side by side, [rows, columns, numbers]."""
    (down, across), side, width = grid, round(len(tiles[0]) ** 0.5), tiles[0].shape[1]
    found = np.concatenate(tiles).reshape(down, across, side, side, width).transpose(0, 2, 1, 3, 4)
    return found.reshape(down * side, across * side, width)


def _lined(grid: Floats, newline: Floats) -> Floats:
    """Its lines one after another, ``newline`` behind each."""
    width = grid.shape[2]
    return np.concatenate([grid, np.broadcast_to(newline, (len(grid), 1, width))], 1).reshape(-1, width)


def _found(q: Floats, k: Floats, v: Floats, heads: int) -> Floats:
    """What the rows ``q`` find in ``v`` by its keys ``k``."""
    q, k, v = (x.reshape(len(x), heads, -1).transpose(1, 0, 2) for x in (q, k, v))
    scores = q @ k.transpose(0, 2, 1) * np.float32(q.shape[2] ** -0.5)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    found = (weights / weights.sum(-1, keepdims=True)) @ v
    return found.transpose(1, 0, 2).reshape(q.shape[1], -1)


def _asked(q: Floats, k: Floats, v: Floats) -> Floats:
    """What each row [heads, numbers] finds in rows of its own, [rows, those, heads, numbers]; heads side by side."""
    scores = np.einsum("thd,tchd->tch", q, k) * np.float32(q.shape[2] ** -0.5)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return np.einsum("tch,tchd->thd", weights / weights.sum(1, keepdims=True), v).reshape(len(q), -1)


def _merged(x: Floats, places: Places, stage: Stage) -> tuple[Floats, Places]:
    """Rows of all tiles, each factor × factor of a tile's grid made one."""
    f, at, found = stage.factor, 0, []
    for rows, columns in places:
        grid = x[at : at + rows * columns].reshape(rows, columns, -1)
        at += rows * columns
        grid = np.pad(grid, ((0, -rows % f), (0, -columns % f), (0, 0)))  # zeros below and to the right
        blocks = grid.reshape(1, -(-rows // f), f, -(-columns // f), f, -1)
        made = blocks.mean((2, 4)) if stage.kind == "pool" else blocks.transpose(MERGES[stage.kind])
        found.append(made.reshape(blocks.shape[1] * blocks.shape[3], -1))
    return np.concatenate(found), [(-(-rows // f), -(-columns // f)) for rows, columns in places]
