"""InternVL 3 and 3.5 in the form of transformers: InternViT over tiles of the nearest grid, four patches a token.
Source: transformers ``InternVLForConditionalGeneration``, arXiv 2504.10479."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from toolkit.errors import ToolkitError
from toolkit.models.config.fields import Fields
from toolkit.models.config.preprocessor import tiles_recipe
from toolkit.models.config.videos import shown_as
from toolkit.models.decoder import Built
from toolkit.models.eyes.mmproj import Clip, Mmproj, square, tower_fields
from toolkit.models.eyes.pictures import Recipe
from toolkit.models.eyes.towers import (
    activation,
    clip_tower,
    language_of,
    mlp,
    projector_activation,
    seeing,
    stored_vision,
    taken_layers,
)
from toolkit.models.eyes.videos import Video
from toolkit.models.eyes.vision import Stage, Tower, VisionSpec
from toolkit.models.families.llava import BARE_SPELLINGS, LANGUAGE, TINY_TOWER
from toolkit.models.family import Family, Tiny
from toolkit.models.spec import DecoderSpec

INTERNVIT = {
    "patch": "embeddings.patch_embeddings.projection",
    "class": "embeddings.cls_token",
    "position": "embeddings.position_embeddings",
    "layers": "encoder.layer.{}",
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
    **{name: f"attention.{name}_proj" for name in "qkv"},
    "o": "attention.projection_layer",
    "q_norm": "attention.q_norm",
    "k_norm": "attention.k_norm",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
    "scale1": "lambda_1",
    "scale2": "lambda_2",
    "post_norm": "layernorm",
}
ABSENT = {"image_size": 448, "layer_norm_eps": 1e-6}


def vision_fields(config: Fields) -> Fields:
    return config.over("vision_config", ABSENT)


def eye(config: Fields, spec: DecoderSpec, merge: Literal["merge", "merge_turned"] = "merge") -> VisionSpec:
    """Tower and projector before the language model ``spec``. ``merge``: the kind of that stage."""
    vision = vision_fields(config)
    pooled = vision.flag("use_mean_pooling", True)
    norm = vision.text("norm_type", default="layer_norm", choices=("layer_norm", "rms_norm"))
    tower = clip_tower(
        vision,
        activation=activation(vision, "gelu"),
        norm=norm.removesuffix("_norm"),
        patch_bias=True,
        qkv_bias=vision.flag("attention_bias", False),
        qk_norm=vision.flag("use_qk_norm", False),
        pre_norm=False,
        post_norm="none" if pooled else "used",
        scaled=True,
    )
    taken = taken_layers(config, tower.layers, -1)
    if taken != tower.layers and not pooled:
        config.fail("vision_feature_layer", taken, "-1 where use_mean_pooling is false")
    tower = replace(tower, taken=taken)
    factor = round(1 / config.number("downsample_ratio", default=0.5, high=1.0))
    if tower.grid[0] % factor:
        found = config.values.get("downsample_ratio", 0.5)
        config.fail("downsample_ratio", found, f"one that divides {tower.grid[0]}, the patches along a side")
    wide = tower.hidden * factor**2
    act = projector_activation(config)
    first = (Stage(merge, factor=factor), Stage("layer", "vision.projector.layer_norm", wide, eps=1e-5))
    token = config.integer("image_token_id", default=151667, low=0, high=spec.vocab_size - 1)
    return VisionSpec(tower, (*first, *mlp(wide, spec.hidden_size, act)), token)


def shapes(tower: Tower) -> dict[str, tuple[int, ...]]:
    """Of what is stored in another shape."""
    rows = tower.grid[0] * tower.grid[1] + 1
    return {"vision.class": (1, 1, tower.hidden), "vision.position": (1, rows, tower.hidden)}


def build(config: Fields) -> Built:
    language = language_of(config, default="qwen2")
    made = eye(config, language[0])
    stored = stored_vision(made, "vision_tower.", "multi_modal_projector", INTERNVIT, shapes(made.tower))
    return seeing(language, made, stored, LANGUAGE)


def recipe(config: Fields, preprocessor: Fields) -> Recipe:
    ratio = config.number("downsample_ratio", default=0.5, high=1.0)
    return tiles_recipe(vision_fields(config), preprocessor, round(1 / ratio))


def video(config: Fields, preprocessor: Fields, recipe: Recipe) -> Video:
    said: dict[str, Any] = {"said": "Frame{number}: {picture}", "between": "\n", "around": ("", "\n")}
    return shown_as(preprocessor, recipe, {"least": 1, "most": 1}, middle=True, **said)


SCALE, LARGE = "projector.scale_factor", (3200, 45)  # width and layers of InternViT-6B, by which llama.cpp knows it
MLP = {"layer_norm": "mm.model.mlp.0", "linear_1": "mm.model.mlp.1", "linear_2": "mm.model.mlp.3"}


def _read(clip: Clip) -> tuple[dict[str, Any], dict[str, Any]]:
    vision = tower_fields(clip, "gelu") | {
        "norm_type": "layer_norm" if clip.has("v.blk.0.ln1.bias") else "rms_norm",
        "attention_bias": clip.has("v.blk.0.attn_q.bias"),
        "use_qk_norm": clip.has("v.blk.0.attn_q_norm.weight"),
    }
    token = clip.token("<IMG_CONTEXT>")
    fields = {"vision_config": vision, "downsample_ratio": 1 / clip.whole(SCALE), "image_token_id": token}
    tiles = {"min_patches": clip.whole("preproc_min_tiles", 1), "max_patches": clip.whole("preproc_max_tiles", 12)}
    return fields, {"size": square(clip), **tiles}


def _write(vision: VisionSpec, recipe: Recipe) -> dict[str, Any]:
    if vision.projector[0].kind == "merge_turned" or vision.tower.post_norm == "used":
        raise ToolkitError("gguf: llama.cpp's internvl is InternVL of version 2 and later, with use_mean_pooling")
    if vision.routed:
        raise ToolkitError("gguf: llama.cpp has no model whose tokens of pictures have linears of their own")
    if (vision.tower.norm == "rms") != ((vision.tower.hidden, vision.tower.taken) == LARGE):
        raise ToolkitError(
            f"gguf: llama.cpp's internvl has RMS norms where its tower is {LARGE[0]} wide and nowhere else"
        )
    tiles = {"preproc_min_tiles": recipe.least, "preproc_max_tiles": recipe.most}
    return {f"clip.vision.{key}": value for key, value in {SCALE: vision.merge, **tiles}.items()}


MMPROJ = Mmproj("internvl", MLP, _read, _write, "internvl")
FAMILY = Family(
    "internvl",
    "InternVL 3, 3.5 (in the form of transformers)",
    ("InternVLForConditionalGeneration",),
    build,
    (
        Tiny(
            dict(
                text_config=dict(model_type="qwen2"),
                vision_config={
                    **{k: v for k, v in TINY_TOWER.items() if k != "model_type"},
                    "layer_scale_init_value": 0.5,
                },
                image_token_id=5,
                image_seq_length=4,
                tie_word_embeddings=False,
            ),
            preprocessor=dict(
                image_processor_type="GotOcr2ImageProcessor",
                size={"height": 28, "width": 28},
                max_patches=6,
            ),
            tokens=("<IMG_CONTEXT>", "<img>", "</img>"),
        ),
    ),
    MMPROJ,
    recipe=recipe,
    video=video,
    spellings=BARE_SPELLINGS,
)
