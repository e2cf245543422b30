"""The tower of Llama 3.2 Vision on the native library: the tiles of a picture see each other, and layers over all of
them follow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from toolkit.models.eyes.patches import patch_grid
from toolkit.models.eyes.pictures import Picture
from toolkit.runners.native.packing.packed import Floats, floats
from toolkit.runners.native.towers.tower import NativeEncoder

WHOLE = 8  # of which each tile's tokens are a multiple, zeros behind them


class TiledEncoder(NativeEncoder):
    """Of a spec whose tower has ``tiles``."""

    def encode(self, pictures: Sequence[Picture]) -> list[Floats]:
        """The rows of each picture, [tiles * (patches + 1), hidden of the language model]."""
        return [self._picture(picture) for picture in pictures]

    def _picture(self, picture: Picture) -> Floats:
        tower, count = self.tower, len(picture.pixels)
        shape = tower.shapes.index(picture.grid) + 1
        x = self._tokens(picture.pixels, shape)
        size = x.shape[1]
        x = np.pad(x, ((0, 0), (0, -size % WHOLE), (0, 0)))
        stands = np.zeros(x.shape[:2], bool)
        stands[:count, :size] = True
        after = np.broadcast_to(self._of_tile("vision.tile_after", shape), x.shape)
        order = np.argsort(~stands.reshape(-1), kind="stable")  # those that stand for nothing last
        x, after = (a.reshape(-1, tower.hidden)[order] for a in (x, after))
        x = self._through(x, count * size, after)[: count * size]
        return self._project("projector", self.vision.projector, x, [(len(x), 1)])[0]

    def _tokens(self, tiles: Floats, shape: int) -> Floats:
        """[tiles of the largest picture, patches + 1, hidden], what tells where each stands added."""
        tower = self.tower
        pixels = np.zeros((tower.tiles, *tiles.shape[1:]), np.float32)
        pixels[: len(tiles)] = tiles
        x = self._run(self._at["patch"], self._at["patch"], self._patches(pixels))
        rows, columns = patch_grid(pixels, tower.patch)
        x = x.reshape(tower.tiles, rows * columns, tower.hidden) + self._of_tile("vision.tile_before", shape)
        first = np.broadcast_to(floats(self._weights["vision.class"]), (tower.tiles, 1, tower.hidden))
        x = np.concatenate([first, x], 1)
        gate, places = self._gate("vision.position_gate"), self._row("vision.tile_position", shape)
        learned = floats(self._weights["vision.position"]).reshape(x.shape[1:])
        x = x + (1 - gate) * learned + gate * places.reshape(x.shape)
        at = self._at["pre_norm"]
        return self._run(at, at, x.reshape(-1, tower.hidden)).reshape(x.shape)

    def _through(self, x: Floats, real: int, after: Floats) -> Floats:
        """All layers. ``real``: how many of the tokens stand for something; ``after``: added before the layers over
        all."""
        tower, whole = self.tower, ((len(x),), ())
        first, gathered = self._at["layer0"], []
        for i in sorted(set(tower.gathered)):
            last = self._at[f"layer{i}"]
            x, first = self._run(first, last, x, whole, real=real), last + 1
            gathered.append(x)
        x = self._run(first, self._at["post_norm"], x, whole, real=real) + after
        if tower.over_all:
            last = self._at[f"over_all{tower.over_all - 1}"]
            x = self._run(self._at["over_all0"], last, x, whole, real=real)
        return np.concatenate([x, np.stack(gathered, -1).reshape(len(x), -1)], 1) if gathered else x

    def _gate(self, name: str) -> np.float32:
        return np.float32(np.tanh(floats(self._weights[name])[0]))

    def _row(self, name: str, index: int) -> Floats:
        """Of what is learned for each shape of a picture."""
        size = self._weights[name].meta.rows // (len(self.tower.shapes) + 1)
        return floats(self._weights[name], slice(index * size, (index + 1) * size))

    def _of_tile(self, name: str, shape: int) -> Floats:
        """What tells the tiles of a picture of this shape apart, [tiles, 1, hidden]."""
        return self._row(name, shape).reshape(self.tower.tiles, 1, -1) * self._gate(f"{name}_gate")
