"""DeepSeek-VL 1.3B: SigLIP's tower over the picture in a square, two linears, Llama.
Source: transformers ``DeepseekVLForConditionalGeneration``, arXiv 2403.05525."""

from __future__ import annotations

from toolkit.models.config.fields import Fields
from toolkit.models.config.preprocessor import CLIP_MEAN, CLIP_STD, clip_recipe, colours
from toolkit.models.decoder import Built
from toolkit.models.eyes.pictures import Recipe
from toolkit.models.eyes.towers import CLIP, language_of, mlp, seeing, siglip_tower, stored_vision
from toolkit.models.eyes.vision import VisionSpec
from toolkit.models.families.llava import TINY_TOWER
from toolkit.models.family import Family, Tiny

SPELLING = {**CLIP, "projector.linear_1": "linear1", "projector.linear_2": "linear2"}


def vision_fields(config: Fields) -> Fields:
    return config.over("vision_config", {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 16})


def build(config: Fields) -> Built:
    language = language_of(config)
    spec, tower = language[0], siglip_tower(vision_fields(config), post_norm="used")
    token = config.integer("image_token_id", default=100015, high=spec.vocab_size - 1)
    made = VisionSpec(tower, mlp(tower.hidden, spec.hidden_size, "gelu"), token)
    stored = stored_vision(made, "model.vision_model.", "model.aligner", SPELLING)
    return seeing(language, made, stored, {"model.": "model.language_model."})


def recipe(config: Fields, preprocessor: Fields) -> Recipe:
    return clip_recipe(
        vision_fields(config),
        preprocessor,
        kind="boxed",
        least=preprocessor.integer("min_size", default=14, high=1 << 12),
        mark="<image_placeholder>",
        written="<image_placeholder>\n",
        token="<image_placeholder>",
        **colours(preprocessor, CLIP_MEAN, CLIP_STD),
    )


FAMILY = Family(
    "deepseek_vl",
    "DeepSeek-VL 1.3B (in the form of transformers)",
    ("DeepseekVLForConditionalGeneration",),
    build,
    (
        Tiny(
            dict(
                text_config=dict(model_type="llama", num_key_value_heads=4),
                vision_config=TINY_TOWER | dict(model_type="siglip_vision_model", vision_use_head=False),
                image_token_id=5,
                tie_word_embeddings=False,
            ),
            preprocessor=dict(
                image_processor_type="DeepseekVLImageProcessor",
                size={"height": 28, "width": 28},
                min_size=7,
            ),
            tokens=("<image_placeholder>",),
        ),
    ),
    "llama.cpp has no model that sees so",
    recipe=recipe,
)
