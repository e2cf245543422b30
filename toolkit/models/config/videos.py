"""How videos are shown, from ``video_preprocessor_config.json`` or the video part of ``processor_config.json``; absent
fields are as the families' processors have them, colours as of the model's pictures."""

from __future__ import annotations

from typing import Any

from toolkit.models.config.fields import Fields
from toolkit.models.config.preprocessor import colours
from toolkit.models.eyes.pictures import Recipe
from toolkit.models.eyes.videos import Video


def shown_as(config: Fields, recipe: Recipe, changes: dict[str, Any], **more: Any) -> Video:
    """By ``recipe`` with ``changes``."""
    changes = {**colours(config, recipe.mean, recipe.std, recipe.resample), **changes}
    return Video(fps=config.number("fps", default=2.0, high=120.0), changes=changes, **more)


def area_video(vision: Fields, config: Fields, recipe: Recipe, least: int, most: int, **more: Any) -> Video:
    """Qwen2-VL's: two frames a picture, ``least`` to ``most`` pixels where the config does not say. ``vision``: the
    tower's part of config.json."""
    limit = 1 << 40
    size = config.inner("size")
    least = size.integer("shortest_edge", default=least, high=limit)
    most = size.integer("longest_edge", default=most, high=limit)
    made: dict[str, Any] = {
        "together": vision.integer("temporal_patch_size", default=2, high=16),
        "least": config.integer("min_pixels", default=least, high=limit),
        "most": config.integer("max_pixels", default=most, low=recipe.unit**2, high=limit),
    }
    return shown_as(config, recipe, {}, **made | more)
