"""Mistral Small 3.1 and 3.2: Pixtral's tower over pictures of their own ratio, four patches a token, a mark behind each
line. Source: transformers ``Mistral3ForConditionalGeneration``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from toolkit.models.config.fields import Fields
from toolkit.models.config.preprocessor import fit_recipe
from toolkit.models.decoder import Built
from toolkit.models.eyes.mmproj import Clip, Mmproj, tower_fields
from toolkit.models.eyes.pictures import Recipe
from toolkit.models.eyes.towers import (
    PIXTRAL,
    language_of,
    mlp,
    pixtral_tower,
    projector_activation,
    seeing,
    stored_vision,
    taken_layers,
)
from toolkit.models.eyes.vision import Stage, VisionSpec
from toolkit.models.families.llava import BARE_SPELLINGS, LANGUAGE, TINY_TOWER
from toolkit.models.family import Family, Tiny
from toolkit.models.spec import DecoderSpec


def merge_of(config: Fields) -> int:
    return config.integer("spatial_merge_size", default=2, high=16)


def sees(config: Fields, spec: DecoderSpec, token: int) -> VisionSpec:
    """Tower and projector before ``spec``. ``token``: of pictures, where the config names none."""
    merge = merge_of(config)
    tower = pixtral_tower(config.inner("vision_config"))
    tower = replace(tower, taken=taken_layers(config, tower.layers, -1))
    text = config.inner("text_config")
    projector = (
        Stage("rms", "vision.projector.norm", tower.hidden, eps=text.number("rms_norm_eps", default=1e-6, high=0.5)),
        Stage("merge_channels", factor=merge),
        Stage("linear", "vision.projector.patch_merger.merging_layer", tower.hidden * merge**2, tower.hidden),
        *mlp(
            tower.hidden,
            spec.hidden_size,
            projector_activation(config),
            config.flag("multimodal_projector_bias", False),
        ),
    )
    token = config.integer("image_token_index", "image_token_id", default=token, high=spec.vocab_size - 1)
    return VisionSpec(tower, projector, token)


def build(config: Fields) -> Built:
    language = language_of(config, default="mistral")
    made = sees(config, language[0], 10)
    return seeing(language, made, stored_vision(made, "vision_tower.", "multi_modal_projector", PIXTRAL), LANGUAGE)


def recipe(config: Fields, preprocessor: Fields) -> Recipe:
    inner = config.inner("vision_config")
    return fit_recipe(inner, preprocessor, merge_of(config))


NAMES = {
    "norm": "mm.input_norm",
    "patch_merger.merging_layer": "mm.patch_merger",
    "linear_1": "mm.1",
    "linear_2": "mm.2",
}


def read(clip: Clip, token: str = "[IMG]") -> tuple[dict[str, Any], dict[str, Any]]:
    """As ``Mmproj`` has it. ``token``: of pictures."""
    vision = {"model_type": "pixtral", **tower_fields(clip, "gelu")}
    vision["head_dim"] = vision["hidden_size"] // vision["num_attention_heads"]
    fields = {
        "vision_config": vision,
        "spatial_merge_size": clip.whole("spatial_merge_size", 2),
        "image_token_index": clip.token(token),
        "multimodal_projector_bias": clip.has("mm.1.bias"),
    }
    return fields, {"size": {"longest_edge": vision["image_size"]}, "patch_size": vision["patch_size"]}


def write(vision: VisionSpec, recipe: Recipe) -> dict[str, Any]:
    return {"clip.vision.spatial_merge_size": vision.merge}


FAMILY = Family(
    "mistral3",
    "Mistral Small 3.1, 3.2",
    ("Mistral3ForConditionalGeneration",),
    build,
    (
        Tiny(
            dict(
                text_config=dict(model_type="mistral", head_dim=16, sliding_window=None),
                vision_config=TINY_TOWER | dict(model_type="pixtral", head_dim=16),
                image_token_index=5,
                tie_word_embeddings=False,
            ),
            preprocessor=dict(
                image_processor_type="PixtralImageProcessor",
                size={"longest_edge": 70},
                patch_size={"height": 7, "width": 7},
            ),
            tokens=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        ),
    ),
    Mmproj("pixtral", NAMES, read, write, "mistral3", heads=True, lines=True),
    recipe=recipe,
    spellings=BARE_SPELLINGS,
)
