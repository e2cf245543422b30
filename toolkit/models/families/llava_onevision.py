"""LLaVA-OneVision: SigLIP's tower, tiles of a canvas beside the whole picture, shrunk where there are many; of several
pictures one tile each. Source: transformers ``LlavaOnevisionForConditionalGeneration``, arXiv 2408.03326."""

from __future__ import annotations

from toolkit.models.config.fields import Fields
from toolkit.models.config.preprocessor import canvases, clip_recipe, colours
from toolkit.models.config.videos import shown_as
from toolkit.models.decoder import Built
from toolkit.models.eyes.pictures import Recipe
from toolkit.models.eyes.towers import language_of, seeing
from toolkit.models.eyes.videos import Video
from toolkit.models.families.llava import LANGUAGE, SPELLINGS, TINY_TOWER, parts
from toolkit.models.family import Family, Tiny

SIDES = tuple(384 * n for n in range(1, 7))
CANVASES = tuple((height, width) for height in SIDES for width in SIDES)
RULE = "anyres_max_"  # and the most tiles


def most_tiles(config: Fields) -> int:
    rule = config.filled({"vision_aspect_ratio": f"{RULE}9"}).values["vision_aspect_ratio"]
    count = str(rule).removeprefix(RULE)
    if not count.isdigit() or not 1 <= int(count) <= 1000:
        config.fail("vision_aspect_ratio", rule, f"{RULE}9")
    return int(count)


def build(config: Fields) -> Built:
    language = language_of(config, default="qwen2")
    made = parts(config, language[0], -1, "full", 151646, join="anyres", most_tiles=most_tiles(config))
    return seeing(language, *made, LANGUAGE)


def recipe(config: Fields, preprocessor: Fields) -> Recipe:
    inner = config.inner("vision_config")
    sizes = canvases(preprocessor if preprocessor.has("image_grid_pinpoints") else config, CANVASES, inner)
    changes = {**colours(preprocessor), "canvases": sizes, "pad": True, "most_tiles": most_tiles(config)}
    return clip_recipe(inner, preprocessor, kind="anyres", **changes)


def video(config: Fields, preprocessor: Fields, recipe: Recipe) -> Video:
    return shown_as(preprocessor, recipe, {"kind": "square"}, pooled=True, said="{tokens}", around=("", "\n"))


GRID = [[28, 28], [28, 56], [56, 28], [56, 56], [56, 84], [84, 84]]
FAMILY = Family(
    "llava_onevision",
    "LLaVA-OneVision",
    ("LlavaOnevisionForConditionalGeneration",),
    build,
    (
        Tiny(
            dict(
                text_config=dict(model_type="qwen2"),
                vision_config=TINY_TOWER | dict(model_type="siglip_vision_model", vision_use_head=False),
                image_token_index=5,
                image_grid_pinpoints=GRID,
                vision_aspect_ratio="anyres_max_3",
            ),
            preprocessor=dict(
                image_processor_type="LlavaOnevisionImageProcessor",
                size={"height": 28, "width": 28},
                image_grid_pinpoints=GRID,
            ),
            tokens=("<image>",),
        ),
    ),
    "llama.cpp has no model that sees so",
    recipe=recipe,
    video=video,
    spellings=SPELLINGS,
)
