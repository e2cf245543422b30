"""The second tower of models that see a picture in two sizes: SAM's, made as small by convolutions."""

from __future__ import annotations

from toolkit.base.lazy_dataclass import dataclass

NECK_EPS = 1e-6  # of the norms behind its convolutions; ``HighTower.eps`` is that of its layers


@dataclass(frozen=True)
class HighTower:
    """SAM's vision transformer over the square patches of a picture of ``side`` × ``side`` of them.

    Places are learned, and those of keys by their distance to the query. Layers attend within windows of ``window``
    patches along a side (zeros where the picture ends), those of ``full`` to all; what leaves the first of these is
    taken too. Both go through two convolutions with norms to ``channels``, are resized to four times ``grid`` along a
    side, and go through two more convolutions that halve the sides and double the channels. The second is weighted by
    one number. Names of tensors behind ``vision.high.`` are those of transformers.
    """

    layers: int
    hidden: int
    heads: int
    inner: int
    patch: int
    side: int
    channels: int
    window: int
    full: tuple[int, ...]
    grid: int
    eps: float = 1e-6

    @property
    def outputs(self) -> int:
        """Numbers of a row that leaves it."""
        return 4 * self.channels


def high_tensors(tower: HighTower) -> dict[str, tuple[int, ...]]:
    """Its parameters with their shapes."""
    hidden, channels, begin = tower.hidden, tower.channels, "high_res_vision_model.vision_encoder."
    found: dict[str, tuple[int, ...]] = {
        f"{begin}patch_embed.projection.weight": (hidden, 3, tower.patch, tower.patch),
        f"{begin}patch_embed.projection.bias": (hidden,),
        f"{begin}pos_embed": (1, tower.side, tower.side, hidden),
    }
    for i in range(tower.layers):
        name, size = f"{begin}layers.{i}.", tower.side if i in tower.full else tower.window
        linears = {
            "attn.qkv": (3 * hidden, hidden),
            "attn.proj": (hidden, hidden),
            "mlp.lin1": (tower.inner, hidden),
            "mlp.lin2": (hidden, tower.inner),
            "layer_norm1": (hidden,),
            "layer_norm2": (hidden,),
        }
        for part, shape in linears.items():
            found |= {f"{name}{part}.weight": shape, f"{name}{part}.bias": shape[:1]}
        found |= {f"{name}attn.rel_pos_{axis}": (2 * size - 1, hidden // tower.heads) for axis in "hw"}
    for neck in (f"{begin}neck", "high_res_vision_neck"):
        for k, shape in ((1, (channels, hidden, 1, 1)), (2, (channels, channels, 3, 3))):
            found[f"{neck}.conv{k}.weight"] = shape
            found |= {f"{neck}.layer_norm{k}.{part}": (channels,) for part in ("weight", "bias")}
    found["high_res_vision_proj.conv1.weight"] = (2 * channels, channels, 3, 3)
    found["high_res_vision_proj.conv2.weight"] = (4 * channels, 2 * channels, 3, 3)
    found["high_res_vision_alpha"] = (1,)
    return {f"vision.high.{name}": shape for name, shape in found.items()}
