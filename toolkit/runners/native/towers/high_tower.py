"""A tower with a second one beside it, which reads a larger form of the picture (SAM's), on the native library."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from toolkit.models.eyes.high import NECK_EPS, HighTower
from toolkit.models.eyes.patches import resized
from toolkit.models.eyes.pictures import Picture
from toolkit.runners.native.packing.packed import LANES, Floats, PackedTensor, floats
from toolkit.runners.native.tensors import Record, Tensors
from toolkit.runners.native.towers.tower import NativeEncoder
from toolkit.runners.native.towers.tower_records import TOWER_ACTIVATIONS, dense, linear, norm_of, unfolded

VISION = "vision.high.high_res_vision_model.vision_encoder"
NECKS = (f"{VISION}.neck", "vision.high.high_res_vision_neck")
SHRINK = "vision.high.high_res_vision_proj"


class HighEncoder(NativeEncoder):
    """Of a spec with a ``high`` tower."""

    def _parts(self, picture: Picture) -> tuple[Floats, ...]:
        return picture.parts[:1]

    @property
    def _high(self) -> HighTower:
        assert self.vision.high is not None
        return self.vision.high

    def _stages(self, t: Tensors) -> Iterator[Record]:
        yield from super()._stages(t)
        tower = self._high
        hidden, channels, patch = tower.hidden, tower.channels, 3 * tower.patch**2
        projection = linear(t, f"{VISION}.patch_embed.projection", True)
        yield self._stage("high.patch", patch, hidden, product={"linear": projection})
        for i in range(tower.layers):
            yield self._stage(f"high.layer{i}", hidden, hidden, layer=_layer(t, tower, i))
        for neck in NECKS:
            for k, inputs in ((1, hidden), (2, 9 * channels)):
                product = {"linear": linear(t, f"{neck}.conv{k}", False)}
                yield self._stage(f"{neck}.conv{k}", inputs, channels, product=product)
                norm = norm_of(t, f"{neck}.layer_norm{k}", channels, True, NECK_EPS)
                yield self._stage(f"{neck}.norm{k}", channels, channels, norm=norm)
        for k in (1, 2):
            product = {"linear": linear(t, f"{SHRINK}.conv{k}", False)}
            yield self._stage(f"{SHRINK}.conv{k}", 9 * k * channels, 2 * k * channels, product=product)

    def _beside(self, pictures: Sequence[Picture]) -> Floats:
        return np.concatenate([self._seen(picture) for picture in pictures])

    def _seen(self, picture: Picture) -> Floats:
        """The rows of the second tower for one picture."""
        tower, at = self._high, self._at["high.patch"]
        assert picture.more is not None
        cells = unfolded(picture.more[0].transpose(1, 2, 0), tower.patch, tower.patch)
        side = cells.shape[0]
        x = self._run(at, at, cells.reshape(side * side, -1))
        x = tapped = x + floats(self._weights[f"{VISION}.pos_embed"]).reshape(x.shape)
        order = _windowed(side, tower.window)
        first = 0
        while first < tower.layers:
            last, whole = first, first in tower.full
            while not whole and last + 1 < tower.layers and last + 1 not in tower.full:
                last += 1
            ends = self._at[f"high.layer{first}"], self._at[f"high.layer{last}"]
            x = self._run(*ends, x, ((len(x),), ())) if whole else self._windows(ends, x, order)
            tapped = x if first == tower.full[0] else tapped
            first = last + 1
        own, other = (self._shrunk(self._neck(neck, rows, side)) for neck, rows in zip(NECKS, (x, tapped), strict=True))
        return own + other * floats(self._weights["vision.high.high_res_vision_alpha"])

    def _windows(self, stages: tuple[int, int], x: Floats, order: np.ndarray) -> Floats:
        """Layers whose patches see those of their window; where the picture ends windows are filled up with zeros."""
        side, blank = self._high.window, order < 0
        rows = np.where(blank[:, None], np.float32(0), x[order])
        rows = self._run(*stages, rows, ((), (side * side,) * (len(order) // side**2)), blank=blank)
        found = np.empty_like(x)
        found[order[~blank]] = rows[~blank]
        return found

    def _neck(self, name: str, x: Floats, side: int) -> Floats:
        """[side * side, hidden] to [side, side, channels]."""
        x = self._run(self._at[f"{name}.conv1"], self._at[f"{name}.norm1"], x)
        around = np.pad(x.reshape(side, side, -1), ((1, 1), (1, 1), (0, 0)))
        near = unfolded(around, 3, 1).reshape(side * side, -1)
        return self._run(self._at[f"{name}.conv2"], self._at[f"{name}.norm2"], near).reshape(side, side, -1)

    def _shrunk(self, x: Floats) -> Floats:
        """Its rows, of a quarter of the lines."""
        x = resized(x, (4 * self._high.grid,) * 2)
        for k in (1, 2):
            near = unfolded(np.pad(x, ((1, 1), (1, 1), (0, 0))), 3, 2)
            at = self._at[f"{SHRINK}.conv{k}"]
            x = self._run(at, at, near.reshape(near.shape[0] * near.shape[1], -1)).reshape(*near.shape[:2], -1)
        return x.reshape(-1, x.shape[2])


def _windowed(side: int, window: int) -> np.ndarray:
    """Which patch stands where, window after window; -1: none."""
    count = -(-side // window)
    places = np.full((count * window,) * 2, -1)
    places[:side, :side] = np.arange(side * side).reshape(side, side)
    return places.reshape(count, window, count, window).transpose(0, 2, 1, 3).reshape(-1)


def _layer(t: Tensors, tower: HighTower, index: int) -> Record:
    name, hidden, heads = f"{VISION}.layers.{index}", tower.hidden, tower.heads
    whole = index in tower.full
    side, size = tower.side if whole else tower.window, hidden // heads
    near = {axis: t.weights[f"{name}.attn.rel_pos_{letter}"] for axis, letter in (("lines", "h"), ("columns", "w"))}
    far = {axis: {"matrix": t.add(dense(floats(x).reshape(2 * side - 1, size)))} for axis, x in near.items()}
    mlp = {"up": linear(t, f"{name}.mlp.lin1", True), "down": linear(t, f"{name}.mlp.lin2", True)}
    return {
        "heads": heads,
        "head_dim": size,
        "turned": False,
        "norm_after": False,
        "division": not whole,
        "far": {"side": side, **far},
        **{f"norm{k}": norm_of(t, f"{name}.layer_norm{k}", hidden, True, tower.eps) for k in (1, 2)},
        **{part: _third(t, f"{name}.attn.qkv", i, hidden) for i, part in enumerate("qkv")},
        "o": linear(t, f"{name}.attn.proj", True),
        "mlp": {"activation": TOWER_ACTIVATIONS["gelu"], "gate_scale": 1.0, "width": tower.inner, **mlp},
    }


def _third(t: Tensors, name: str, index: int, rows: int) -> Record:
    """Queries, keys or values of the linear that gives all three."""
    both, bias = t.weights[f"{name}.weight"], floats(t.weights[f"{name}.bias"])
    size = rows // LANES * both.meta.tile_bytes
    part = PackedTensor(both.data[index * size : (index + 1) * size], replace(both.meta, rows=rows))
    return {"matrix": t.add(part), "bias": t.numbers(bias[index * rows : (index + 1) * rows])}
