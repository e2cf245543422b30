"""Recipes from ``preprocessor_config.json``, or the image part of ``processor_config.json``; absent fields are as the
families' processors have them."""

from __future__ import annotations

from typing import Any

from toolkit.models.config_fields import Fields
from toolkit.models.towers import side
from toolkit.models.vision import Recipe

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
MOST = 1 << 16  # pixels along a side
FILTERS = 6  # of Pillow's


def colours(config: Fields, mean: tuple[float, ...] = CLIP_MEAN, std: tuple[float, ...] = CLIP_STD) -> dict[str, Any]:
    """Mean, deviation and filter. Raises ToolkitError for a config that asks for another way than all released ones."""
    factor = config.number("rescale_factor", default=1 / 255)
    if abs(factor * 255 - 1) > 1e-3:
        config.fail("rescale_factor", factor, "1/255")
    for name in ("do_resize", "do_rescale", "do_normalize"):
        if not config.flag(name, True):
            config.fail(name, False, "true")
    return {
        "mean": _three(config, "image_mean", mean),
        "std": _three(config, "image_std", std),
        "resample": config.integer("resample", default=3, low=0, high=FILTERS),
    }


def _three(config: Fields, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
    value = config.values.get(name)
    if value is None:
        return default
    if not isinstance(value, list) or len(value) != 3 or not all(type(x) in (int, float) for x in value):
        config.fail(name, value, "three numbers")
    if name == "image_std" and min(value) <= 0:
        config.fail(name, value, "three numbers above 0")
    return tuple(float(x) for x in value)


def both_sides(config: Fields, name: str, default: tuple[int, int]) -> tuple[int, int]:
    """(height, width) of an object that gives these, or the shortest edge for both."""
    value = config.values.get(name)
    if isinstance(value, int) and not isinstance(value, bool):
        value = {"height": value, "width": value}
    found = Fields(value, config.source, f"{config.prefix}{name}.") if isinstance(value, dict) else None
    if found is None:
        return default
    if found.has("shortest_edge"):
        return (found.integer("shortest_edge", high=MOST),) * 2
    return found.integer("height", high=MOST), found.integer("width", high=MOST)


def longest(config: Fields, name: str, default: int) -> int:
    found = config.nested(name)
    if found is None:
        return default
    return found.integer("longest_edge", "height", default=default, high=MOST)


def clip_recipe(tower: Fields, config: Fields, **changes: Any) -> Recipe:
    """The short side to one length, then the middle; or a square where the config gives both sides (SigLIP)."""
    image, patch = side(tower, "image_size", 336), side(tower, "patch_size", 14)
    siglip = tower.values.get("model_type") == "siglip_vision_model"
    size = config.nested("size")
    square = siglip if size is None else not size.has("shortest_edge")
    short = both_sides(config, "size", (image, image))
    crop = short if square else both_sides(config, "crop_size", (image, image))
    if crop != (image, image):
        config.fail("crop_size", crop[0], f"{image}, the tower's image_size")
    made: dict[str, Any] = {
        "kind": "square" if square else "crop",
        "size": crop,
        "short": short[0],
        "unit": patch,
        "pad": config.flag("do_pad", False),
        "per_tile": (image // patch) ** 2,
        **(colours(config, HALF, HALF) if siglip else colours(config)),
    }
    return Recipe(**(made | changes))


def fit_recipe(tower: Fields, config: Fields, merge: int) -> Recipe:
    """Pixtral's: the picture's own ratio, a line of tokens each row."""
    patch = side(tower, "patch_size", 16)
    return Recipe(
        kind="fit",
        size=(0, 0),
        unit=patch * merge,
        long=longest(config, "size", 1024),
        spelled="lines",
        mark="[IMG]",
        token="[IMG]",
        before="[IMG_BREAK]",
        after="[IMG_END]",
        **colours(config),
    )
