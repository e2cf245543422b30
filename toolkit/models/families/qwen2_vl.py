"""Qwen2-VL: pictures of any size as patches that turn by row and column, four of them a token; tokens have three
positions. Source: transformers ``Qwen2VLForConditionalGeneration``, arXiv 2409.12191."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from toolkit.errors import ToolkitError
from toolkit.models.config.fields import MAX_LAYERS, Fields
from toolkit.models.config.preprocessor import area_recipe
from toolkit.models.config.videos import area_video
from toolkit.models.decoder import Built
from toolkit.models.eyes.mmproj import Clip, Mmproj
from toolkit.models.eyes.pictures import Recipe
from toolkit.models.eyes.towers import activation, language_of, seeing, stored_vision
from toolkit.models.eyes.videos import Video
from toolkit.models.eyes.vision import Stage, Tower, VisionSpec
from toolkit.models.families import qwen2
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import Metadata
from toolkit.models.spec import DecoderSpec

BLOCKS = {
    "patch": "patch_embed.proj",
    "layers": "blocks.{}",
    "norm1": "norm1",
    "norm2": "norm2",
    **dict.fromkeys("qkv", "attn.qkv"),
    "o": "attn.proj",
}
SPELLINGS = (
    ("model.layers.", "model.language_model.layers."),
    ("model.embed_tokens", "model.language_model.embed_tokens"),
    ("model.norm", "model.language_model.norm"),
    ("visual.", "model.visual."),
)


def language(config: Fields) -> Built:
    """Hub files have its fields beside those of the whole, transformers 5 in an object of their own."""
    part = "text_config" if config.has("text_config") else None
    return language_of(config, part, model_type="qwen2", architectures=["Qwen2ForCausalLM"])


def tower(vision: Fields, hidden: int, **changes: Any) -> Tower:
    """``hidden``: of the tower."""
    heads = vision.integer("num_heads", default=16, high=1024)
    if hidden % heads or hidden // heads % 4:
        vision.fail("num_heads", heads, f"one that cuts {hidden} into multiples of 4")
    layers = vision.integer("depth", default=32, high=MAX_LAYERS)
    made: dict[str, Any] = {
        "layers": layers,
        "taken": layers,
        "hidden": hidden,
        "heads": heads,
        "head_dim": hidden // heads,
        "patch": vision.integer("patch_size", default=14, high=1024),
        "frames": vision.integer("temporal_patch_size", default=2, high=16),
        "eps": 1e-6,
        "positions": "axial",
        "patch_bias": False,
    }
    return Tower(**(made | changes))


def whole(config: Fields, tower: Tower, spelled: dict[str, str]) -> Built:
    """The model with this tower, whose norms the projector's is like."""
    built = language(config)
    spec = built[0]
    vision = config.inner("vision_config")
    merge = vision.integer("spatial_merge_size", default=2, high=16)
    wide = tower.hidden * merge**2
    projector = (
        Stage(tower.norm, "vision.projector.ln_q", tower.hidden, eps=1e-6),
        Stage("merge", factor=merge),
        Stage("linear", "vision.projector.mlp.0", wide, wide, True),
        Stage("gelu"),
        Stage("linear", "vision.projector.mlp.2", wide, spec.hidden_size, True),
    )
    token = config.integer("image_token_id", default=151655, high=spec.vocab_size - 1)
    made = VisionSpec(tower, projector, token, axes=True)
    return seeing(built, made, stored_vision(made, "visual.", "visual.merger", BLOCKS | spelled), {})


def build(config: Fields) -> Built:
    vision = config.inner("vision_config")
    hidden = vision.integer("embed_dim", default=1280, high=1 << 16)
    inner = int(hidden * vision.number("mlp_ratio", default=4.0, high=64.0))
    act = activation(vision, "quick_gelu")
    made = tower(vision, hidden, inner=inner, activation=act, norm="layer")
    return whole(config, made, {"up": "mlp.fc1", "down": "mlp.fc2"})


def recipe(config: Fields, preprocessor: Fields) -> Recipe:
    return area_recipe(config.inner("vision_config"), preprocessor)


PIXELS = (128 * 28 * 28, 768 * 28 * 28)  # of a frame
AROUND = ("<|vision_start|>", "<|vision_end|>")


def video(config: Fields, preprocessor: Fields, recipe: Recipe) -> Video:
    vision = config.inner("vision_config")
    return area_video(vision, preprocessor, recipe, *PIXELS, ticks=0.0, said="{tokens}", around=AROUND)


MERGER = {"ln_q": "v.post_ln", "mlp.0": "mm.0", "mlp.2": "mm.2"}


def read_text(file: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    sections = file.each("rope.dimension_sections", 4)[:3]
    return {"rope_parameters": {"rope_type": "default", "rope_theta": config["rope_theta"], "mrope_section": sections}}


def write_text(spec: DecoderSpec) -> dict[str, Any]:
    sections = next(rope.sections for rope in spec.ropes())
    return {"rope.dimension_sections": np.array([*sections, 0], np.int32)}


def read_vision(clip: Clip) -> dict[str, Any]:
    """What both sizes of tower say."""
    return {
        "depth": clip.whole("block_count"),
        "num_heads": clip.whole("attention.head_count"),
        "patch_size": clip.whole("patch_size"),
    }


def read_pixels(clip: Clip) -> dict[str, Any]:
    given = {name: clip.whole(f"image_{name}", 1) for name in ("min_pixels", "max_pixels")}
    stated = {name: pixels for name, pixels in given.items() if pixels > 1}
    return {"patch_size": clip.whole("patch_size"), **stated}


def write_pixels(vision: VisionSpec, recipe: Recipe) -> dict[str, Any]:
    if vision.merge != 2 or vision.tower.frames != 2:
        raise ToolkitError("gguf: llama.cpp's towers of Qwen-VL join 2 x 2 patches, of 2 frames each")
    sizes = {"image_size": 560, "image_min_pixels": recipe.least, "image_max_pixels": recipe.most}
    return {f"clip.vision.{key}": value for key, value in {**sizes, "spatial_merge_size": vision.merge}.items()}


def _read(clip: Clip) -> tuple[dict[str, Any], dict[str, Any]]:
    width = clip.whole("embedding_length")
    vision = {"embed_dim": width, "mlp_ratio": clip.inner / width, "hidden_act": "quick_gelu", **read_vision(clip)}
    return {"vision_config": vision, "image_token_id": clip.token("<|image_pad|>")}, read_pixels(clip)


TEXT_GGUF = replace(qwen2.GGUF, arch="qwen2vl", read=read_text, write=write_text)
TEXT = dict(rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]})
PREPROCESSOR = dict(
    image_processor_type="Qwen2VLImageProcessor", patch_size=7, min_pixels=14 * 14 * 4, max_pixels=14 * 14 * 40
)
FAMILY = Family(
    "qwen2_vl",
    "Qwen2-VL",
    ("Qwen2VLForConditionalGeneration",),
    build,
    (
        Tiny(
            dict(
                text_config=TEXT,
                vision_config=dict(depth=2, embed_dim=32, hidden_size=64, num_heads=2, mlp_ratio=2, patch_size=7),
                image_token_id=5,
                vision_start_token_id=6,
                vision_end_token_id=7,
            ),
            preprocessor=PREPROCESSOR,
            tokens=("<|image_pad|>", "<|vision_start|>", "<|vision_end|>"),
        ),
    ),
    Mmproj("qwen2vl_merger", MERGER, _read, write_pixels, "qwen2_vl", TEXT_GGUF),
    recipe=recipe,
    video=video,
    spellings=SPELLINGS,
)
