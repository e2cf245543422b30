"""Pictures read and written, by the names of LMDeploy."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.vision.images import Rules, open_image

if TYPE_CHECKING:
    from PIL.Image import Image


def load_image(source: Any) -> Image:
    """A picture in RGB from a URL, data URL, path, bytes or Pillow image. Raises UsageError, one line."""
    return open_image(source, Rules())


def encode_image_base64(image: str | Path | bytes | Image, format: str = "JPEG") -> str:
    """A picture as base64, for a URL ``data:image/jpeg;base64,…``."""
    file = io.BytesIO()
    load_image(image).save(file, format)
    return base64.b64encode(file.getvalue()).decode()
