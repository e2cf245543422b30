"""LLaVA 1.6 (NeXT): LLaVA whose pictures are cut into tiles of the canvas that fits them best, beside the whole.
Source: transformers ``LlavaNextForConditionalGeneration``."""

from __future__ import annotations

from toolkit.models.config.fields import Fields
from toolkit.models.config.preprocessor import canvases, clip_recipe
from toolkit.models.decoder import Built
from toolkit.models.eyes.pictures import Recipe
from toolkit.models.eyes.towers import language_of, seeing
from toolkit.models.families.llava import LANGUAGE, MLP, SPELLINGS, TINY_TOWER, parts
from toolkit.models.family import Family, Tiny

CANVASES = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))


def build(config: Fields) -> Built:
    language = language_of(config)
    return seeing(language, *parts(config, language[0], join="anyres"), LANGUAGE)


def recipe(config: Fields, preprocessor: Fields) -> Recipe:
    inner = config.inner("vision_config")
    sizes = canvases(preprocessor if preprocessor.has("image_grid_pinpoints") else config, CANVASES, inner)
    return clip_recipe(inner, preprocessor, kind="anyres", canvases=sizes, pad=False)


FAMILY = Family(
    "llava_next",
    "LLaVA 1.6 (NeXT)",
    ("LlavaNextForConditionalGeneration",),
    build,
    (
        Tiny(
            dict(
                text_config=dict(model_type="mistral", sliding_window=None),
                vision_config=TINY_TOWER,
                image_token_index=5,
                image_grid_pinpoints=[[28, 56], [56, 28], [56, 56], [84, 28]],
            ),
            preprocessor=dict(
                image_processor_type="LlavaNextImageProcessor",
                size={"shortest_edge": 28},
                crop_size={"height": 28, "width": 28},
                image_grid_pinpoints=[[28, 56], [56, 28], [56, 56], [84, 28]],
            ),
            tokens=("<image>",),
        ),
    ),
    MLP,
    recipe=recipe,
    spellings=SPELLINGS,
)
