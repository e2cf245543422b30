"""Phi-3-vision, Phi-3.5-vision: CLIP's tower over the tiles of a picture, whose lines are put together before two
linears, Phi-3 behind. Source: the models' own ``modeling_phi3_v.py``, arXiv 2404.14219."""

from __future__ import annotations

from dataclasses import replace

from toolkit.models.config.fields import Fields
from toolkit.models.config.preprocessor import lined_recipe
from toolkit.models.decoder import Built
from toolkit.models.eyes.pictures import Recipe
from toolkit.models.eyes.towers import (
    CLIP,
    check_grid,
    clip_tower,
    language_of,
    mlp,
    seeing,
    stored_vision,
    taken_layers,
)
from toolkit.models.eyes.vision import Stage, VisionSpec
from toolkit.models.families.llava import TINY_TOWER
from toolkit.models.family import Family, Tiny

TOKEN = "image_token_id"
MERGE = 2
BEGIN = "model.vision_embed_tokens."
SPELLING = {
    **CLIP,
    "newline": f"{BEGIN}sub_GN",
    "separator": f"{BEGIN}glb_GN",
    "projector.linear_1": "0",
    "projector.linear_2": "2",
}


def vision_fields(config: Fields) -> Fields:
    """What a file says of the tower; sizes that it does not say are CLIP's."""
    return config.inner("img_processor")


def build(config: Fields) -> Built:
    language = language_of(config, None, model_type="phi3", architectures=None)
    layer = config.inner("embd_layer")
    layer.only("", use_hd_transform=True, with_learnable_separator=True)
    layer.text("projection_cls", default="mlp", choices=("mlp",))
    layer.text("hd_transform_order", default="sub_glb", choices=("sub_glb",))
    inner = vision_fields(config)
    tower = clip_tower(inner)
    check_grid(inner, tower, MERGE)
    taken = taken_layers(Fields({"vision_feature_layer": inner.values.get("layer_idx", -2)}), tower.layers, -2)
    wide = tower.hidden * MERGE**2
    made = VisionSpec(
        tower=replace(tower, taken=taken),
        projector=(
            Stage("merge", factor=MERGE),
            Stage("lines"),
            *mlp(wide, language[0].hidden_size, "gelu"),
        ),
        image_token=config.integer(TOKEN, default=32044, high=language[0].vocab_size - 1),
        join="lined",
        whole_first=False,
    )
    shapes = {"vision.newline": (1, 1, 1, wide), "vision.separator": (1, 1, wide)}
    stored = stored_vision(made, f"{BEGIN}img_processor.vision_model.", f"{BEGIN}img_projection", SPELLING, shapes)
    return seeing(language, made, stored, {})


def recipe(config: Fields, preprocessor: Fields) -> Recipe:
    return lined_recipe(vision_fields(config), preprocessor, MERGE, token="<|image|>")


FAMILY = Family(
    "phi3_v",
    "Phi-3-vision, Phi-3.5-vision",
    ("Phi3VForCausalLM",),
    build,
    (
        Tiny(
            dict(
                rope_scaling=dict(
                    type="su",
                    short_factor=[1.0 + 0.02 * i for i in range(8)],
                    long_factor=[1.0 + 0.7 * i for i in range(8)],
                ),
                rope_theta=10000.0,
                original_max_position_embeddings=512,
                img_processor={k: v for k, v in TINY_TOWER.items() if k != "model_type"},
                image_token_id=5,
            ),
            preprocessor=dict(image_processor_type="Phi3VImageProcessor", num_crops=4),
            tokens=("<|image|>",),
        ),
    ),
    "llama.cpp has no model that sees so",
    recipe=recipe,
    token_fields={TOKEN: "<|image|>"},
)
