"""Some frames of a video."""

from __future__ import annotations

from dataclasses import field

import numpy as np
from numpy.typing import NDArray

from toolkit.base.lazy_dataclass import dataclass


@dataclass(frozen=True, eq=False)
class Clip:
    """``frames``: uint8 [frames, height, width, 3]. ``seconds``: when each is shown. ``rate``: how many of them there
    are for a second of the video."""

    frames: NDArray[np.uint8] = field(repr=False)
    seconds: tuple[float, ...]
    rate: float

    def __len__(self) -> int:
        return len(self.frames)
