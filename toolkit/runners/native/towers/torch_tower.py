"""What a model sees with where the library does not run it: in torch, beside a language model that it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from toolkit.models.eyes.pictures import Picture
from toolkit.models.eyes.vision import VisionSpec
from toolkit.runners.base import RunnerError
from toolkit.runners.native.packing.unpack import UnpackedWeights
from toolkit.runners.tensor.devices.find import find_dtype
from toolkit.runners.tensor.towers.encoders import encoder_of


class TorchEncoder:
    """As ``NativeEncoder``; ``packed`` says that ``weights`` are. ``exact``: in float32, else in bfloat16 where the
    processor multiplies that."""

    held = ()  # nothing that the library points into

    def __init__(self, vision: VisionSpec, weights: Mapping[str, Any], *, packed: bool, exact: bool) -> None:
        device = torch.device("cpu")
        dtype = find_dtype("float32" if exact else "auto", torch.float16, device)
        known = UnpackedWeights(weights) if packed else weights
        self._encoder = encoder_of(vision)(vision, known, device, dtype)

    def encode(self, pictures: Sequence[Picture]) -> list[NDArray[np.float32]]:
        """The rows of each picture, [tokens, hidden of the language model]. RunnerError where torch fails."""
        try:
            return [rows.float().numpy() for rows in self._encoder.encode(pictures)]
        except RuntimeError as e:
            raise RunnerError(f"{len(pictures)} pictures cannot be encoded: {e}") from e

    def close(self) -> None:
        """Nothing is held that would not go by itself."""
