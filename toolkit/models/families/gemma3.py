"""Gemma 3 from 4B on: SigLIP's tower over a square, patches averaged to a token, tokens of a picture that see each
other both ways. Source: transformers ``Gemma3ForConditionalGeneration``, arXiv 2503.19786."""

from __future__ import annotations

import math
from typing import Any

from toolkit.models.config.fields import Fields
from toolkit.models.config.preprocessor import scan_recipe
from toolkit.models.decoder import Built
from toolkit.models.eyes.mmproj import Clip, Mmproj, square, tower_fields
from toolkit.models.eyes.pictures import Recipe
from toolkit.models.eyes.towers import CLIP, language_of, seeing, siglip_tower, stored_vision
from toolkit.models.eyes.vision import Stage, VisionSpec
from toolkit.models.families.llava import LANGUAGE, SPELLINGS, TINY_TOWER
from toolkit.models.family import Family, Tiny

ABSENT = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "image_size": 896}


def vision_fields(config: Fields) -> Fields:
    return config.over("vision_config", ABSENT)


def tokens_of(config: Fields) -> int:
    """Of a picture, a square number of them."""
    tokens = config.integer("mm_tokens_per_image", default=256, high=1 << 16)
    vision = vision_fields(config)
    patches = vision.integer("image_size", high=1 << 16) // vision.integer("patch_size", default=14, high=1024)
    side = math.isqrt(tokens)
    if side * side != tokens or patches % side:
        config.fail("mm_tokens_per_image", tokens, f"the square of a divisor of {patches}, the patches along a side")
    return tokens


def build(config: Fields) -> Built:
    language = language_of(config, default="gemma3_text")
    spec, tower = language[0], siglip_tower(vision_fields(config), post_norm="used")
    name, hidden = "vision.projector.mm_input_projection_weight", tower.hidden
    projector = (
        Stage("pool", factor=tower.grid[0] // math.isqrt(tokens_of(config))),
        Stage("rms", "vision.projector.mm_soft_emb_norm", hidden, eps=tower.eps, offset=1.0),
        Stage("matrix", name, hidden, spec.hidden_size),
    )
    token = config.integer("image_token_index", "image_token_id", default=262144, high=spec.vocab_size - 1)
    made = VisionSpec(tower, projector, token, mutual=True)
    stored = stored_vision(made, "vision_tower.vision_model.", "multi_modal_projector", CLIP)
    return seeing(language, made, stored, LANGUAGE)


def recipe(config: Fields, preprocessor: Fields) -> Recipe:
    return scan_recipe(vision_fields(config), preprocessor, tokens_of(config))


SCALE = "projector.scale_factor"


def _read(clip: Clip) -> tuple[dict[str, Any], dict[str, Any]]:
    side = clip.whole("image_size") // clip.whole("patch_size") // clip.whole(SCALE, 4)
    fields = {
        "vision_config": {"model_type": "siglip_vision_model", **tower_fields(clip, "gelu_pytorch_tanh")},
        "mm_tokens_per_image": side * side,
        "image_token_index": clip.token("<image_soft_token>"),
    }
    return fields, {"size": square(clip)}


def _write(vision: VisionSpec, recipe: Recipe) -> dict[str, Any]:
    return {} if vision.merge == 4 else {f"clip.vision.{SCALE}": vision.merge}


ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
FAMILY = Family(
    "gemma3",
    "Gemma 3 4B, 12B, 27B",
    ("Gemma3ForConditionalGeneration",),
    build,
    (
        Tiny(
            dict(
                text_config=dict(
                    model_type="gemma3_text",
                    head_dim=16,
                    sliding_window=16,
                    query_pre_attn_scalar=16,
                    num_hidden_layers=6,
                    rope_parameters=ROPE,
                ),
                vision_config=TINY_TOWER | dict(model_type="siglip_vision_model", vision_use_head=False),
                mm_tokens_per_image=4,
                image_token_index=5,
                boi_token_index=6,
                eoi_token_index=7,
            ),
            preprocessor=dict(image_processor_type="Gemma3ImageProcessor", size={"height": 28, "width": 28}),
            tokens=("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
        ),
    ),
    Mmproj(
        "gemma3",
        {"mm_input_projection_weight": "mm.input_projection.weight", "mm_soft_emb_norm": "mm.soft_emb_norm"},
        _read,
        _write,
        "gemma3",
        plus_one=frozenset({"vision.projector.mm_soft_emb_norm"}),
    ),
    recipe=recipe,
    spellings=SPELLINGS,
)
