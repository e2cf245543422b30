"""The tower of Llama 3.2 Vision: the tiles of a picture see each other, and layers over all of them follow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from toolkit.models.eyes.patches import patch_grid
from toolkit.models.eyes.pictures import Picture
from toolkit.runners.tensor.towers.vision import Encoder

WHOLE = 8  # of which each tile's tokens are a multiple, zeros behind them


class TiledEncoder(Encoder):
    """Of a spec whose tower has ``tiles``."""

    @torch.inference_mode()
    def encode(self, pictures: Sequence[Picture]) -> list[Tensor]:
        """The rows of each picture, [tiles · (patches + 1), hidden of the language model]."""
        return [self._picture(picture) for picture in pictures]

    def _picture(self, picture: Picture) -> Tensor:
        tower, count = self.tower, len(picture.pixels)
        rows, columns = patch_grid(picture.pixels, tower.patch)
        shape = tower.shapes.index(picture.grid) + 1
        pixels = torch.zeros(tower.tiles, *picture.pixels.shape[1:], device=self.device, dtype=self.dtype)
        pixels[:count] = torch.from_numpy(picture.pixels)
        x = self._patches(pixels, (rows, columns))
        x = x + self._of_tile("vision.tile_before", shape)
        x = torch.cat([self.weights["vision.class"].expand(len(x), 1, -1), x], 1)
        places = self.weights["vision.tile_position"][shape].view(x.shape)
        gate = self._gate("vision.position_gate")
        x = x + (1 - gate) * self.weights["vision.position"] + gate * places
        x, size = self._own_norm("vision.pre_norm", x), x.shape[1]
        x = functional.pad(x, (0, 0, 0, -size % WHOLE))
        real = torch.zeros(x.shape[:2], dtype=torch.bool, device=self.device)
        real[:count, :size] = True
        x = self._through(x, real.flatten(), self._of_tile("vision.tile_after", shape))
        return self._project(x[:count, :size], rows, columns, self.spec.projector).flatten(0, 1)

    def _through(self, x: Tensor, real: Tensor, after: Tensor) -> Tensor:
        """All layers. ``real``: which of the flat tokens stand for something; ``after``: added to those of each tile
        before the layers over all. [tiles, tokens, outputs].
        """
        tower, shape = self.tower, x.shape[:2]
        x, gathered = x.flatten(0, 1), []
        for i in range(tower.taken):
            x = self._layer(f"vision.layers.{i}", x, real)
            if i in tower.gathered:
                gathered.append(x)
        x = self._own_norm("vision.post_norm", x).unflatten(0, shape)
        x = (x + after).flatten(0, 1)
        for i in range(tower.over_all):
            x = self._layer(f"vision.over_all.{i}", x, real, gated=True)
        if gathered:
            x = torch.cat([x, torch.stack(gathered, -1).flatten(1)], 1)
        return x.unflatten(0, shape)

    def _gate(self, name: str) -> Tensor:
        return torch.tanh(self.weights[name].float()).to(self.dtype)

    def _of_tile(self, name: str, shape: int) -> Tensor:
        """What tells the tiles of a picture of this shape apart, [tiles, 1, hidden]."""
        return self.weights[name][shape].view(self.tower.tiles, 1, -1) * self._gate(f"{name}_gate")

    def _layer(self, name: str, x: Tensor, real: Tensor, gated: bool = False) -> Tensor:
        gates = [self._gate(f"{name}.gate{k}") for k in (1, 2)] if gated else [1.0, 1.0]
        x = x + self._look(name, self._own_norm(f"{name}.norm1", x), real) * gates[0]
        return x + self._mlp(name, self._own_norm(f"{name}.norm2", x)) * gates[1]

    def _look(self, name: str, x: Tensor, real: Tensor) -> Tensor:
        """Attention of all tokens to all, but for those that stand for nothing, which do not see each other."""
        heads = (self.tower.heads, self.tower.head_dim)
        q, k, v = (self._linear(f"{name}.{part}", x).unflatten(1, heads).transpose(0, 1) for part in ("q", "k", "v"))
        out = torch.empty_like(v)
        out[:, real] = functional.scaled_dot_product_attention(q[:, real][None], k[None], v[None])[0]
        out[:, ~real] = functional.scaled_dot_product_attention(q[:, ~real][None], k[:, real][None], v[:, real][None])[
            0
        ]
        return self._linear(f"{name}.o", out.transpose(0, 1).flatten(1))
