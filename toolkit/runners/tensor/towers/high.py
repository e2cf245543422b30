"""A tower with a second one beside it, which reads a larger form of the picture."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from toolkit.models.eyes.high import NECK_EPS
from toolkit.models.eyes.pictures import Picture
from toolkit.models.eyes.vision import Stage
from toolkit.runners.tensor.towers.vision import Encoder


class HighEncoder(Encoder):
    """Of a spec with a ``high`` tower."""

    def _parts(self, picture: Picture) -> tuple[NDArray[np.float32], ...]:
        return picture.parts[:1]

    def _tiles(self, tiles: Tensor, picture: Picture, rows: int, columns: int, stages: tuple[Stage, ...]) -> Tensor:
        return self._project(tiles, rows, columns, stages, self._beside(picture))

    def _beside(self, picture: Picture) -> Tensor:
        """The rows of the second tower, [1, rows, its outputs]."""
        tower, begin = self.spec.high, "high_res_vision_model.vision_encoder."
        assert tower is not None and picture.more is not None
        pixels = torch.from_numpy(picture.more).to(self.device, self.dtype)
        weight, bias = (self._own(f"{begin}patch_embed.projection.{part}") for part in ("weight", "bias"))
        x = functional.conv2d(pixels, weight, bias, stride=tower.patch).permute(0, 2, 3, 1)
        x = x + self._own(f"{begin}pos_embed")
        tapped = x
        for i in range(tower.layers):
            x = self._high_layer(f"{begin}layers.{i}.", x, 0 if i in tower.full else tower.window)
            tapped = x if i == tower.full[0] else tapped
        last = self._shrunk(self._neck(f"{begin}neck", x))
        weighted = self._shrunk(self._neck("high_res_vision_neck", tapped)) * self._own("high_res_vision_alpha")
        return (last + weighted).flatten(2).transpose(1, 2)

    def _own(self, name: str) -> Tensor:
        return self.weights[f"vision.high.{name}"]

    def _high_layer(self, name: str, x: Tensor, window: int) -> Tensor:
        """[1, rows, columns, hidden]. ``window``: patches along a side that see each other, 0 = all."""
        assert self.spec.high is not None
        eps, (_, rows, columns, _), begin = self.spec.high.eps, x.shape, f"vision.high.{name}"
        y = self._norm(f"{begin}layer_norm1", x, "layer", eps)
        if window:
            y = functional.pad(y, (0, 0, 0, -columns % window, 0, -rows % window))
            down, across = y.shape[1] // window, y.shape[2] // window
            y = y.unflatten(2, (across, window)).unflatten(1, (down, window)).transpose(2, 3).flatten(0, 2)
        y = self._near(begin, y)
        if window:
            y = y.unflatten(0, (1, down, across)).transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, :rows, :columns]
        x = x + y
        y = self._norm(f"{begin}layer_norm2", x, "layer", eps)
        return x + self._linear(f"{begin}mlp.lin2", functional.gelu(self._linear(f"{begin}mlp.lin1", y)))

    def _near(self, begin: str, x: Tensor) -> Tensor:
        """Attention within each of [windows, side, side, hidden]; what is learned of distances adds to the scores."""
        assert self.spec.high is not None
        count, side, _, _ = x.shape
        qkv = self._linear(f"{begin}attn.qkv", x.flatten(1, 2)).unflatten(2, (3, self.spec.high.heads, -1))
        far = (torch.arange(side)[:, None] - torch.arange(side) + side - 1).to(x.device)
        below, beside = (self.weights[f"{begin}attn.rel_pos_{axis}"][far] for axis in "hw")
        found = []
        for q, k, v in qkv.permute(3, 2, 0, 1, 4):  # head by head: the scores of all are gigabytes
            grid = q.unflatten(1, (side, side))
            down, across = torch.einsum("wyxd,ykd->wyxk", grid, below), torch.einsum("wyxd,xkd->wyxk", grid, beside)
            added = (down[..., :, None] + across[..., None, :]).flatten(3).flatten(1, 2)
            found.append(functional.scaled_dot_product_attention(q, k, v, attn_mask=added))
        return self._linear(f"{begin}attn.proj", torch.cat(found, -1)).view(count, side, side, -1)

    def _neck(self, name: str, x: Tensor) -> Tensor:
        """[1, rows, columns, hidden] to [1, channels, rows, columns]."""
        x = x.permute(0, 3, 1, 2)
        for k, padding in ((1, 0), (2, 1)):
            x = functional.conv2d(x, self._own(f"{name}.conv{k}.weight"), padding=padding)
            y = self._norm(f"vision.high.{name}.layer_norm{k}", x.permute(0, 2, 3, 1), "layer", NECK_EPS)
            x = y.permute(0, 3, 1, 2)
        return x

    def _shrunk(self, x: Tensor) -> Tensor:
        assert self.spec.high is not None
        x = functional.interpolate(x, (4 * self.spec.high.grid,) * 2, mode="bilinear", align_corners=False)
        for k in (1, 2):
            x = functional.conv2d(x, self._own(f"high_res_vision_proj.conv{k}.weight"), stride=2, padding=1)
        return x
