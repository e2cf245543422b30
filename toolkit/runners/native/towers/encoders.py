"""Which class runs a tower on the native library."""

from __future__ import annotations

from toolkit.models.eyes.vision import VisionSpec
from toolkit.runners.native.packing.packed import PackedWeights
from toolkit.runners.native.towers.fine_tower import FineEncoder
from toolkit.runners.native.towers.high_tower import HighEncoder
from toolkit.runners.native.towers.overlap_tower import OverlapEncoder
from toolkit.runners.native.towers.tiled_tower import TiledEncoder
from toolkit.runners.native.towers.tower import NativeEncoder


def open_encoder(vision: VisionSpec, weights: PackedWeights, *, bf16: bool, threads: int) -> NativeEncoder:
    """See ``NativeEncoder``."""
    kind: type[NativeEncoder] = TiledEncoder if vision.tower.tiles else NativeEncoder
    if vision.high is not None:
        kind = HighEncoder
    elif vision.fine is not None:
        kind = FineEncoder
    elif vision.overlap:
        kind = OverlapEncoder
    return kind(vision, weights, bf16=bf16, threads=threads)
