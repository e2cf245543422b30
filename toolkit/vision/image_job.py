"""The tiles of a picture's file: the job of a confined process (``toolkit.box``), as files come from anyone."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

from toolkit.base.record import read
from toolkit.box.box import STAND_BACK
from toolkit.errors import UsageError
from toolkit.models.eyes.pictures import Recipe
from toolkit.vision.images import FORMATS, Rules, open_image
from toolkit.vision.recipes import tiles_of


def start(setup: Any, data: bytes) -> Callable[[Any, bytes], tuple[Any, Any]]:
    """``run(value, data)``: ``value`` has ``recipe`` and ``alone`` as ``tiles_of`` takes them, ``max_pixels``, and what
    messages call the picture, ``shown``; ``data`` is the file. Gives its ``size``, the ``grid``, and of each tile shape
    and dtype, and their bytes. Raises ValueError: what is wrong."""
    from PIL import Image

    for name in FORMATS:  # before the forks, which need not import them then
        import_module(f"PIL.{name.title() if name != 'WEBP' else 'WebP'}ImagePlugin")
    Image.preinit()
    os.nice(STAND_BACK)

    def run(value: dict[str, Any], data: bytes) -> tuple[Any, Any]:
        rules = Rules(files=(), fetching=None, max_bytes=len(data), max_pixels=value["max_pixels"])
        try:
            image = open_image(data, rules, value["shown"])
            tiles, grid = tiles_of(read(Recipe, value["recipe"]), image, value["alone"])
        except UsageError as e:
            raise ValueError(str(e)) from e
        about = [(tile.shape, tile.dtype.name) for tile in tiles]
        pieces = [tile.tobytes() for tile in tiles]
        return {"size": (image.height, image.width), "grid": grid, "tiles": about}, pieces

    return run
