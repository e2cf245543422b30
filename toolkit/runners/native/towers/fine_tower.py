"""A tower whose tokens look for what stands in their own place of a larger form of the picture, as ConvNeXt sees that,
on the native library."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from toolkit.models.eyes.fine import STEM, FineTower
from toolkit.models.eyes.patches import between
from toolkit.models.eyes.pictures import Picture
from toolkit.runners.native.packing.packed import Floats, floats
from toolkit.runners.native.tensors import Record, Tensors
from toolkit.runners.native.towers.tower import NativeEncoder
from toolkit.runners.native.towers.tower_records import TOWER_ACTIVATIONS, linear, near, norm_of, unfolded

HIGH = "vision.high"
ROWS = 8192  # cells that go through a block together


class FineEncoder(NativeEncoder):
    """Of a spec with a ``fine`` tower."""

    def _parts(self, picture: Picture) -> tuple[Floats, ...]:
        return picture.parts[:1]

    @property
    def _fine(self) -> FineTower:
        assert self.vision.fine is not None
        return self.vision.fine

    def _stages(self, t: Tensors) -> Iterator[Record]:
        yield from super()._stages(t)
        tower = self._fine

        def product(name: str, inputs: int, outputs: int) -> Record:
            return self._stage(name, inputs, outputs, product={"linear": linear(t, f"{HIGH}.{name}", True)})

        def norm(name: str, width: int) -> Record:
            return self._stage(name, width, width, norm=norm_of(t, f"{HIGH}.{name}", width, True, tower.eps))

        yield product("vision_stem.0", 3 * STEM**2, tower.widths[0])
        yield norm("vision_stem.1", tower.widths[0])
        for i, (width, depth) in enumerate(zip(tower.widths, tower.depths, strict=True)):
            if i:
                yield norm(f"vision_stages.{i}.downsample.0", tower.widths[i - 1])
                yield product(f"vision_stages.{i}.downsample.1", 4 * tower.widths[i - 1], width)
            for j in range(depth):
                block = f"vision_stages.{i}.blocks.{j}"
                yield self._stage(f"{block}.conv_dw", width, width, near=near(t, f"{HIGH}.{block}.conv_dw", width))
                yield norm(f"{block}.norm", width)
                yield product(f"{block}.mlp.fc1", width, 4 * width)
                yield self._stage(f"{block}.gelu", 4 * width, 4 * width, activation=TOWER_ACTIVATIONS["gelu"])
                yield product(f"{block}.mlp.fc2", 4 * width, width)

    def _beside(self, pictures: Sequence[Picture]) -> Iterator[Floats]:
        """What stands in the place of each token, a line of tokens of a tile at a time: [tokens, cells, numbers]."""
        for picture in pictures:
            yield from self._cells(picture)

    def _cells(self, picture: Picture) -> Iterator[Floats]:
        assert picture.more is not None
        scales, tokens = self._scales(picture.more[0].transpose(1, 2, 0)), self.tower.grid[0]
        count = len(picture.pixels)
        across = math.isqrt(count)  # of the tiles that stand behind the whole, if that is there
        side = scales[0].shape[0]
        wide = [between(len(x), side, False, False) for x in scales]
        if count > across**2:
            small = between(side, side // across, False, False)
            yield from _lines(scales, [small @ w for w in wide], 0, 0, tokens, side // across // tokens)
        for i in range(across**2):
            yield from _lines(scales, wide, i // across * tokens, i % across * tokens, tokens, side // across // tokens)

    def _scales(self, pixels: Floats) -> list[Floats]:
        """What leaves each stage, [rows, columns, numbers]."""
        cells = unfolded(pixels, STEM, STEM)
        x = self._through("vision_stem.0", "vision_stem.1", cells)
        left = []
        for i, depth in enumerate(self._fine.depths):
            if i:
                normed = self._through(f"vision_stages.{i}.downsample.0", f"vision_stages.{i}.downsample.0", x)
                last = f"vision_stages.{i}.downsample.1"
                x = self._through(last, last, unfolded(normed, 2, 2))
            for j in range(depth):
                x = self._block(f"vision_stages.{i}.blocks.{j}", x)
            left.append(x)
        return left

    def _block(self, name: str, x: Floats) -> Floats:
        _, columns, width = x.shape
        at = self._at[f"{name}.conv_dw"]
        y = self._run(at, at, x.reshape(-1, width), across=columns)
        y = self._through(f"{name}.norm", f"{name}.mlp.fc2", y.reshape(x.shape))
        y *= floats(self._weights[f"{HIGH}.{name}.gamma"])
        y += x
        return y

    def _through(self, first: str, last: str, x: Floats) -> Floats:
        """Stages of all cells, [rows, columns, numbers], some at a time."""
        flat = x.reshape(x.shape[0] * x.shape[1], -1)
        made = [self._run(self._at[first], self._at[last], flat[i : i + ROWS]) for i in range(0, len(flat), ROWS)]
        return np.concatenate(made).reshape(*x.shape[:2], -1)


def _lines(
    scales: list[Floats], weights: list[Floats], top: int, left: int, tokens: int, each: int
) -> Iterator[Floats]:
    """Of ``tokens`` lines of as many tokens, from token (top, left) on: each token's ``each`` * ``each`` cells, resized
    by ``weights`` [cells along a side, those of the scale], of all scales side by side."""
    across = slice(left * each, (left + tokens) * each)
    narrow = [np.einsum("bc,rcn->rbn", w[across], x, optimize=True) for w, x in zip(weights, scales, strict=True)]
    for line in range(top, top + tokens):
        down = slice(line * each, (line + 1) * each)
        band = np.concatenate(
            [np.einsum("ar,rbn->abn", w[down], x, optimize=True) for w, x in zip(weights, narrow, strict=True)], 2
        )
        yield band.reshape(each, tokens, each, -1).transpose(1, 0, 2, 3).reshape(tokens, each * each, -1)
