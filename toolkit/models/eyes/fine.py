"""The second tower of models whose tokens look into a larger form of the picture: ConvNeXt's stages."""

from __future__ import annotations

from itertools import pairwise

from toolkit.base.lazy_dataclass import dataclass

STEM = 4  # pixels along a side of a cell of the first stage


@dataclass(frozen=True)
class FineTower:
    """ConvNeXt over a square of ``side`` pixels. Stage i has ``depths[i]`` blocks on cells of ``widths[i]`` numbers;
    the first one's cells are ``STEM`` pixels wide, those of each other twice as wide as before. What leaves all stages
    is resized to the first one's cells and stands side by side. Names of tensors behind ``vision.high.`` are timm's.
    """

    widths: tuple[int, ...]
    depths: tuple[int, ...]
    side: int
    eps: float = 1e-6

    @property
    def outputs(self) -> int:
        """Numbers of a cell that leaves it."""
        return sum(self.widths)


def fine_tensors(tower: FineTower) -> dict[str, tuple[int, ...]]:
    """Its parameters with their shapes."""
    found: dict[str, tuple[int, ...]] = {}

    def add(name: str, *shape: int) -> None:
        found.update({f"vision.high.{name}.weight": shape, f"vision.high.{name}.bias": shape[:1]})

    add("vision_stem.0", tower.widths[0], 3, STEM, STEM)
    add("vision_stem.1", tower.widths[0])
    for i, (before, width) in enumerate(pairwise((tower.widths[0], *tower.widths))):
        stage = f"vision_stages.{i}"
        if i:
            add(f"{stage}.downsample.0", before)
            add(f"{stage}.downsample.1", width, before, 2, 2)
        for j in range(tower.depths[i]):
            block = f"{stage}.blocks.{j}"
            found[f"vision.high.{block}.gamma"] = (width,)
            add(f"{block}.conv_dw", width, 1, 7, 7)
            add(f"{block}.norm", width)
            add(f"{block}.mlp.fc1", 4 * width, width)
            add(f"{block}.mlp.fc2", width, 4 * width)
    return found
