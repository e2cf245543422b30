"""Molmo's tower: the whole picture, and tiles that overlap and are put together as the picture they make."""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit.models.eyes.pictures import Picture, framed
from toolkit.models.eyes.vision import Stage
from toolkit.runners.tensor.towers.vision import Encoder

BEGIN, END, PATCH, COLUMN = range(4)  # which of the vectors of extra tokens stands for what


class OverlapEncoder(Encoder):
    """Of a spec whose tiles ``overlap``."""

    def _tiles(self, tiles: Tensor, picture: Picture, rows: int, columns: int, stages: tuple[Stage, ...]) -> Tensor:
        return self._project(tiles + self._padding(tiles, picture), rows, columns, stages)

    def _padding(self, tiles: Tensor, picture: Picture) -> Tensor:
        """What is learned for patches outside the picture, all or in part. As the authors have it, tile i is told of
        the padding of the tile behind it (the whole stands before them all), and the last one counts as padded in
        part."""
        rows, columns = picture.grid
        side, patch = round(tiles.shape[1] ** 0.5), self.tower.patch
        shared = self.spec.overlap * self.spec.merge
        step, far = side - 2 * shared, 2 * shared
        size = ((rows * step + far) * patch, (columns * step + far) * patch)
        (height, width), (top, left) = framed(picture.size, size)
        real = torch.zeros(size)
        real[top : top + height, left : left + width] = 1
        share = real.unflatten(0, (-1, patch)).unflatten(2, (-1, patch)).mean((1, 3))
        cut = [
            share[step * i : step * i + side, step * j : step * j + side] for i in range(rows) for j in range(columns)
        ]
        told = torch.stack([*cut, torch.full((side, side), 0.5)]).flatten(1)[..., None]
        none, part = self.weights["vision.pad"]
        told = told.to(self.device)
        return (told == 0) * none + ((told > 0) & (told < 1)) * part

    def _join(self, parts: list[Tensor], picture: Picture) -> Tensor:
        (tiles,) = parts
        side, shared = round(tiles.shape[1] ** 0.5), self.spec.overlap
        grids, (rows, columns) = tiles.unflatten(1, (side, side)), picture.grid
        lines = []
        for i in range(rows):
            down = slice(shared if i else 0, None if i == rows - 1 else side - shared)
            across = (slice(shared if j else 0, None if j == columns - 1 else side - shared) for j in range(columns))
            lines.append(torch.cat([grids[1 + i * columns + j][down, at] for j, at in enumerate(across)], 1))
        return torch.cat([self._spelled(grids[0]), self._spelled(torch.cat(lines))])

    def _spelled(self, grid: Tensor) -> Tensor:
        """Its rows added to what stands for a patch, vectors around and behind each line."""
        tokens = self.weights["vision.tokens"]
        lines = torch.cat([grid + tokens[PATCH], tokens[COLUMN].expand(len(grid), 1, -1)], 1).flatten(0, 1)
        return torch.cat([tokens[BEGIN][None], lines, tokens[END][None]])
