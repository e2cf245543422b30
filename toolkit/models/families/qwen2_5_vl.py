"""Qwen2.5-VL: Qwen2-VL with a gated tower of RMS norms, whose layers but a few attend within windows.
Source: transformers ``Qwen2_5_VLForConditionalGeneration``, arXiv 2502.13923."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.models.config.fields import Fields
from toolkit.models.config.videos import area_video
from toolkit.models.decoder import Built
from toolkit.models.eyes.mmproj import Clip, Mmproj
from toolkit.models.eyes.pictures import Recipe
from toolkit.models.eyes.towers import activation
from toolkit.models.eyes.videos import Video
from toolkit.models.eyes.vision import VisionSpec
from toolkit.models.families import qwen2_vl
from toolkit.models.families.qwen2_vl import AROUND, PIXELS, PREPROCESSOR, SPELLINGS, TEXT, recipe, tower, whole
from toolkit.models.family import Family, Tiny

FULL = (7, 15, 23, 31)  # layers without windows, where the config does not say
WINDOW = 112  # pixels along a side, of released models and of all in llama.cpp


def build(config: Fields) -> Built:
    vision = config.inner("vision_config")
    plain = tower(
        vision,
        vision.integer("hidden_size", default=1280, high=1 << 16),
        inner=vision.integer("intermediate_size", default=3420, high=1 << 18),
        activation=activation(vision, "silu"),
        norm="rms",
        gated=True,
    )
    merge = vision.integer("spatial_merge_size", default=2, high=16)
    window = vision.integer("window_size", default=WINDOW, high=1 << 16) // (plain.patch * merge) * merge
    whole_ones = vision.filled({"fullatt_block_indexes": [i for i in FULL if i < plain.layers]})
    full = tuple(sorted(whole_ones.indices("fullatt_block_indexes", plain.layers)))
    made = replace(plain, window=window, full=full)
    return whole(config, made, {name: f"mlp.{name}_proj" for name in ("gate", "up", "down")})


def video(config: Fields, preprocessor: Fields, recipe: Recipe) -> Video:
    vision = config.inner("vision_config")
    ticks = vision.number("tokens_per_second", default=4.0, high=1e6)
    return area_video(vision, preprocessor, recipe, *PIXELS, ticks=ticks, said="{tokens}", around=AROUND)


def _read(clip: Clip) -> tuple[dict[str, Any], dict[str, Any]]:
    vision = qwen2_vl.read_vision(clip)
    every = clip.whole("n_wa_pattern")
    vision |= {
        "hidden_size": clip.whole("embedding_length"),
        "intermediate_size": clip.inner,
        "hidden_act": "silu",
        "window_size": clip.whole("window_size", WINDOW),
        "fullatt_block_indexes": list(range(every - 1, vision["depth"], every)),
    }
    return {"vision_config": vision, "image_token_id": clip.token("<|image_pad|>")}, qwen2_vl.read_pixels(clip)


def _write(vision: VisionSpec, recipe: Recipe) -> dict[str, Any]:
    tower = vision.tower
    every = tower.full[0] + 1 if tower.full else 0
    if not every or tower.full != tuple(range(every - 1, tower.layers, every)):
        raise ToolkitError("gguf: llama.cpp's qwen2.5vl_merger attends to all in each n-th layer alone")
    if tower.window * tower.patch != WINDOW:
        raise ToolkitError(f"gguf: llama.cpp's qwen2.5vl_merger has windows of {WINDOW} pixels alone")
    pixels = qwen2_vl.write_pixels(vision, recipe)
    return pixels | {"clip.vision.n_wa_pattern": every, "clip.vision.window_size": WINDOW}


FAMILY = Family(
    "qwen2_5_vl",
    "Qwen2.5-VL",
    ("Qwen2_5_VLForConditionalGeneration",),
    build,
    (
        Tiny(
            dict(
                text_config=TEXT,
                vision_config=dict(
                    depth=3,
                    hidden_size=32,
                    out_hidden_size=64,
                    num_heads=2,
                    intermediate_size=48,
                    patch_size=28,
                    window_size=WINDOW,
                    fullatt_block_indexes=[1],
                ),
                image_token_id=5,
                vision_start_token_id=6,
                vision_end_token_id=7,
            ),
            preprocessor=PREPROCESSOR | dict(patch_size=28, min_pixels=56 * 56 * 4, max_pixels=56 * 56 * 40),
            tokens=("<|image_pad|>", "<|vision_start|>", "<|vision_end|>"),
        ),
    ),
    Mmproj("qwen2.5vl_merger", qwen2_vl.MERGER, _read, _write, "qwen2_5_vl", qwen2_vl.TEXT_GGUF),
    recipe=recipe,
    video=video,
    spellings=SPELLINGS,
)
