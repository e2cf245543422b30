"""A vision tower and its projector as torch operations, on any device: pictures in, rows for the language model out.

All patches of all pictures stand in one flat [patches, hidden] tensor, tile after tile; attention is within tiles, or
within the windows of a tile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from toolkit.artifacts.canonical import Dense
from toolkit.models.eyes.patches import Places, nearest, patch_grid, sines, turns, windows
from toolkit.models.eyes.pictures import Picture, shrunk, unpadded
from toolkit.models.eyes.vision import BOUNDS, Stage, VisionSpec, tensors
from toolkit.runners.tensor.towers.patches import joined, lined, merged, ordered, turned

ACTIVATIONS = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": functional.silu,
}


class Encoder:
    """``weights``: by canonical names, flat or shaped; they are held in ``dtype`` on ``device``."""

    def __init__(self, spec: VisionSpec, weights: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> None:
        self.spec, self.tower = spec, spec.tower
        self.device, self.dtype = device, dtype
        self.weights = {
            name: dense(weights[name]).reshape(shape).to(device, dtype)
            for name, shape in tensors(replace(spec, routed=())).items()
            if name in weights
        }

    @torch.inference_mode()
    def encode(self, pictures: Sequence[Picture]) -> list[Tensor]:
        """The rows of each picture, [tokens, hidden of the language model], those of deep branches beside them."""
        parts = [part for picture in pictures for part in self._parts(picture)]
        grids = [patch_grid(part, self.tower.patch) for part in parts]
        x = torch.cat([self._embed(part, grid) for part, grid in zip(parts, grids, strict=True)])
        places = [grid for part, grid in zip(parts, grids, strict=True) for _ in part]
        outputs = [self._rows(x, pictures, stages) for x, stages in self._layers(x, places)]
        return [torch.cat(rows, 1) for rows in zip(*outputs, strict=True)]

    def _parts(self, picture: Picture) -> tuple[NDArray[np.float32], ...]:
        """The tiles that the tower reads."""
        return picture.parts

    def _tiles(self, tiles: Tensor, picture: Picture, rows: int, columns: int, stages: tuple[Stage, ...]) -> Tensor:
        """What ``stages`` make of tiles of so many ``rows`` and ``columns`` of patches."""
        return self._project(tiles, rows, columns, stages)

    def _rows(self, x: Tensor, pictures: Sequence[Picture], stages: tuple[Stage, ...]) -> list[Tensor]:
        """What ``stages``, then those for whole pictures, make of the flat tokens ``x``, by picture."""
        found, at = [], 0
        for picture in pictures:
            tiles = []
            for part in self._parts(picture):
                rows, columns = patch_grid(part, self.tower.patch)
                size = rows * columns + self.tower.class_token
                inside = x[at : at + len(part) * size].view(len(part), size, -1)
                at += len(part) * size
                inside = inside[:, int(self.tower.class_token) :]
                tiles.append(self._tiles(inside, picture, rows, columns, stages))
            found.append(self._whole(tiles, picture))
        return found

    def _whole(self, tiles: list[Tensor], picture: Picture) -> Tensor:
        spec = self.spec
        rows = self._project(self._join(tiles, picture)[None], 0, 0, spec.behind)[0]
        if spec.ends:
            rows = torch.cat([self.weights["vision.begin"][None], rows, self.weights["vision.end"][None]])
        return rows * spec.scale

    # -- the tower

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, name: str, x: Tensor, kind: str, eps: float, offset: float = 0.0) -> Tensor:
        if kind == "layer":
            weight, bias = self.weights[f"{name}.weight"] + offset, self.weights.get(f"{name}.bias")
            return functional.layer_norm(x, weight.shape, weight, bias, eps)
        wide = x.float()
        y = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
        return y * (self.weights[f"{name}.weight"] + offset) if name else y

    def _own_norm(self, name: str, x: Tensor) -> Tensor:
        return self._norm(name, x, self.tower.norm, self.tower.eps)

    def _patches(self, pixels: Tensor, grid: tuple[int, int]) -> Tensor:
        """[tiles, 3 or 3 x frames, height, width] to [tiles, patches, hidden]."""
        size = self.tower.patch
        pixels = pixels[:, :, : grid[0] * size, : grid[1] * size]
        x = pixels.unflatten(2, (grid[0], size)).unflatten(4, (grid[1], size))  # tile, colour, row, y, column, x
        if (repeats := 3 * self.tower.frames // pixels.shape[1]) > 1:
            x = x.repeat_interleave(repeats, 1)
        order = (0, 2, 4, 3, 5, 1) if self.tower.patch_last else (0, 2, 4, 1, 3, 5)
        x = x.permute(*order).flatten(3).flatten(1, 2)
        return self._linear("vision.patch", self._own_norm("vision.patch_norm", x) if self.tower.patch_norm else x)

    def _embed(self, part: NDArray[np.float32], grid: tuple[int, int]) -> Tensor:
        """Patches as rows, what stands for their places added where that is learned."""
        tower = self.tower
        x = self._patches(torch.from_numpy(part).to(self.device, self.dtype), grid)
        if tower.class_token:
            x = torch.cat([self.weights["vision.class"].expand(len(x), 1, -1), x], 1)
        if tower.norm_first:
            x = self._own_norm("vision.pre_norm", x)
        if tower.positions == "learned" and not (tower.stretched or tower.sides):
            learned, first = self.weights["vision.position"], int(tower.class_token)
            if tower.nearest:
                learned = torch.cat(
                    [learned[:first], learned[first:][torch.from_numpy(nearest(grid, tower.grid)).to(self.device)]]
                )
            x = x + learned
        if tower.sides:
            of_column, of_row = self.weights["vision.position"].unflatten(0, (2, -1))
            x = x + (of_row[: grid[0], None] + of_column[: grid[1]]).flatten(0, 1)
        if tower.stretched:
            learned = self.weights["vision.position"].T.unflatten(1, tower.grid)[None]
            mode = "bicubic" if tower.smooth else "bilinear"
            near = functional.interpolate(learned.float(), grid, mode=mode, align_corners=not tower.edges)
            x = x + near[0].flatten(1).T.to(x.dtype)
        if tower.pre_norm and not tower.norm_first:
            x = self._own_norm("vision.pre_norm", x)
        return x.flatten(0, 1)

    def _layers(self, x: Tensor, places: Places) -> list[tuple[Tensor, tuple[Stage, ...]]]:
        """What leaves the tower and the stages that it goes through, that of deep branches last. ``places``: rows and
        columns of each tile's patches.
        """
        tower = self.tower
        whole = [rows * columns + tower.class_token for rows, columns in places]
        cos, sin = self._turns(places)
        order, lengths = None, whole
        if tower.window:
            near_order, lengths = windows(places, tower.window)
            order = torch.from_numpy(near_order).to(self.device)
            x, cos, sin = x[order], cos[order], sin[order]  # type: ignore[index]
        deep, also = [], []
        for i in range(tower.taken):
            name = f"vision.layers.{i}"
            near = lengths if not tower.window or i not in tower.full else whole
            x = x + self._added(name, 1, self._attend(name, self._read(name, 1, x), near, cos, sin))
            x = x + self._added(name, 2, self._mlp(name, self._read(name, 2, x)))
            also += [x] * (i in tower.also)
            deep += [(ordered(x, order), branch.projector) for branch in self.spec.deep if branch.layer == i]
        x = ordered(x, order)
        x = self._own_norm("vision.post_norm", x) if tower.post_norm == "used" else x
        return [(torch.cat([x, *also], 1), self.spec.inside), *deep]

    def _read(self, name: str, branch: int, x: Tensor) -> Tensor:
        """What a branch of a layer reads."""
        return x if self.tower.norm_after else self._own_norm(f"{name}.norm{branch}", x)

    def _added(self, name: str, branch: int, x: Tensor) -> Tensor:
        """What a branch adds that gave ``x``."""
        x = self._own_norm(f"{name}.norm{branch}", x) if self.tower.norm_after else x
        x = self._own_norm(f"{name}.after{branch}", x) if self.tower.norm_both else x
        return x * self.weights[f"{name}.scale{branch}"] if self.tower.scaled else x

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        act, up = ACTIVATIONS[self.tower.activation], self._within(f"{name}.up", x)
        inner = act(self._within(f"{name}.gate", x)) * up if self.tower.gated else act(up)
        return self._within(f"{name}.down", inner)

    def _within(self, name: str, x: Tensor) -> Tensor:
        """A linear of a layer, what it reads and gives within its bounds."""
        if not self.tower.clipped:
            return self._linear(name, x)
        lowest, highest, least, most = (self.weights[f"{name}_clip.{bound}"] for bound in BOUNDS)
        return self._linear(name, x.clamp(lowest, highest)).clamp(least, most)

    def _attend(self, name: str, x: Tensor, lengths: list[int], cos: Tensor | None, sin: Tensor | None) -> Tensor:
        """Attention of neighbouring tokens, ``lengths`` of them at a time; those of one length run together."""
        tower = self.tower
        q, k, v = (self._within(f"{name}.{part}", x) for part in ("q", "k", "v"))
        if tower.qk_norm:
            q, k = (self._norm(f"{name}.{part}_norm", y, "rms", 1e-6) for part, y in (("q", q), ("k", k)))
        q, k, v = (y.unflatten(1, (tower.heads, tower.head_dim)) for y in (q, k, v))
        if tower.by_head:
            q, k = (self._norm(f"{name}.{part}_norm", y, "rms", tower.eps) for part, y in (("q", q), ("k", k)))
            v = self._norm("", v, "rms", tower.eps) if tower.norm_values else v
        if cos is not None and sin is not None:
            q, k = turned(q, cos, sin), turned(k, cos, sin)
        starts = torch.tensor([0, *lengths]).cumsum(0)
        out = torch.empty_like(v)
        for length in sorted(set(lengths)):
            first = starts[:-1][torch.tensor(lengths) == length]
            rows = (first[:, None] + torch.arange(length)).to(x.device)
            near_q, near_k, near_v = (y[rows].transpose(1, 2) for y in (q, k, v))  # segment, head, token, number
            found = functional.scaled_dot_product_attention(near_q, near_k, near_v, scale=tower.scale or None)
            out[rows] = found.transpose(1, 2)
        return self._within(f"{name}.o", out.flatten(1))

    def _turns(self, places: Places) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """cos and sin of every patch's rotation, float32 [patches, head_dim]."""
        found = turns(self.tower, places)
        if found is None:
            return None, None
        cos, sin = (torch.from_numpy(x).repeat(1, 2).to(self.device) for x in found)
        return cos, sin

    # -- behind the tower

    def _project(
        self, tiles: Tensor, rows: int, columns: int, stages: tuple[Stage, ...], beside: Tensor | None = None
    ) -> Tensor:
        """[tiles, patches, hidden] to [tiles, tokens, hidden of the language model]."""
        for stage in stages:
            if stage.kind in ("rms", "layer"):
                tiles = self._norm(stage.name, tiles, stage.kind, stage.eps, stage.offset)
            elif stage.kind == "linear":
                tiles = self._linear(stage.name, tiles)
            elif stage.kind == "gated":
                gate, up = (self._linear(f"{stage.name}.{part}_proj", tiles) for part in ("gate", "up"))
                tiles = functional.silu(gate) * up
            elif stage.kind == "matrix":
                tiles = tiles @ self.weights[stage.name]
            elif stage.kind in ACTIVATIONS:
                tiles = ACTIVATIONS[stage.kind](tiles)
            elif stage.kind == "standard":
                shift, scale = (self.weights[f"{stage.name}.{part}"].float() for part in ("bias", "scale"))
                tiles = ((tiles.float() * stage.inputs**0.5 - shift) * scale).to(tiles.dtype)
            elif stage.kind == "attend":
                tiles = self._attended(tiles, rows, columns, stage)
            elif stage.kind == "beside":
                assert beside is not None
                tiles = torch.cat([self._linear(stage.name, beside), tiles], -1)
            elif stage.kind == "mine":
                assert beside is not None
                tiles = tiles + self._mined(tiles, beside, stage)
            elif stage.kind == "resample":
                tiles = self._resampled(tiles, rows, columns, stage)
            else:
                tiles = merged(tiles, rows, columns, stage)
        return tiles

    def _attended(self, tiles: Tensor, rows: int, columns: int, stage: Stage) -> Tensor:
        """What the means of neighbouring rows find in those."""
        f, name = stage.factor, stage.name
        near = tiles.unflatten(1, (rows // f, f, columns // f, f)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
        q = self._linear(f"{name}.q", near.mean(2, keepdim=True))
        q, k, v = (
            y.unflatten(3, (stage.heads, -1)).transpose(2, 3)
            for y in (q, self._linear(f"{name}.k", near), self._linear(f"{name}.v", near))
        )
        found = functional.scaled_dot_product_attention(q, k, v)  # tile, token, head, 1, number
        return self._linear(f"{name}.o", found.flatten(2))

    def _mined(self, tiles: Tensor, cells: Tensor, stage: Stage) -> Tensor:
        """What each row finds in its own ``cells``, [tiles, tokens, cells, numbers]."""
        q, k, v = (
            self._linear(f"{stage.name}.{part}", self._norm(f"{stage.name}.{part}_norm", x, "layer", stage.eps))
            for part, x in (("query", tiles[:, :, None]), ("aux", cells), ("val", cells))
        )
        return functional.scaled_dot_product_attention(q, k, v)[:, :, 0]

    def _resampled(self, tiles: Tensor, rows: int, columns: int, stage: Stage) -> Tensor:
        """What learned queries find in the rows of each tile."""
        name, eps = stage.name, stage.eps
        x = self._norm(f"{name}.ln_kv", self._linear(f"{name}.kv_proj", tiles), "layer", eps)
        asked = self._norm(f"{name}.ln_q", self.weights[f"{name}.query"], "layer", eps)
        if stage.placed:
            learned = self.weights[f"{name}.pos_embed"]
            side = round(len(learned) ** 0.5)
            near = learned.float().T.unflatten(1, (side, side))[None]
            near = functional.interpolate(near, (rows, columns), mode="bicubic", align_corners=False)
            places, asked = near[0].flatten(1).T, asked + learned
        else:
            places = torch.from_numpy(sines(rows, columns, x.shape[-1]))
        q = self._linear(f"{name}.q", asked).expand(len(tiles), -1, -1)
        k = self._linear(f"{name}.k", x + places.to(x))
        q, k, v = (y.unflatten(2, (stage.heads, -1)).transpose(1, 2) for y in (q, k, self._linear(f"{name}.v", x)))
        found = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return (
            self._norm(f"{name}.ln_post", self._linear(f"{name}.o", found), "layer", eps) @ self.weights[f"{name}.proj"]
        )

    def _join(self, parts: list[Tensor], picture: Picture) -> Tensor:
        """The rows of a picture's tiles as those of the picture."""
        if self.spec.join == "tiles":
            return torch.cat([tiles.flatten(0, 1) for tiles in parts])
        (tiles,), newline = parts, self.weights["vision.newline"]
        if picture.frame is not None and (shape := picture.frame.pooled):
            side = (round(tiles.shape[1] ** 0.5),) * 2
            near = functional.interpolate(tiles.transpose(1, 2).unflatten(2, side), shape, mode="bilinear")
            rows = near.flatten(2)[0].T
            return torch.cat([rows, newline[None]]) if picture.tokens > len(rows) else rows
        if self.spec.join == "lined":
            whole, all_tiles = (
                lined(joined(x, grid), newline) for x, grid in ((tiles[:1], (1, 1)), (tiles[1:], picture.grid))
            )
            first, last = (whole, all_tiles) if self.spec.whole_first else (all_tiles, whole)
            return torch.cat([first, self.weights["vision.separator"][None], last])
        if len(tiles) == 1:
            return torch.cat([tiles[0], newline[None]])
        grid = joined(tiles[1:], picture.grid)
        (top, bottom), (left, right) = unpadded(picture.size, (grid.shape[0], grid.shape[1]))
        lines = grid[top:bottom, left:right]
        if shape := shrunk((lines.shape[0], lines.shape[1]), round(tiles.shape[1] ** 0.5), self.spec.most_tiles):
            lines = functional.interpolate(lines.permute(2, 0, 1)[None], shape, mode="bilinear")[0].permute(1, 2, 0)
        return torch.cat([tiles[0], lined(lines, newline)])


def dense(weight: Any) -> Tensor:
    """A parameter, or the numbers of a matrix in canonical form."""
    if isinstance(weight, Tensor):
        return weight
    return weight.weight if isinstance(weight, Dense) else weight.dequantize(torch.float32)
