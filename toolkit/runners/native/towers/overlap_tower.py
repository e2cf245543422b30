"""Molmo's tower on the native library: the whole picture, and tiles that overlap and are put together as the picture
they make."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from toolkit.models.eyes.patches import Places
from toolkit.models.eyes.pictures import Picture, framed
from toolkit.runners.native.packing.packed import Floats, floats
from toolkit.runners.native.towers.tower import NativeEncoder

BEGIN, END, PATCH, COLUMN = range(4)  # which of the vectors of extra tokens stands for what


class OverlapEncoder(NativeEncoder):
    """Of a spec whose tiles ``overlap``."""

    def _told(self, x: Floats, places: Places, pictures: Sequence[Picture]) -> Floats:
        side = places[0][0]
        none, part = floats(self._weights["vision.pad"]).reshape(2, -1)
        share = np.concatenate([self._shares(picture, side) for picture in pictures])[:, None]
        return x + (share == 0) * none + ((share > 0) & (share < 1)) * part

    def _shares(self, picture: Picture, side: int) -> Floats:
        """How much of each patch is picture, not padding around it. As the authors have it, tile i is told of the
        padding of the tile behind it (the whole stands before them all), and the last one counts as padded in part."""
        (rows, columns), patch = picture.grid, self.tower.patch
        far = 2 * self.vision.overlap * self.vision.merge
        step = side - far
        size = ((rows * step + far) * patch, (columns * step + far) * patch)
        (height, width), (top, left) = framed(picture.size, size)
        real = np.zeros(size, np.float32)
        real[top : top + height, left : left + width] = 1
        share = real.reshape(size[0] // patch, patch, size[1] // patch, patch).mean((1, 3))
        starts = ((step * i, step * j) for i in range(rows) for j in range(columns))
        cut = [share[y : y + side, x : x + side].reshape(-1) for y, x in starts]
        return np.concatenate([*cut, np.full(side * side, 0.5, np.float32)])

    def _joined(self, tiles: list[Floats], picture: Picture) -> Floats:
        side, shared, (rows, columns) = round(len(tiles[0]) ** 0.5), self.vision.overlap, picture.grid
        grids = [tile.reshape(side, side, -1) for tile in tiles]
        lines = []
        for i in range(rows):
            down = slice(shared if i else 0, None if i == rows - 1 else side - shared)
            across = (slice(shared if j else 0, None if j == columns - 1 else side - shared) for j in range(columns))
            lines.append(np.concatenate([grids[1 + i * columns + j][down, at] for j, at in enumerate(across)], 1))
        return np.concatenate([self._spelled(grids[0]), self._spelled(np.concatenate(lines))])

    def _spelled(self, grid: Floats) -> Floats:
        """Its rows added to what stands for a patch, vectors around and behind each line."""
        width = grid.shape[2]
        tokens = floats(self._weights["vision.tokens"], slice(0, (COLUMN + 1) * width)).reshape(-1, width)
        column = np.broadcast_to(tokens[COLUMN], (len(grid), 1, width))
        lines = np.concatenate([grid + tokens[PATCH], column], 1).reshape(-1, width)
        return np.concatenate([tokens[BEGIN][None], lines, tokens[END][None]])
