"""Aya Vision: SigLIP's tower over tiles of the nearest grid, each named in the prompt, before Command R7B.
Source: transformers ``AyaVisionForConditionalGeneration``, arXiv 2505.08751."""

from __future__ import annotations

from dataclasses import replace

from toolkit.models.config.fields import Fields
from toolkit.models.config.preprocessor import tiles_recipe
from toolkit.models.decoder import Built
from toolkit.models.eyes.pictures import Recipe
from toolkit.models.eyes.towers import CLIP, language_of, seeing, siglip_tower, stored_vision, taken_layers
from toolkit.models.eyes.vision import Stage, VisionSpec
from toolkit.models.families.llava import LANGUAGE, SPELLINGS, TINY_TOWER
from toolkit.models.family import Family, Tiny

ABSENT = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "image_size": 384,
    "num_hidden_layers": 26,
    "num_attention_heads": 14,
}
SPELLING = {**CLIP, "projector.up_proj": "linear_1", "projector.gate_proj": "linear_1"}


def vision_fields(config: Fields) -> Fields:
    return config.over("vision_config", ABSENT)


def factor_of(config: Fields) -> int:
    return config.integer("downsample_factor", default=2, high=16)


def build(config: Fields) -> Built:
    language = language_of(config, default="cohere2")
    spec, factor = language[0], factor_of(config)
    tower = siglip_tower(vision_fields(config))
    tower = replace(tower, taken=taken_layers(config, tower.layers, -1))
    if tower.grid[0] % factor:
        config.fail("downsample_factor", factor, f"a divisor of {tower.grid[0]}, the patches along a side")
    if config.text("vision_feature_select_strategy", default="full", choices=("default", "full")) != "full":
        config.fail("vision_feature_select_strategy", "default", "full")
    wide = tower.hidden * factor**2
    between = config.integer("alignment_intermediate_size", default=spec.hidden_size, high=1 << 18) // 2
    eps = config.number("adapter_layer_norm_eps", default=1e-6, high=0.5)
    projector = (
        Stage("merge", factor=factor),
        Stage("layer", "vision.projector.layernorm", wide, eps=eps),
        Stage("gated", "vision.projector", wide, between, True),
        Stage("linear", "vision.projector.linear_2", between, spec.hidden_size, True),
    )
    token = config.integer("image_token_index", "image_token_id", default=255036, high=spec.vocab_size - 1)
    made = VisionSpec(tower, projector, token)
    stored = stored_vision(made, "vision_tower.vision_model.", "multi_modal_projector", SPELLING)
    return seeing(language, made, stored, LANGUAGE)


def recipe(config: Fields, preprocessor: Fields) -> Recipe:
    words = {"before": "<|START_OF_IMG|>", "after": "<|END_OF_IMG|>", "token": "<|IMG_PATCH|>"}
    named = {"spelled": "named", "mark": "<image>", "written": "<image>"}
    return tiles_recipe(vision_fields(config), preprocessor, factor_of(config), **words, **named)


FAMILY = Family(
    "aya_vision",
    "Aya Vision 8B, 32B",
    ("AyaVisionForConditionalGeneration",),
    build,
    (
        Tiny(
            dict(
                text_config=dict(
                    model_type="cohere2",
                    head_dim=16,
                    sliding_window=16,
                    logit_scale=1.0,  # its class in transformers leaves it out
                    layer_types=["sliding_attention", "full_attention"],
                ),
                vision_config=TINY_TOWER | dict(model_type="siglip_vision_model", vision_use_head=False),
                image_token_index=5,
                alignment_intermediate_size=96,
            ),
            preprocessor=dict(
                image_processor_type="GotOcr2ImageProcessor", size={"height": 28, "width": 28}, max_patches=6
            ),
            tokens=("<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>"),
        ),
    ),
    "llama.cpp has no model that sees so",
    recipe=recipe,
    spellings=SPELLINGS,
)
