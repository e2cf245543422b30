"""Pictures to ask a model about when measuring it: shapes in colours, drawn by a seed."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np

from toolkit.base import extras

SHAPES = 12
COLOURS = ("red", "green", "blue", "yellow", "black", "white", "orange", "purple", "brown", "grey")


@extras.named()
def drawings(seed: int, count: int, size: tuple[int, int]) -> list[Any]:
    """``count`` Pillow images of ``size`` (width, height), no two alike."""
    from PIL import Image, ImageDraw

    rng, found = np.random.default_rng(seed), []
    for _ in range(count):
        image = Image.new("RGB", size, tuple(rng.integers(0, 256, 3).tolist()))
        draw = ImageDraw.Draw(image)
        for _ in range(SHAPES):
            x, y = (np.sort(rng.integers(0, side + 1, 2)).tolist() for side in size)
            shape = draw.ellipse if rng.random() < 0.5 else draw.rectangle
            shape([x[0], y[0], x[1], y[1]], fill=str(rng.choice(COLOURS)))
        found.append(image)
    return found


def data_url(image: Any) -> str:
    """As PNG."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
