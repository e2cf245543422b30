"""Which encoder runs a tower."""

from __future__ import annotations

from toolkit.models.eyes.vision import VisionSpec
from toolkit.runners.tensor.towers.fine import FineEncoder
from toolkit.runners.tensor.towers.high import HighEncoder
from toolkit.runners.tensor.towers.overlap import OverlapEncoder
from toolkit.runners.tensor.towers.tiled import TiledEncoder
from toolkit.runners.tensor.towers.vision import Encoder


def encoder_of(spec: VisionSpec) -> type[Encoder]:
    if spec.high is not None:
        return HighEncoder
    if spec.fine is not None:
        return FineEncoder
    if spec.overlap:
        return OverlapEncoder
    return TiledEncoder if spec.tower.tiles else Encoder
