"""Idefics 3: SigLIP's tower over tiles, each tile named in the prompt, neighbouring tokens joined.
Source: transformers ``Idefics3ForConditionalGeneration``, arXiv 2408.12637."""

from __future__ import annotations

from typing import Any

from toolkit.models.config.fields import Fields
from toolkit.models.config.preprocessor import split_recipe
from toolkit.models.decoder import Built
from toolkit.models.eyes.mmproj import Clip, Mmproj, tower_fields
from toolkit.models.eyes.pictures import Recipe
from toolkit.models.eyes.towers import CLIP, language_of, seeing, siglip_tower, stored_vision
from toolkit.models.eyes.vision import Stage, VisionSpec
from toolkit.models.families.llava import TINY_TOWER
from toolkit.models.family import Family, Tiny

ABSENT = {"hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 12, "image_size": 224, "patch_size": 32}
LANGUAGE = {"model.": "model.text_model."}


def vision_fields(config: Fields) -> Fields:
    return config.over("vision_config", ABSENT)


def build(config: Fields) -> Built:
    language = language_of(config)
    tower = siglip_tower(vision_fields(config), post_norm="used")
    factor = config.integer("scale_factor", default=2, high=64)
    if tower.grid[0] % factor:
        config.fail("scale_factor", factor, f"a divisor of {tower.grid[0]}, the patches along a side")
    spec = language[0]
    name, inputs = "vision.projector.modality_projection.proj", tower.hidden * factor**2
    projector = (Stage("merge", factor=factor), Stage("linear", name, inputs, spec.hidden_size))
    token = config.integer("image_token_id", default=128257, high=spec.vocab_size - 1)
    made = VisionSpec(tower, projector, token)
    return seeing(language, made, stored_vision(made, "model.vision_model.", "model.connector", CLIP), LANGUAGE)


def recipe(config: Fields, preprocessor: Fields) -> Recipe:
    return split_recipe(vision_fields(config), preprocessor, config.integer("scale_factor", default=2, high=64))


SCALE = "projector.scale_factor"


def _read(clip: Clip) -> tuple[dict[str, Any], dict[str, Any]]:
    fields = {
        "vision_config": tower_fields(clip, "gelu_pytorch_tanh"),
        "scale_factor": clip.whole(SCALE),
        "image_token_id": clip.token("<image>"),
    }
    image = clip.whole("image_size")
    sizes = {"size": clip.whole("preproc_image_size", image), "max_image_size": image}
    return fields, {name: {"longest_edge": size} for name, size in sizes.items()}


def _write(vision: VisionSpec, recipe: Recipe) -> dict[str, Any]:
    return {f"clip.vision.{SCALE}": vision.merge, "clip.vision.preproc_image_size": recipe.long}


MMPROJ = Mmproj("idefics3", {"modality_projection.proj": "mm.model.fc"}, _read, _write, "idefics3")
FIELDS = dict(
    text_config=dict(model_type="llama"),
    vision_config={k: v for k, v in TINY_TOWER.items() if k != "model_type"},
    image_token_id=5,
)
FAMILY = Family(
    "idefics3",
    "Idefics 3 8B",
    ("Idefics3ForConditionalGeneration",),
    build,
    (
        Tiny(
            FIELDS,
            preprocessor=dict(
                image_processor_type="Idefics3ImageProcessor",
                size={"longest_edge": 56},
                max_image_size={"longest_edge": 28},
            ),
            tokens=("<image>", "<fake_token_around_image>", "<global-img>"),
        ),
    ),
    MMPROJ,
    recipe=recipe,
)
