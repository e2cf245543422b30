"""Pictures and videos read and written, by the names of LMDeploy."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.models.eyes.videos import Video
from toolkit.vision.clip import Clip
from toolkit.vision.eyes import sampling_of
from toolkit.vision.fetch import Fetching
from toolkit.vision.images import Rules, Sampling, open_image
from toolkit.vision.videos import Reader

if TYPE_CHECKING:
    from PIL.Image import Image


def load_image(source: Any, *, allow_private_media: bool = False) -> Image:
    """A picture in RGB from a URL, data URL, path, bytes or Pillow image. ``allow_private_media``: URLs may be of
    addresses that are not public, such as one's own network's. Raises UsageError, one line."""
    return open_image(source, _rules(allow_private_media))


def load_video(
    source: Any, num_frames: int | None = None, fps: float | None = None, *, allow_private_media: bool = False
) -> Clip:
    """Frames of a video from a URL, data URL, path or bytes: ``num_frames`` evenly, or ``fps`` a second; else 2 a
    second, 32 at most. A pipeline takes it where it takes a picture. ``allow_private_media``: as of ``load_image``.
    Raises UsageError, one line."""
    sampling = sampling_of({"num_frames": num_frames, "fps": fps}, Sampling())
    return Reader().open(source, _rules(allow_private_media), sampling, Video())


def _rules(private: bool) -> Rules:
    return Rules(fetching=Fetching(private=private))


def encode_image_base64(image: str | Path | bytes | Image, format: str = "JPEG") -> str:
    """A picture as base64, for a URL ``data:image/jpeg;base64,…``."""
    file = io.BytesIO()
    load_image(image).save(file, format)
    return base64.b64encode(file.getvalue()).decode()
