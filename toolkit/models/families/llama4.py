"""Llama 4: a tower whose patches have learned places and turn by row and column, four of them a token, before Llama 4's
text model. Source: transformers ``Llama4ForConditionalGeneration``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from toolkit.models.config.fields import Fields
from toolkit.models.config.preprocessor import canvas_recipe
from toolkit.models.decoder import Built
from toolkit.models.eyes.mmproj import Clip, Mmproj, square, tower_fields
from toolkit.models.eyes.pictures import Recipe
from toolkit.models.eyes.towers import (
    CLIP,
    activation,
    check_grid,
    clip_tower,
    language_of,
    seeing,
    side,
    stored_vision,
)
from toolkit.models.eyes.vision import Stage, Tower, VisionSpec
from toolkit.models.families import llama4_text
from toolkit.models.family import WITHIN, Family, Tiny
from toolkit.models.spec import Part, StoredTensor

MERGE, CANVASES = 2, 16
ABSENT = {"hidden_size": 768, "num_hidden_layers": 34, "intermediate_size": 5632, "image_size": 448}
PROJECTOR = ("vision_adapter.mlp.fc1", "vision_adapter.mlp.fc2")
SPELLING = {
    **CLIP,
    "patch": "patch_embedding.linear",
    "class": "class_embedding",
    "position": "positional_embedding_vlm",
    "pre_norm": "layernorm_pre",
    "post_norm": "layernorm_post",
    "layers": "model.layers.{}",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "o": "self_attn.o_proj",
    **{f"projector.linear_{i}": name for i, name in enumerate(PROJECTOR, 1)},
    "projector.linear_3": "linear_1",
}


def vision_fields(config: Fields) -> Fields:
    return config.over("vision_config", ABSENT)


def turned_rows(tower: Tower) -> list[int]:
    """Where each row of q and k is stored: there neighbours turn, and the column turns the first half of a head."""
    half = tower.head_dim // 2
    pairs = [*range(half // 2, half), *range(half // 2)]
    one = [2 * pair + k for k in (0, 1) for pair in pairs]
    return [head * tower.head_dim + row for head in range(tower.heads) for row in one]


def as_stored(item: StoredTensor, tower: Tower) -> StoredTensor:
    """The rows in their order on disk; the class token's place is the last one there."""
    name = item.parts[0].name
    if name == "vision.position":
        last = tower.grid[0] * tower.grid[1] * tower.hidden
        return replace(item, parts=(Part(name, ((last, last + tower.hidden), (0, last))),))
    if not any(f".{x}." in name for x in "qk"):
        return item
    width = tower.hidden if len(item.shape) > 1 else 1
    rows = tuple((row * width, (row + 1) * width) for row in turned_rows(tower))
    return replace(item, parts=(Part(name, rows),))


def build(config: Fields) -> Built:
    language = language_of(config, default="llama4_text")
    spec, inner = language[0], vision_fields(config)
    theta = inner.inner("rope_parameters").number("rope_theta", default=inner.number("rope_theta", default=1e4))
    own = {"eps": 1e-5, "turned": True, "theta": theta, "post_norm": "used"}
    tower = clip_tower(inner, activation=activation(inner, "gelu"), **own)
    if tower.head_dim % 4:
        inner.fail("num_attention_heads", tower.heads, f"one that cuts {tower.hidden} into multiples of 4")
    check_grid(inner, tower, MERGE)
    if (ratio := inner.number("pixel_shuffle_ratio", default=0.5)) != 1 / MERGE:
        inner.fail("pixel_shuffle_ratio", ratio, str(1 / MERGE))
    wide, out = tower.hidden * MERGE**2, inner.integer("projector_output_dim", default=4096)
    for name, expected in (("intermediate_size", wide), ("projector_input_dim", out), ("vision_output_dim", out)):
        if inner.integer(name, default=expected, high=1 << 18) != expected:
            inner.fail(name, inner.values[name], f"{expected}, for the linears behind the tower to follow one another")
    projector = (
        Stage("merge", factor=MERGE),
        Stage("linear", "vision.projector.linear_1", wide, out),
        Stage("gelu"),
        Stage("linear", "vision.projector.linear_2", out, out),
        Stage("gelu"),
        Stage("linear", "vision.projector.linear_3", out, spec.hidden_size),
    )
    token = config.integer("image_token_id", "image_token_index", default=200092, high=spec.vocab_size - 1)
    made = VisionSpec(tower, projector, token)
    shapes = {"vision.patch.weight": (tower.hidden, 3 * tower.patch**2)}
    stored = stored_vision(made, "vision_model.", "multi_modal_projector", SPELLING, shapes)
    stored = [as_stored(item, tower) for item in stored]
    adapter = "multi_modal_projector.vision_adapter."
    stored = [replace(x, name=x.name.replace(adapter, "vision_model.vision_adapter.")) for x in stored]
    return seeing(language, made, stored, {})


def recipe(config: Fields, preprocessor: Fields) -> Recipe:
    inner = vision_fields(config)
    preprocessor.only("", resize_to_max_canvas=False)
    most = preprocessor.integer("max_patches", default=CANVASES, high=256)
    shapes = tuple((n // across, across) for n in range(1, most + 1) for across in range(1, n + 1) if n % across == 0)
    per_tile = (side(inner, "image_size", 448) // (side(inner, "patch_size", 14) * MERGE)) ** 2
    tower = inner.changed({"max_num_tiles": most})
    made = canvas_recipe(tower, preprocessor, shapes)
    return replace(
        made,
        kind="canvas_whole",
        unit=made.unit * MERGE,
        per_tile=per_tile,
        spelled="parted",
        token="<|patch|>",
        before="<|image_start|>",
        after="<|image_end|>",
        inner=("<|tile_x_separator|>", "<|tile_y_separator|>"),
        rounded=True,
    )


def _read(clip: Clip) -> tuple[dict[str, Any], dict[str, Any]]:
    out = clip.rows("mm.model.mlp.2.weight")
    vision = tower_fields(clip, "gelu") | {
        "norm_eps": clip.number("attention.layer_norm_epsilon"),
        "intermediate_size": clip.inner,
        "projector_input_dim": out,
        "projector_output_dim": out,
        "vision_output_dim": out,
    }
    most = clip.whole("preproc_max_tiles", CANVASES)
    return {"vision_config": vision, "image_token_index": clip.token("<|patch|>")}, {
        "size": square(clip),
        "max_patches": most,
    }


def _write(vision: VisionSpec, recipe: Recipe) -> dict[str, Any]:
    most = max(height * width for height, width in recipe.canvases) // recipe.size[0] ** 2
    return {"clip.vision.projector.scale_factor": vision.merge, "clip.vision.preproc_max_tiles": most}


NAMES = {"linear_1": "mm.model.mlp.1", "linear_2": "mm.model.mlp.2", "linear_3": "mm.model.fc"}
TOKENS = ("<|patch|>", "<|image|>", "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>")
FAMILY = Family(
    "llama4",
    "Llama 4 Scout, Maverick",
    ("Llama4ForConditionalGeneration",),
    build,
    (
        Tiny(
            dict(
                text_config=llama4_text.FAMILY.tiny[0].fields,
                vision_config=dict(
                    hidden_size=32,
                    num_hidden_layers=3,
                    num_attention_heads=2,
                    intermediate_size=128,
                    image_size=28,
                    patch_size=7,
                    projector_input_dim=48,
                    projector_output_dim=48,
                    vision_output_dim=48,
                ),
                image_token_index=5,
            ),
            preprocessor=dict(
                image_processor_type="Llama4ImageProcessor", size={"height": 28, "width": 28}, max_patches=4
            ),
            tokens=TOKENS,
        ),
    ),
    Mmproj("llama4", NAMES, _read, _write, "llama4", llama4_text.GGUF, as_stored=True),
    recipe=recipe,
    spellings=WITHIN,
    blind="llama4_text",
)
