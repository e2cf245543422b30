"""A tower whose tokens look for what stands in their own place of a larger form of the picture."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from toolkit.models.eyes.fine import STEM
from toolkit.models.eyes.pictures import Picture
from toolkit.models.eyes.vision import Stage
from toolkit.runners.tensor.towers.vision import Encoder


class FineEncoder(Encoder):
    """Of a spec with a ``fine`` tower."""

    def _parts(self, picture: Picture) -> tuple[NDArray[np.float32], ...]:
        return picture.parts[:1]

    def _tiles(self, tiles: Tensor, picture: Picture, rows: int, columns: int, stages: tuple[Stage, ...]) -> Tensor:
        assert picture.more is not None
        cells = self._cells(torch.from_numpy(picture.more).to(self.device, self.dtype))
        across = math.isqrt(len(tiles))  # of the tiles that stand behind the whole, if that is there
        found = []
        if len(tiles) > across**2:
            small = (cells.shape[2] // across, cells.shape[3] // across)
            found.append(_near(functional.interpolate(cells, small, mode="bilinear"), rows))
        parts = [part for line in cells.chunk(across, 2) for part in line.chunk(across, 3)]
        return self._project(tiles, rows, columns, stages, torch.cat([*found, *(_near(part, rows) for part in parts)]))

    def _cells(self, pixels: Tensor) -> Tensor:
        """[1, its outputs, rows, columns]."""
        tower = self.spec.fine
        assert tower is not None
        x = self._channels("vision_stem.1", self._conv("vision_stem.0", pixels, stride=STEM))
        left = []
        for i, depth in enumerate(tower.depths):
            stage = f"vision_stages.{i}"
            if i:
                x = self._conv(f"{stage}.downsample.1", self._channels(f"{stage}.downsample.0", x), stride=2)
            for j in range(depth):
                x = x + self._block(f"{stage}.blocks.{j}", x)
            left.append(x)
        first = left[0].shape[2:]
        wide = [functional.interpolate(x.float(), first, mode="bilinear").to(x.dtype) for x in left[1:]]
        return torch.cat([left[0], *wide], 1)

    def _block(self, name: str, x: Tensor) -> Tensor:
        y = self._conv(f"{name}.conv_dw", x, padding=3, groups=x.shape[1]).permute(0, 2, 3, 1)
        y = self._linear(f"vision.high.{name}.mlp.fc1", self._normed(f"{name}.norm", y))
        y = self._linear(f"vision.high.{name}.mlp.fc2", functional.gelu(y))
        return (y * self.weights[f"vision.high.{name}.gamma"]).permute(0, 3, 1, 2)

    def _conv(self, name: str, x: Tensor, stride: int = 1, padding: int = 0, groups: int = 1) -> Tensor:
        weight, bias = (self.weights[f"vision.high.{name}.{part}"] for part in ("weight", "bias"))
        return functional.conv2d(x, weight, bias, stride, padding, groups=groups)

    def _normed(self, name: str, x: Tensor) -> Tensor:
        assert self.spec.fine is not None
        return self._norm(f"vision.high.{name}", x, "layer", self.spec.fine.eps)

    def _channels(self, name: str, x: Tensor) -> Tensor:
        return self._normed(name, x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def _near(cells: Tensor, side: int) -> Tensor:
    """[1, numbers, rows, columns] as [1, tokens, cells of each, numbers], ``side`` × ``side`` tokens."""
    parts = cells.unflatten(3, (side, -1)).unflatten(2, (side, -1))
    return parts.permute(0, 2, 4, 3, 5, 1).flatten(3, 4).flatten(1, 2)
