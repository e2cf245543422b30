"""Recipes from ``preprocessor_config.json``, or the image part of ``processor_config.json``; absent fields are as the
families' processors have them."""

from __future__ import annotations

import math
from typing import Any

from toolkit.models.config.fields import Fields
from toolkit.models.eyes.pictures import Recipe
from toolkit.models.eyes.towers import side

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF = (0.5, 0.5, 0.5)
MOST = 1 << 16  # pixels along a side
FILTERS, LANCZOS, BILINEAR = 6, 1, 2  # of Pillow's: how many there are, and two of them


def colours(
    config: Fields, mean: tuple[float, ...] = CLIP_MEAN, std: tuple[float, ...] = CLIP_STD, resample: int = 3
) -> dict[str, Any]:
    """Mean, deviation and filter. Raises ToolkitError for a config that asks for another way than all released ones."""
    factor = config.number("rescale_factor", default=1 / 255)
    if abs(factor * 255 - 1) > 1e-3:
        config.fail("rescale_factor", factor, "1/255")
    config.only("", do_resize=True, do_rescale=True, do_normalize=True)
    return {
        "mean": _three(config, "image_mean", mean),
        "std": _three(config, "image_std", std),
        "resample": config.integer("resample", default=resample, low=0, high=FILTERS),
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


def check_size(config: Fields, image: int, name: str = "size", whose: str = "the tower's image_size") -> None:
    """Raise ToolkitError where ``name`` is another size than a square of ``image``, as it is where absent."""
    size = both_sides(config, name, (image, image))
    if size != (image, image):
        config.fail(name, size[0], f"{image}, {whose}")


def longest(config: Fields, name: str, default: int) -> int:
    found = config.nested(name)
    if found is None:
        return default
    return found.integer("longest_edge", "height", default=default, high=MOST)


def clip_recipe(tower: Fields, config: Fields, **changes: Any) -> Recipe:
    """The short side to one length, then the middle; or a square where the config gives both sides (SigLIP)."""
    image, patch = side(tower, "image_size", 336), side(tower, "patch_size", 14)
    siglip = tower.values.get("model_type") == "siglip_vision_model"
    one = type(config.values.get("size")) is int  # the short side of CLIP's, both of SigLIP's
    size = None if one else config.nested("size")
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


def scan_recipe(tower: Fields, config: Fields, tokens: int) -> Recipe:
    """Gemma 3's: a square; with ``do_pan_and_scan`` long pictures in parts besides, ``tokens`` each."""
    image = side(tower, "image_size", 896)
    check_size(config, image)
    scans = config.flag("do_pan_and_scan", False)
    return Recipe(
        kind="scan",
        size=(image, image),
        unit=image // math.isqrt(tokens),
        least=config.integer("pan_and_scan_min_crop_size", default=256, high=MOST),
        most=config.integer("pan_and_scan_max_num_crops", default=4, high=256) if scans else 0,
        steep=config.number("pan_and_scan_min_ratio_to_activate", default=1.2, low=1.0),
        per_tile=tokens,
        spelled="scan",
        mark="<start_of_image>",
        written="<start_of_image>",
        token="<image_soft_token>",
        before="\n\n<start_of_image>",
        after="<end_of_image>\n\n",
        **colours(config, HALF, HALF, BILINEAR),
    )


def canvas_recipe(tower: Fields, config: Fields, shapes: tuple[tuple[int, int], ...]) -> Recipe:
    """Llama 3.2 Vision's: the one of ``shapes`` (rows and columns of tiles) that it fits into, one token for all."""
    image, patch = side(tower, "image_size", 448), side(tower, "patch_size", 14)
    check_size(config, image)
    most = config.integer("max_image_tiles", default=tower.integer("max_num_tiles", high=64), high=64)
    fitting = tuple((image * rows, image * columns) for rows, columns in shapes if rows * columns <= most)
    if not fitting:
        config.fail("max_image_tiles", most, f"as many as one of {list(shapes)}, rows and columns of tiles")
    return Recipe(
        kind="canvas",
        size=(image, image),
        unit=patch,
        canvases=fitting,
        most=max(height * width for height, width in fitting) // image**2,
        per_tile=-(-((image // patch) ** 2 + 1) // 8) * 8,
        mark="<|image|>",
        written="<|image|>",
        token="<|image|>",
        **colours(config, HALF, HALF, BILINEAR),
    )


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


def canvases(
    config: Fields, default: tuple[tuple[int, int], ...], tower: Fields, name: str = "image_grid_pinpoints"
) -> tuple[tuple[int, int], ...]:
    """``name``: both sides of each canvas, cut into tiles for the tower."""
    value = config.values.get(name)
    if value is None:
        value = [list(canvas) for canvas in default]
    tile = side(tower, "image_size", 336)
    good = isinstance(value, list) and 0 < len(value) <= 1000
    good = good and all(
        isinstance(c, list) and len(c) == 2 and all(type(x) is int and 0 < x < MOST for x in c) for c in value
    )
    if not good:
        config.fail(name, value, "a list of [height, width]")
    if any(x % tile for c in value for x in c):
        config.fail(name, value, f"multiples of {tile}, the tower's image_size")
    return tuple((c[0], c[1]) for c in value)


def area_recipe(tower: Fields, config: Fields) -> Recipe:
    """Qwen2-VL's: both sides to multiples of a token's, so many pixels at least and at most."""
    size = config.inner("size")
    limit = 1 << 30
    least = size.integer("shortest_edge", default=56 * 56, high=limit)
    most = size.integer("longest_edge", default=28 * 28 * 1280, high=limit)
    unit = _as_tower(config, "patch_size", tower, "patch_size", 14) * _as_tower(
        config, "merge_size", tower, "spatial_merge_size", 2
    )
    return Recipe(
        kind="area",
        size=(0, 0),
        unit=unit,
        least=config.integer("min_pixels", default=least, high=limit),
        most=config.integer("max_pixels", default=most, low=unit**2, high=limit),
        mark="<|image_pad|>",
        written="<|vision_start|><|image_pad|><|vision_end|>",
        token="<|image_pad|>",
        **colours(config),
    )


def shown_numbers(config: Fields, signed: bool = True) -> Fields:
    """Gemma 4's, for ``colours``: its processor norms if told to. ``signed``: its tower takes that to -1 … 1."""
    norms = config.flag("do_normalize", False)
    mean, std = ((_three(config, name, (x,) * 3) if norms else (x,) * 3) for name, x in SHOWN)
    if signed:
        mean, std = tuple(m + s / 2 for m, s in zip(mean, std, strict=True)), tuple(s / 2 for s in std)
    ours = {"image_mean": list(mean), "image_std": list(std)}
    return config.changed({**ours, "do_normalize": True})


SHOWN = (("image_mean", 0.0), ("image_std", 1.0))


def fill_recipe(tower: Fields, config: Fields, merge: int, tokens: int, signed: bool = True) -> Recipe:
    """Gemma 4's: as many tokens as there may be, ``merge`` patches along a side each; ``tokens`` where nothing is
    said. ``signed``: as ``shown_numbers`` has it."""
    patch = _as_tower(config, "patch_size", tower, "patch_size", 16)
    if (found := config.integer("pooling_kernel_size", default=merge, high=16)) != merge:
        config.fail("pooling_kernel_size", found, f"{merge}, as the tower has it")
    most = config.integer("max_soft_tokens", default=tokens, low=16, high=1 << 14)
    unit = patch * merge
    return Recipe(kind="fill", size=(0, 0), unit=unit, most=most * unit**2, **colours(shown_numbers(config, signed)))


def _as_tower(config: Fields, name: str, tower: Fields, theirs: str, default: int) -> int:
    """What the tower has as ``theirs``: of patches of another size the places of a picture's rows would be too few or
    too many. Raises ToolkitError where ``name`` says otherwise."""
    wanted = side(tower, theirs, default)
    if (found := side(config, name, wanted)) != wanted:
        config.fail(name, found, f"{wanted}, the tower's {theirs}")
    return wanted


def split_recipe(tower: Fields, config: Fields, factor: int) -> Recipe:
    """Idefics 3's: tiles named by row and column, ``factor`` patches along a side a token."""
    image, patch = side(tower, "image_size"), side(tower, "patch_size")
    tile = longest(config, "max_image_size", 364)
    if tile != image:
        config.fail("max_image_size", tile, f"{image}, the tower's image_size")
    return Recipe(
        kind="split",
        size=(tile, tile),
        unit=patch * factor,
        long=longest(config, "size", 4 * 364),
        most=int(config.flag("do_image_splitting", True)),
        per_tile=(image // (patch * factor)) ** 2,
        spelled="split",
        written="<image>",
        before="<fake_token_around_image>",
        after="<global-img>",
        **colours(config, HALF, HALF, LANCZOS),
    )


def tiles_recipe(tower: Fields, config: Fields, factor: int, **changes: Any) -> Recipe:
    """InternVL's: the nearest grid of tiles, ``factor`` patches along a side a token."""
    image, patch = side(tower, "image_size"), side(tower, "patch_size", 14)
    check_size(config, image)
    made: dict[str, Any] = {
        "kind": "tiles",
        "size": (image, image),
        "unit": patch * factor,
        "least": config.integer("min_patches", default=1, high=256),
        "most": config.integer("max_patches", default=12, high=256),
        "per_tile": (image // (patch * factor)) ** 2,
        "mark": "<IMG_CONTEXT>",
        "written": "<IMG_CONTEXT>\n",
        "token": "<IMG_CONTEXT>",
        "before": "<img>",
        "after": "</img>",
        **colours(config),
    }
    return Recipe(**(made | changes))


def lined_recipe(tower: Fields, config: Fields, factor: int, token: str) -> Recipe:
    """Phi-3-vision's: lines of tiles, ``factor`` patches along a side a token."""
    image, patch = side(tower, "image_size", 336), side(tower, "patch_size", 14)
    return Recipe(
        kind="lined",
        size=(image, image),
        unit=patch * factor,
        most=config.integer("num_crops", default=1, high=256),
        per_tile=(image // (patch * factor)) ** 2,
        mark=token,
        written=f"{token}\n",
        token=token,
        **colours(config) | {"resample": BILINEAR},
    )


def slices_recipe(tower: Fields, config: Fields, queries: int) -> Recipe:
    """MiniCPM-V's: slices in their own ratio, ``queries`` tokens each."""
    found = {
        theirs: config.values.get(f"norm_{name}") for name, theirs in (("mean", "image_mean"), ("std", "image_std"))
    }
    side_of_slice = config.integer("scale_resolution", default=448, high=MOST)
    sliced = config.flag("slice_mode", True)
    return Recipe(
        kind="slices",
        size=(side_of_slice, side_of_slice),
        unit=config.integer("patch_size", default=side(tower, "patch_size", 14), high=1024),
        most=config.integer("max_slice_nums", default=9, high=256) if sliced else 1,
        per_tile=queries,
        spelled="slices",
        mark="(<image>./</image>)",
        written="(<image>./</image>)\n",
        token="<unk>",
        before="<image>",
        after="</image>",
        inner=("<slice>", "</slice>"),
        numbered=config.flag("use_image_id", False),
        **colours(Fields(found, config.source), HALF, HALF),
    )
