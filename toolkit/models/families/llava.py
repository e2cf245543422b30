"""LLaVA 1.5 and what has its form: a CLIP or SigLIP tower, two linears, any language model; Pixtral in this form too.
Source: transformers ``LlavaForConditionalGeneration``, arXiv 2310.03744."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from toolkit.errors import ToolkitError
from toolkit.models.config.fields import Fields
from toolkit.models.config.preprocessor import clip_recipe, fit_recipe
from toolkit.models.decoder import Built
from toolkit.models.eyes.mmproj import LAYER, Clip, Mmproj, feature_layer, square, tower_fields
from toolkit.models.eyes.pictures import Recipe
from toolkit.models.eyes.towers import (
    CLIP,
    PIXTRAL,
    clip_tower,
    language_of,
    mlp,
    pixtral_tower,
    projector_activation,
    seeing,
    siglip_tower,
    stored_vision,
    taken_layers,
)
from toolkit.models.eyes.vision import VisionSpec
from toolkit.models.family import Family, Tiny
from toolkit.models.spec import DecoderSpec, StoredTensor

TOWERS = {
    "clip_vision_model": (clip_tower, CLIP),
    "siglip_vision_model": (siglip_tower, CLIP),
    "pixtral": (pixtral_tower, PIXTRAL),
}
LANGUAGE = {"model.": "language_model.model.", "lm_head": "language_model.lm_head"}
SPELLINGS = (
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head", "lm_head"),
    ("vision_tower.vision_model.", "model.vision_tower.vision_model.", "vision_tower.", "model.vision_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
    ("image_newline", "model.image_newline"),
)
# Of towers without a ``vision_model`` inside.
BARE_SPELLINGS = (*SPELLINGS[:2], ("vision_tower.", "model.vision_tower."), SPELLINGS[3])


def parts(
    config: Fields, spec: DecoderSpec, layer: int = -2, select: str = "default", token: int = 32000, **changes: Any
) -> tuple[VisionSpec, list[StoredTensor]]:
    """Tower and projector. ``layer``, ``select``, ``token``: what absent fields mean; ``changes``: to the spec."""
    inner = config.inner("vision_config")
    kind = inner.text("model_type", default="clip_vision_model", choices=tuple(TOWERS))
    make, spelling = TOWERS[kind]
    tower = make(inner)
    taken = taken_layers(config, tower.layers, layer)
    strategy = config.text("vision_feature_select_strategy", default=select, choices=("default", "full"))
    if tower.class_token != (strategy == "default") and kind != "pixtral":
        config.fail("vision_feature_select_strategy", strategy, "default with a class token, full without")
    bias = config.flag("multimodal_projector_bias", True)
    act = projector_activation(config)
    image = config.integer("image_token_index", "image_token_id", default=token, low=0, high=spec.vocab_size - 1)
    made = VisionSpec(
        tower=replace(tower, taken=taken),
        projector=mlp(tower.hidden, spec.hidden_size, act, bias),
        image_token=image,
        **changes,
    )
    begin = "vision_tower." if kind == "pixtral" else "vision_tower.vision_model."
    spelled = {**spelling, "newline": "image_newline"}
    return made, stored_vision(made, begin, "multi_modal_projector", spelled)


def build(config: Fields) -> Built:
    language = language_of(config)
    return seeing(language, *parts(config, language[0]), LANGUAGE)


def recipe(config: Fields, preprocessor: Fields) -> Recipe:
    inner = config.inner("vision_config")
    if inner.values.get("model_type") == "pixtral":
        return fit_recipe(inner, preprocessor, merge=1)
    return clip_recipe(inner, preprocessor)


PINPOINTS, UNPAD = "image_grid_pinpoints", "spatial_unpad"


def _read(clip: Clip) -> tuple[dict[str, Any], dict[str, Any]]:
    siglip = not clip.has("v.class_embd")
    kind = {"model_type": "siglip_vision_model" if siglip else "clip_vision_model"}
    fields: dict[str, Any] = {
        "vision_config": kind | tower_fields(clip, "gelu_pytorch_tanh" if siglip else "gelu"),
        "vision_feature_layer": feature_layer(clip),
        "vision_feature_select_strategy": "full" if siglip else "default",
        "multimodal_projector_bias": clip.has("mm.0.bias"),
    }
    size, sides = square(clip), clip.wholes(PINPOINTS)
    prepared: dict[str, Any] = {"size": size if siglip else {"shortest_edge": size["height"]}, "crop_size": size}
    pinpoints = {PINPOINTS: [[height, width] for width, height in zip(sides[::2], sides[1::2], strict=False)]}
    yi, pads = clip.has("mm.3.weight"), clip.text("image_aspect_ratio") == "pad"
    if yi or not clip.knows("<image>"):
        return fields | _published(clip, pinpoints if sides else {}, yi, pads), prepared
    fields |= {"image_token_index": clip.token("<image>")} | ({"model_type": "llava_next"} if sides else {})
    return fields, prepared | (pinpoints if sides else {}) | ({"do_pad": True} if pads else {})


def _published(clip: Clip, pinpoints: dict[str, Any], yi: bool, pads: bool) -> dict[str, Any]:
    """What ``llava_llama`` reads besides."""
    cuts = {"image_aspect_ratio": "anyres", "mm_patch_merge_type": UNPAD, **pinpoints}
    return {
        "model_type": "llava_llama",
        "mm_projector_type": "mlp2x_gelu_Norm" if yi else "mlp2x_gelu",
        "mm_vision_select_layer": feature_layer(clip),
        "image_token_index": clip.token("<unk>"),
        **(cuts if pinpoints else {"image_aspect_ratio": "pad" if pads else "square"}),
    }


def _write(vision: VisionSpec, recipe: Recipe) -> dict[str, Any]:
    tower = vision.tower
    if tower.positions != "learned":
        raise ToolkitError("gguf: llama.cpp reads Pixtral in the form of Mistral Small 3.1 alone")
    if not all(stage.bias for stage in vision.projector if stage.kind == "linear"):
        raise ToolkitError("gguf: llama.cpp's mlp has linears with biases, this model's have none")
    sides = [side for height, width in recipe.canvases for side in (width, height)]
    cuts = {f"clip.vision.{PINPOINTS}": np.array(sides, np.int32), "clip.vision.mm_patch_merge_type": UNPAD}
    return {
        "clip.has_llava_projector": True,
        LAYER: np.array([tower.taken], np.int32),
        **(cuts if sides else {"clip.vision.image_aspect_ratio": "pad"} if recipe.pad else {}),
    }


# The linears behind a norm have other numbers: Yi-VL's.
NAMES = {"linear_1": "mm.0", "linear_2": "mm.2", "norm_1": "mm.1", "linear_3": "mm.3", "norm_2": "mm.4"}
MLP = Mmproj("mlp", NAMES, _read, _write, "llava")
TINY_TOWER = dict(
    model_type="clip_vision_model", hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
    image_size=28, patch_size=7,
)  # fmt: skip
FAMILY = Family(
    "llava",
    "LLaVA 1.5, LLaVA-Interleave, Pixtral 12B (in the form of transformers)",
    ("LlavaForConditionalGeneration",),
    build,
    (
        Tiny(
            dict(text_config=dict(model_type="llama"), vision_config=TINY_TOWER, image_token_index=5),
            preprocessor=dict(
                image_processor_type="LlavaImageProcessor",
                size={"shortest_edge": 28},
                crop_size={"height": 28, "width": 28},
            ),
            tokens=("<image>",),
        ),
    ),
    MLP,
    recipe=recipe,
    spellings=SPELLINGS,
)
