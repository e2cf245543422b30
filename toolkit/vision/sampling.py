"""Which frames of videos are taken, as requests and options say it. Nothing here decodes any."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from toolkit.errors import UsageError
from toolkit.vision.images import Sampling

MOST_FPS = 120


def media_sampling(given: Any, default: Sampling = Sampling(), name: str = "media_io_kwargs") -> Sampling:
    """What vLLM calls ``media_io_kwargs`` says of videos, as JSON or its object. Raises UsageError, which calls it
    ``name``."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as e:
            raise UsageError(f"{name}: expected JSON, found {given!r:.40} ({e})") from e
    if given is None:
        return default
    video = given.get("video", {}) if isinstance(given, dict) else None
    if not isinstance(video, dict) or set(given) - {"video", "image"} or set(video) - {"num_frames", "fps"}:
        wanted = '{"video": {"num_frames": …, "fps": …}}'
        raise UsageError(f"{name}: expected {wanted}, found {given!r:.80}")
    try:
        return sampling_of(video, default)
    except UsageError as e:
        raise UsageError(f"{name}: {e}") from e


def sampling_of(options: Mapping[str, Any], default: Sampling) -> Sampling:
    """Which frames of one video are taken; ``default``: what holds where nothing is said. Raises UsageError."""
    count, by_second = (options.get(name) for name in ("num_frames", "fps"))
    if count is None and by_second is None:
        return default
    if count is not None and (type(count) is not int or count < 1):
        raise UsageError(f"num_frames: expected a whole number from 1 on, found {count!r:.40}")
    if by_second is not None and (type(by_second) not in (int, float) or not 0 < by_second <= MOST_FPS):
        raise UsageError(f"fps: expected a number above 0, {MOST_FPS} at most, found {by_second!r:.40}")
    return Sampling(count, by_second)
