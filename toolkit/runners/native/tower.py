"""What a model sees with, on the native library: products, norms and attention are its own, numpy puts rows in order
between them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.models.patches import Places, patch_grid, resized, turns, windows
from toolkit.models.pictures import Picture, shrunk, unpadded
from toolkit.models.vision import MERGES, Stage, Tower, VisionSpec, tensors
from toolkit.runners.base import RunnerError
from toolkit.runners.native import library
from toolkit.runners.native.mixers import ACTIVATIONS, Record, Tensors, flat
from toolkit.runners.native.packed import BF16, F16, PackedTensor, PackedWeights

Floats = NDArray[np.float32]
_ACTIVATIONS = ACTIVATIONS | {"quick_gelu": 7}
_ORDERS = {*MERGES, "pool"}  # stages that numpy does
_STAGES = {*_ORDERS, "rms", "layer", "linear", "gated", "gelu", "gelu_tanh"}


def uncovered(vision: VisionSpec) -> str | None:
    """Why the library does not run what the model sees with, or None."""
    tower = vision.tower
    if tower.tiles or tower.norm_after or tower.nearest:
        return "it knows no such tower"
    if vision.high is not None or vision.overlap or vision.join == "lined":
        return "pictures are put together from several towers, overlapping tiles or lines"
    if odd := {stage.kind for _, stages in _ways(vision) for stage in stages} - _STAGES:
        return f"its projectors have no stage {min(odd)}"
    return None


def _ways(vision: VisionSpec) -> list[tuple[str, tuple[Stage, ...]]]:
    """The stages behind the tower, under the names of their records; those of deep branches last."""
    return [("projector", vision.projector), *((f"deep{i}", branch.projector) for i, branch in enumerate(vision.deep))]


def matrices(vision: VisionSpec) -> dict[str, tuple[int, int]]:
    """Names and shapes of what it multiplies by; none where ``uncovered``."""
    if uncovered(vision):
        return {}
    shapes = tensors(vision).items()
    return {name: (s[0], s[1]) for name, s in shapes if name.endswith(".weight") and len(s) == 2}


def floats(tensor: PackedTensor) -> Floats:
    """The numbers of a vector, whatever type they are stored in."""
    dtype, data = tensor.meta.dtype, tensor.data
    if dtype == BF16:
        wide = (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        wide = data.view(np.float16 if dtype == F16 else np.float32).astype(np.float32)
    return wide[: tensor.meta.rows]


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
        numbers = np.asarray(values, np.float64)
        self._model = self._library.tk_tower_create(
            "".join(f"{name}\n" for name in names).encode(),
            numbers.ctypes.data,
            numbers.size,
            library.tensor_records(tensors_of.found),
            len(tensors_of.found),
            library.wanted_isa().encode(),
            threads,
        )
        if not self._model:
            raise RunnerError(f"the tower cannot be made: {library.error(self._library)}")
        self.held = tensors_of.found  # which the library points into

    def close(self) -> None:
        """Free what the library holds; does nothing the second time."""
        if self._model:
            self._library.tk_tower_free(self._model)
        self._model = None

    # -- the program

    def _stages(self, t: Tensors) -> Iterator[Record]:
        tower = self.tower
        patch = 3 * tower.frames * tower.patch**2
        yield self._stage("patch", patch, tower.hidden, product=_product(t, "vision.patch", tower.patch_bias))
        if tower.pre_norm:
            yield self._stage("pre_norm", tower.hidden, tower.hidden, norm=_norm(t, "vision.pre_norm", tower))
        for i in range(tower.taken):
            yield self._stage(f"layer{i}", tower.hidden, tower.hidden, layer=_layer(t, tower, i))
        if tower.post_norm == "used":
            yield self._stage("post_norm", tower.hidden, tower.hidden, norm=_norm(t, "vision.post_norm", tower))
        for way, stages in _ways(self.vision):
            width = tower.outputs if way == "projector" else tower.hidden
            for i, stage in enumerate(stages):
                if stage.kind in _ORDERS:
                    width = width * (1 if stage.kind == "pool" else stage.factor**2)
                    continue
                outputs = stage.outputs or width
                yield self._stage(f"{way}.{i}", width, outputs, **_projected(t, stage, width))
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
    ) -> Floats:
        """Stages ``first`` to ``last`` of the rows ``x``."""
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
        if self._library.tk_tower_run(self._model, ctypes.byref(arrays)):
            raise RunnerError(library.error(self._library))
        return out

    # -- pictures

    def encode(self, pictures: Sequence[Picture]) -> list[Floats]:
        """The rows of each picture, [tokens, hidden of the language model], those of deep branches beside them."""
        parts = [part for picture in pictures for part in picture.parts]
        places = [patch_grid(part, self.tower.patch) for part in parts for _ in part]
        x = self._placed(self._run(0, 0, np.concatenate([self._patches(part) for part in parts])), places)
        outputs = zip(_ways(self.vision), self._layers(x, places), strict=True)
        made = [self._rows(way, stages, x, places, pictures) for (way, stages), x in outputs]
        return [np.concatenate(rows, 1) for rows in zip(*made, strict=True)]

    def _rows(
        self, way: str, stages: Sequence[Stage], x: Floats, places: Places, pictures: Sequence[Picture]
    ) -> list[Floats]:
        """What ``stages`` make of the rows ``x`` of all patches, by picture."""
        if self.tower.class_token:
            starts = np.cumsum([0, *(rows * columns + 1 for rows, columns in places[:-1])])
            x = np.delete(x, starts, 0)
        x, places = self._project(way, stages, x, places)
        ends = np.cumsum([rows * columns for rows, columns in places])
        tiles = iter(np.split(x, ends[:-1]))
        return [self._whole([next(tiles) for part in p.parts for _ in part], p) for p in pictures]

    def _patches(self, part: Floats) -> Floats:
        """[tiles, 3, height, width] to [all patches, numbers of one]."""
        size, frames = self.tower.patch, self.tower.frames
        rows, columns = patch_grid(part, size)
        pixels = part[:, :, : rows * size, : columns * size]
        order = (0, 2, 4, 3, 5, 1) if self.tower.patch_last else (0, 2, 4, 1, 3, 5)
        x = pixels.reshape(-1, 3, rows, size, columns, size).transpose(order)
        if frames > 1:
            x = np.repeat(x[:, :, :, :, None], frames, 4)
        return x.reshape(len(pixels) * rows * columns, -1)

    def _placed(self, x: Floats, places: Places) -> Floats:
        """Rows of patches with the class token before each tile's, what stands for their places added."""
        tower = self.tower
        if tower.class_token:
            starts = np.cumsum([0, *(rows * columns for rows, columns in places[:-1])])
            x = np.insert(x, starts, floats(self._weights["vision.class"]), 0)
        if tower.norm_first:
            x = self._run(self._at["pre_norm"], self._at["pre_norm"], x)
        if tower.positions == "learned":
            learned = floats(self._weights["vision.position"]).reshape(-1, tower.hidden)
            x = (x.reshape(len(places), *learned.shape) + learned).reshape(x.shape)
        if tower.stretched:
            stored = floats(self._weights["vision.position"]).reshape(*tower.grid, tower.hidden)
            near = {grid: resized(stored, grid, tower.smooth, not tower.smooth) for grid in set(places)}
            x = x + np.concatenate([near[grid].reshape(-1, tower.hidden) for grid in places])
        return x

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
        first = self._at["pre_norm"] if tower.pre_norm and not tower.norm_first else self._at["layer0"]
        last = self._at.get("post_norm", self._at[f"layer{tower.taken - 1}"])
        deep, found = [branch.layer for branch in self.vision.deep], dict[int, Floats]()
        for layer in sorted({*deep, *tower.also}):
            x = self._run(first, self._at[f"layer{layer}"], x, (whole, near), turned)
            found[layer], first = x, self._at[f"layer{layer}"] + 1
        x = self._run(first, last, x, (whole, near), turned) if first <= last else x
        outputs = [np.concatenate([x, *(found[layer] for layer in tower.also)], 1), *(found[layer] for layer in deep)]
        back = np.argsort(order) if tower.window else slice(None)
        return [rows[back] for rows in outputs]

    def _project(self, way: str, stages: Sequence[Stage], x: Floats, places: Places) -> tuple[Floats, Places]:
        """Rows of all tiles behind ``stages``, and each tile's rows and columns of them."""
        for ordered, run in groupby(enumerate(stages), key=lambda entry: entry[1].kind in _ORDERS):
            group = [*run]
            if not ordered:
                x = self._run(self._at[f"{way}.{group[0][0]}"], self._at[f"{way}.{group[-1][0]}"], x)
                continue
            for _, stage in group:
                x, places = _merged(x, places, stage)
        return x, places

    def _whole(self, tiles: list[Floats], picture: Picture) -> Floats:
        """The rows of a picture's tiles as those of the picture."""
        joined = self._joined(tiles, picture)
        if self.vision.ends:
            begin, end = (floats(self._weights[f"vision.{name}"])[None] for name in ("begin", "end"))
            joined = np.concatenate([begin, joined, end])
        return joined if self.vision.scale == 1.0 else joined * np.float32(self.vision.scale)

    def _joined(self, tiles: list[Floats], picture: Picture) -> Floats:
        if self.vision.join == "tiles":
            return np.concatenate(tiles)
        newline = floats(self._weights["vision.newline"])[None]
        if len(tiles) == 1:
            return np.concatenate([tiles[0], newline])
        side = round(len(tiles[0]) ** 0.5)
        (down, across), width = picture.grid, tiles[0].shape[1]
        grid = np.concatenate(tiles[1:]).reshape(down, across, side, side, width).transpose(0, 2, 1, 3, 4)
        grid = grid.reshape(down * side, across * side, width)
        (top, bottom), (left, right) = unpadded(picture.size, (grid.shape[0], grid.shape[1]))
        lines = grid[top:bottom, left:right]
        if shape := shrunk((lines.shape[0], lines.shape[1]), side, self.vision.most_tiles):
            lines = resized(lines, shape)
        ends = np.broadcast_to(newline, (len(lines), 1, width))
        return np.concatenate([tiles[0], np.concatenate([lines, ends], 1).reshape(-1, width)])


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


# -- records


def _product(t: Tensors, name: str, bias: bool) -> Record:
    return {"linear": _linear(t, name, bias)}


def _linear(t: Tensors, name: str, bias: bool) -> Record:
    return {"matrix": t.named(f"{name}.weight"), "bias": _vector(t, f"{name}.bias") if bias else None}


def _vector(t: Tensors, name: str, offset: float = 0.0) -> int:
    return t.numbers(floats(t.weights[name]) + np.float32(offset))


def _norm(t: Tensors, name: str, tower: Tower) -> Record:
    return _norm_of(t, name, tower.hidden, tower.norm == "layer", tower.eps)


def _norm_of(t: Tensors, name: str, size: int, layer: bool, eps: float, offset: float = 0.0) -> Record:
    weight, bias = _vector(t, f"{name}.weight", offset), _vector(t, f"{name}.bias") if layer else None
    return {"size": size, "sets": 1, "layer": layer, "weight": weight, "bias": bias, "eps": eps}


def _layer(t: Tensors, tower: Tower, index: int) -> Record:
    name, width = f"vision.layers.{index}", tower.heads * tower.head_dim
    parts = ("gate", "up", "down") if tower.gated else ("up", "down")
    mlp = {part: _linear(t, f"{name}.{part}", tower.mlp_bias) for part in parts}
    return {
        "heads": tower.heads,
        "head_dim": tower.head_dim,
        "turned": tower.positions != "learned",
        "division": bool(tower.window) and index not in tower.full,
        "norm1": _norm(t, f"{name}.norm1", tower),
        "norm2": _norm(t, f"{name}.norm2", tower),
        **{f"{x}_norm": _norm_of(t, f"{name}.{x}_norm", width, False, 1e-6) for x in "qk" if tower.qk_norm},
        **{x: _linear(t, f"{name}.{x}", tower.qkv_bias) for x in "qkv"},
        "o": _linear(t, f"{name}.o", tower.o_bias),
        **{f"scale{k}": _vector(t, f"{name}.scale{k}") for k in (1, 2) if tower.scaled},
        "mlp": {"activation": _ACTIVATIONS[tower.activation], "gate_scale": 1.0, "width": tower.inner, **mlp},
    }


def _projected(t: Tensors, stage: Stage, width: int) -> Record:
    """A stage of the projector."""
    if stage.kind in ("rms", "layer"):
        return {"norm": _norm_of(t, stage.name, width, stage.kind == "layer", stage.eps, stage.offset)}
    if stage.kind == "linear":
        return {"product": _product(t, stage.name, stage.bias)}
    if stage.kind == "gated":
        gate, up = (_linear(t, f"{stage.name}.{part}_proj", stage.bias) for part in ("gate", "up"))
        return {"product": {"gate": gate, "linear": up}}
    return {"activation": _ACTIVATIONS[stage.kind]}
