"""Which class runs a tower on the native library."""

from __future__ import annotations

from toolkit.models.vision import VisionSpec
from toolkit.runners.native.packed import PackedWeights
from toolkit.runners.native.tiled_tower import TiledEncoder
from toolkit.runners.native.tower import NativeEncoder


def open_encoder(vision: VisionSpec, weights: PackedWeights, *, bf16: bool, threads: int) -> NativeEncoder:
    """See ``NativeEncoder``."""
    kind = TiledEncoder if vision.tower.tiles else NativeEncoder
    return kind(vision, weights, bf16=bf16, threads=threads)
