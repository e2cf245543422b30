"""LightOnOCR: the eyes of Mistral Small 3.1 before Qwen 3, without marks between a picture's lines.
Source: transformers ``LightOnOcrForConditionalGeneration``, arXiv 2601.14251."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built
from toolkit.models.eyes.mmproj import Clip, Mmproj
from toolkit.models.eyes.pictures import Recipe
from toolkit.models.eyes.towers import PIXTRAL, language_of, seeing, stored_vision
from toolkit.models.families import mistral3
from toolkit.models.families.llava import TINY_TOWER
from toolkit.models.family import Family, Tiny

TOKEN = "<|image_pad|>"
LANGUAGE = {"model.": "model.language_model."}
SPELLINGS = (
    ("model.vision_encoder.", "vision_encoder."),
    ("model.vision_projection.", "vision_projection."),
    ("model.language_model.", "language_model."),
)


def build(config: Fields) -> Built:
    config = config.filled({"tie_word_embeddings": True})
    tower = config.over("vision_config", {"hidden_act": "silu", "image_size": 1540, "patch_size": 14})
    language = language_of(config, default="qwen3")
    made = mistral3.sees(config.changed({"vision_config": tower.values}), language[0], 151655)
    stored = stored_vision(made, "model.vision_encoder.", "model.vision_projection", PIXTRAL)
    return seeing(language, made, stored, LANGUAGE)


def recipe(config: Fields, preprocessor: Fields) -> Recipe:
    made = mistral3.recipe(config, preprocessor)
    return replace(made, spelled="plain", mark=TOKEN, written=TOKEN, token=TOKEN, before="", after="")


def _read(clip: Clip) -> tuple[dict[str, Any], dict[str, Any]]:
    return mistral3.read(clip, TOKEN)


FAMILY = Family(
    "lighton_ocr",
    "LightOnOCR 1B, 2 1B",
    ("LightOnOcrForConditionalGeneration", "LightOnOCRForConditionalGeneration"),
    build,
    (
        Tiny(
            dict(
                text_config=dict(model_type="qwen3", head_dim=16),
                vision_config=TINY_TOWER | dict(model_type="pixtral", head_dim=16),
                image_token_id=5,
            ),
            preprocessor=dict(
                image_processor_type="PixtralImageProcessor",
                size={"longest_edge": 70},
                patch_size={"height": 14, "width": 14},
            ),
            tokens=(TOKEN, "<|vision_pad|>", "<|vision_end|>"),
        ),
    ),
    Mmproj("lightonocr", mistral3.NAMES, _read, mistral3.write, "lighton_ocr", heads=True),
    recipe=recipe,
    spellings=SPELLINGS,
)
