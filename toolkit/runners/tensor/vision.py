"""A vision tower and its projector as torch operations, on any device: pictures in, rows for the language model out.

All patches of all pictures stand in one flat [patches, hidden] tensor, tile after tile; attention is within tiles, or
within the windows of a tile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from toolkit.models.vision import Picture, Stage, VisionSpec, shrunk, tensors, unpadded

ACTIVATIONS = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": functional.silu,
}
# How [tiles, rows, factor, columns, factor, numbers] are put in order.
MERGES = {
    "merge": (0, 1, 3, 2, 4, 5),
    "merge_turned": (0, 3, 1, 2, 4, 5),
    "merge_channels": (0, 1, 3, 5, 2, 4),
}


class Encoder:
    """``weights``: by canonical names, flat or shaped; they are held in ``dtype`` on ``device``."""

    def __init__(self, spec: VisionSpec, weights: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> None:
        self.spec, self.tower = spec, spec.tower
        self.device, self.dtype = device, dtype
        self.weights = {
            name: weights[name].reshape(shape).to(device, dtype)
            for name, shape in tensors(spec).items()
            if name in weights
        }

    @torch.inference_mode()
    def encode(self, pictures: Sequence[Picture]) -> list[Tensor]:
        """The rows of each picture, [tokens, hidden of the language model], those of deep branches beside them."""
        grids = [patch_grid(picture, self.tower.patch) for picture in pictures]
        x = torch.cat([self._embed(p, grid) for p, grid in zip(pictures, grids, strict=True)])
        places = [grid for p, grid in zip(pictures, grids, strict=True) for _ in range(len(p.pixels))]
        outputs = [self._rows(x, pictures, grids, stages) for x, stages in self._layers(x, places)]
        return [torch.cat(rows, 1) for rows in zip(*outputs, strict=True)]

    def _rows(
        self, x: Tensor, pictures: Sequence[Picture], grids: list[tuple[int, int]], stages: tuple[Stage, ...]
    ) -> list[Tensor]:
        """What ``stages`` make of the flat tokens ``x``, by picture."""
        found, at = [], 0
        for picture, (rows, columns) in zip(pictures, grids, strict=True):
            size = rows * columns + self.tower.class_token
            tiles = x[at : at + len(picture.pixels) * size].view(len(picture.pixels), size, -1)
            at += len(picture.pixels) * size
            tiles = self._project(tiles[:, int(self.tower.class_token) :], rows, columns, stages)
            found.append(self._join(tiles, picture))
        return found

    # -- the tower

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, name: str, x: Tensor, kind: str, eps: float, offset: float = 0.0) -> Tensor:
        weight, bias = self.weights[f"{name}.weight"] + offset, self.weights.get(f"{name}.bias")
        if kind == "layer":
            return functional.layer_norm(x, weight.shape, weight, bias, eps)
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight

    def _own_norm(self, name: str, x: Tensor) -> Tensor:
        return self._norm(name, x, self.tower.norm, self.tower.eps)

    def _patches(self, pixels: Tensor, grid: tuple[int, int]) -> Tensor:
        """[tiles, 3, height, width] to [tiles, patches, hidden]."""
        size = self.tower.patch
        x = pixels.unflatten(2, (grid[0], size)).unflatten(4, (grid[1], size))  # tile, colour, row, y, column, x
        x = x.permute(0, 2, 4, 1, 3, 5).unsqueeze(4).expand(-1, -1, -1, -1, self.tower.frames, -1, -1)
        return self._linear("vision.patch", x.flatten(3).flatten(1, 2))

    def _embed(self, picture: Picture, grid: tuple[int, int]) -> Tensor:
        """Patches as rows, what stands for their places added where that is learned."""
        tower = self.tower
        x = self._patches(torch.from_numpy(picture.pixels).to(self.device, self.dtype), grid)
        if tower.class_token:
            x = torch.cat([self.weights["vision.class"].expand(len(x), 1, -1), x], 1)
        if tower.norm_first:
            x = self._own_norm("vision.pre_norm", x)
        if tower.positions == "learned":
            x = x + self.weights["vision.position"]
        if tower.stretched:
            learned = self.weights["vision.position"].T.unflatten(1, tower.grid)[None]
            mode = "bicubic" if tower.smooth else "bilinear"
            near = functional.interpolate(learned.float(), grid, mode=mode, align_corners=not tower.smooth)
            x = x + near[0].flatten(1).T.to(x.dtype)
        if tower.pre_norm and not tower.norm_first:
            x = self._own_norm("vision.pre_norm", x)
        return x.flatten(0, 1)

    def _layers(self, x: Tensor, places: list[tuple[int, int]]) -> list[tuple[Tensor, tuple[Stage, ...]]]:
        """What leaves the tower and the stages that it goes through, that of deep branches last. ``places``: rows and
        columns of each tile's patches.
        """
        tower = self.tower
        whole = [rows * columns + tower.class_token for rows, columns in places]
        cos, sin = self._turns(places)
        order, lengths = None, whole
        if tower.window:
            order, lengths = _windows(places, tower.window)
            order = order.to(self.device)
            x, cos, sin = x[order], cos[order], sin[order]  # type: ignore[index]
        deep = []
        for i in range(tower.taken):
            name = f"vision.layers.{i}"
            near = lengths if not tower.window or i not in tower.full else whole
            x = x + self._scaled(
                f"{name}.scale1", self._attend(name, self._own_norm(f"{name}.norm1", x), near, cos, sin)
            )
            x = x + self._scaled(f"{name}.scale2", self._mlp(name, self._own_norm(f"{name}.norm2", x)))
            deep += [(_ordered(x, order), branch.projector) for branch in self.spec.deep if branch.layer == i]
        x = _ordered(x, order)
        return [(self._own_norm("vision.post_norm", x) if tower.post_norm == "used" else x, self.spec.projector), *deep]

    def _scaled(self, name: str, x: Tensor) -> Tensor:
        return x * self.weights[name] if self.tower.scaled else x

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        act, up = ACTIVATIONS[self.tower.activation], self._linear(f"{name}.up", x)
        inner = act(self._linear(f"{name}.gate", x)) * up if self.tower.gated else act(up)
        return self._linear(f"{name}.down", inner)

    def _attend(self, name: str, x: Tensor, lengths: list[int], cos: Tensor | None, sin: Tensor | None) -> Tensor:
        """Attention of neighbouring tokens, ``lengths`` of them at a time; those of one length run together."""
        tower = self.tower
        q, k, v = (self._linear(f"{name}.{part}", x) for part in ("q", "k", "v"))
        if tower.qk_norm:
            q, k = (self._norm(f"{name}.{part}_norm", y, "rms", 1e-6) for part, y in (("q", q), ("k", k)))
        q, k, v = (y.unflatten(1, (tower.heads, tower.head_dim)) for y in (q, k, v))
        if cos is not None and sin is not None:
            q, k = _turned(q, cos, sin), _turned(k, cos, sin)
        starts = torch.tensor([0, *lengths]).cumsum(0)
        out = torch.empty_like(v)
        for length in sorted(set(lengths)):
            first = starts[:-1][torch.tensor(lengths) == length]
            rows = (first[:, None] + torch.arange(length)).to(x.device)
            near_q, near_k, near_v = (y[rows].transpose(1, 2) for y in (q, k, v))  # segment, head, token, number
            out[rows] = functional.scaled_dot_product_attention(near_q, near_k, near_v).transpose(1, 2)
        return self._linear(f"{name}.o", out.flatten(1))

    def _turns(self, places: list[tuple[int, int]]) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """cos and sin of every patch's rotation, float32 [patches, head_dim]."""
        tower = self.tower
        if tower.positions == "learned":
            return None, None
        d = tower.head_dim
        if tower.positions == "axial":
            by_row = by_column = tower.theta ** -(torch.arange(0, d // 2, 2).float() / (d // 2))
        else:
            both = tower.theta ** -(torch.arange(0, d, 2).float() / d)
            by_row, by_column = both[::2], both[1::2]
        angles = []
        for rows, columns in places:
            y = torch.arange(rows).float()[:, None].expand(rows, columns).reshape(-1)
            x = torch.arange(columns).float().expand(rows, columns).reshape(-1)
            angles.append(torch.cat([torch.outer(y, by_row), torch.outer(x, by_column)], 1))
        angle = torch.cat(angles).repeat(1, 2).to(self.device)
        return angle.cos(), angle.sin()

    # -- behind the tower

    def _project(self, tiles: Tensor, rows: int, columns: int, stages: tuple[Stage, ...]) -> Tensor:
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
            else:
                tiles = _merged(tiles, rows, columns, stage)
        return tiles

    def _join(self, tiles: Tensor, picture: Picture) -> Tensor:
        if self.spec.join == "tiles":
            return tiles.flatten(0, 1)
        newline = self.weights["vision.newline"]
        if len(tiles) == 1:
            return torch.cat([tiles[0], newline[None]])
        side = round(tiles.shape[1] ** 0.5)
        grid = tiles[1:].view(*picture.grid, side, side, -1).transpose(1, 2).flatten(2, 3).flatten(0, 1)
        (top, bottom), (left, right) = unpadded(picture.size, (grid.shape[0], grid.shape[1]))
        lines = grid[top:bottom, left:right]
        if shape := shrunk((lines.shape[0], lines.shape[1]), side, self.spec.most_tiles):
            lines = functional.interpolate(lines.permute(2, 0, 1)[None], shape, mode="bilinear")[0].permute(1, 2, 0)
        lines = torch.cat([lines, newline.expand(len(lines), 1, -1)], 1)
        return torch.cat([tiles[0], lines.flatten(0, 1)])


def _ordered(x: Tensor, order: Tensor | None) -> Tensor:
    """Tokens that stand as ``order`` has them, as they stood before."""
    return x if order is None else torch.empty_like(x).index_copy_(0, order, x)


def patch_grid(picture: Picture, patch: int) -> tuple[int, int]:
    """Rows and columns of the patches of a tile."""
    _, _, height, width = picture.pixels.shape
    return height // patch, width // patch


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[tokens, heads, head_dim], element i turned with i + head_dim / 2."""
    wide = x.float()
    first, second = wide.chunk(2, -1)
    return (wide * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]).to(x.dtype)


def _windows(places: list[tuple[int, int]], side: int) -> tuple[Tensor, list[int]]:
    """The patches of each tile in the order of its windows, and how many there are in each."""
    order, lengths, at = [], [], 0
    for rows, columns in places:
        across = -(-columns // side)
        window = (torch.arange(rows)[:, None] // side * across + torch.arange(columns) // side).reshape(-1)
        order.append(torch.argsort(window, stable=True) + at)
        lengths += torch.bincount(window).tolist()
        at += rows * columns
    return torch.cat(order), lengths


def _merged(tiles: Tensor, rows: int, columns: int, stage: Stage) -> Tensor:
    f = stage.factor
    blocks = tiles.unflatten(1, (rows // f, f, columns // f, f))
    if stage.kind == "pool":
        return blocks.mean((2, 4)).flatten(1, 2)
    return blocks.permute(*MERGES[stage.kind]).flatten(3).flatten(1, 2)
