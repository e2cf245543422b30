"""GLM-4.1V: Qwen2-VL's patches before GLM-4, with learned places besides those that turn, four patches joined as by a
convolution. Source: transformers ``Glm4vForConditionalGeneration``, arXiv 2507.01006."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from toolkit.models.config.fields import Fields
from toolkit.models.config.preprocessor import area_recipe
from toolkit.models.config.videos import area_video
from toolkit.models.decoder import Built
from toolkit.models.eyes.mmproj import Clip, Mmproj
from toolkit.models.eyes.pictures import Recipe
from toolkit.models.eyes.towers import activation, language_of, seeing, side, stored_vision
from toolkit.models.eyes.videos import Video
from toolkit.models.eyes.vision import Stage, Tower, VisionSpec
from toolkit.models.families import glm4, qwen2_vl
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import Gguf, Metadata, has_qkv_bias

SPELLING = qwen2_vl.BLOCKS | {
    **{f"{part}_norm": f"attn.{part}_norm" for part in "qk"},
    "position": "embeddings.position_embedding.weight",
    "pre_norm": "post_conv_layernorm",
    "post_norm": "post_layernorm",
    **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
PLACES = 24  # patches along a side of 336 pixels, which is said of towers without learned places too
SIZE = {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000}  # of both frames that a picture counts as


def build(config: Fields) -> Built:
    part = "text_config" if config.has("text_config") else None
    changes: dict[str, Any] = {"model_type": "glm4", "architectures": ["Glm4ForCausalLM"]}
    return whole(config, language_of(config, part, **changes, attention_bias=True, head_dim=None))


def whole(config: Fields, language: Built) -> Built:
    """``language`` with the tower and what joins its patches before it."""
    vision = config.over("vision_config", {"depth": 24, "num_heads": 12})
    places = side(vision, "image_size", 336) // side(vision, "patch_size", 14)
    tower = qwen2_vl.tower(
        vision,
        vision.integer("hidden_size", default=1536, high=1 << 16),
        inner=vision.integer("out_hidden_size", default=4096, high=1 << 16),
        **like(vision),
        qkv_bias=vision.flag("attention_bias", False),
        o_bias=False,
        mlp_bias=False,
        grid=(places, places),
        stretched=True,
        smooth=True,
        pre_norm=True,
        norm_first=True,
    )
    return joined(config, language, tower, vision.integer("intermediate_size", default=13696, high=1 << 18), 151343)


def like(vision: Fields) -> dict[str, Any]:
    """Of all towers of GLM that are like this one."""
    eps = vision.number("rms_norm_eps", default=1e-5, high=0.5)
    shape = {"norm": "rms", "eps": eps, "gated": True, "patch_bias": True, "post_norm": "used"}
    return {"activation": activation(vision, "silu"), **shape}


def joined(config: Fields, language: Built, tower: Tower, between: int, token: int) -> Built:
    """``language`` with ``tower`` before it and what joins its patches, which has ``between`` rows inside. ``token``:
    of pictures, where the config names none."""
    vision = config.inner("vision_config")
    wide = vision.integer("out_hidden_size", default=4096, high=1 << 16)
    factor = vision.integer("spatial_merge_size", default=2, high=16)
    name, hidden = "vision.projector.merger", tower.hidden * factor**2
    projector = (
        Stage("merge_channels", factor=factor),
        Stage("linear", "vision.projector.downsample", hidden, wide, True),
        Stage("linear", f"{name}.proj", wide, wide),
        Stage("layer", f"{name}.post_projection_norm", wide, eps=1e-5),
        Stage("gelu"),
        Stage("gated", name, wide, between),
        Stage("linear", f"{name}.down_proj", between, wide),
    )
    token = config.integer("image_token_id", default=token, high=language[0].vocab_size - 1)
    made = VisionSpec(tower, projector, token, axes=True)
    shapes = {"vision.projector.downsample.weight": (wide, tower.hidden, factor, factor)}
    stored = stored_vision(made, "model.visual.", "model.visual", SPELLING, shapes)
    return seeing(language, made, stored, {"model.": "model.language_model."})


def recipe(config: Fields, preprocessor: Fields) -> Recipe:
    made = area_recipe(config.inner("vision_config"), preprocessor.filled({"size": SIZE}))
    return replace(
        made,
        least=-(-made.least // 2),
        most=max(made.most // 2, made.unit**2),
        short=made.unit,
        mark="<|image|>",
        written="<|begin_of_image|><|image|><|end_of_image|>",
        token="<|image|>",
    )


PIXELS = (112 * 112, 28 * 28 * 2 * 30000)  # of a video


def video(config: Fields, preprocessor: Fields, recipe: Recipe) -> Video:
    return area_video(
        config.inner("vision_config"),
        preprocessor,
        recipe,
        *PIXELS,
        whole=True,
        said="<|begin_of_image|>{tokens}<|end_of_image|>{first}",
        around=("<|begin_of_video|>", "<|end_of_video|>"),
    )


DOWN = "vision.projector.downsample.weight"
NAMES = {
    "downsample": "mm.patch_merger",
    "merger.proj": "mm.model.fc",
    "merger.post_projection_norm": "mm.post_norm",
    **{f"merger.{name}_proj": f"mm.{name}" for name in ("gate", "up", "down")},
}


def _read(clip: Clip) -> tuple[dict[str, Any], dict[str, Any]]:
    learned = clip.has("v.position_embd.weight")  # GLM-OCR's are not
    places = math.isqrt(clip.rows("v.position_embd.weight")) if learned else PLACES
    vision = qwen2_vl.read_vision(clip) | {
        "hidden_size": clip.whole("embedding_length"),
        "out_hidden_size": clip.rows("mm.model.fc.weight"),
        "intermediate_size": clip.rows("mm.gate.weight") if learned else clip.inner,
        "image_size": places * clip.whole("patch_size"),
        "hidden_act": clip.activation,
        "rms_norm_eps": clip.number("attention.layer_norm_epsilon"),
        "attention_bias": clip.has("v.blk.0.attn_qkv.bias"),
    }
    pixels = qwen2_vl.read_pixels(clip)
    sizes = {f"{side}_edge": 2 * pixels.pop(f"{name}_pixels") for side, name in SIDES if f"{name}_pixels" in pixels}
    fields = {"vision_config": vision, "image_token_id": clip.token("<|image|>")}
    fields |= {} if learned else {"model_type": "glm_ocr"}
    return fields, pixels | ({"size": sizes} if len(sizes) == 2 else {})


SIDES = (("shortest", "min"), ("longest", "max"))


def _write(vision: VisionSpec, recipe: Recipe) -> dict[str, Any]:
    size = (vision.tower.grid[0] or PLACES) * vision.tower.patch
    return qwen2_vl.write_pixels(vision, recipe) | {"clip.vision.image_size": size}


def read_text(file: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """What the language model's file says besides."""
    turned = file.whole("rope.dimension_count", config["head_dim"]) / config["head_dim"]
    found = qwen2_vl.read_text(file, config) | {"attention_bias": has_qkv_bias(file)}
    return {**found, "rope_parameters": {**found["rope_parameters"], "partial_rotary_factor": turned}}


def mmproj(family: str, text: Gguf) -> Mmproj:
    """``text``: of the language model, but for how its rope is told."""
    return Mmproj(
        "glm4v",
        NAMES,
        _read,
        _write,
        family,
        replace(text, interleaved_qk=False, sections=True),
        tower={"pre_norm": "v.norm_embd"},
        joined=True,
        kernels=frozenset({DOWN}),
    )


def tiny(text: dict[str, Any]) -> Tiny:
    vision = dict(
        depth=2, hidden_size=32, out_hidden_size=64, intermediate_size=48, num_heads=2, patch_size=7, image_size=21
    )
    return Tiny(
        dict(text_config=text, vision_config=vision, image_token_id=5, image_start_token_id=6, image_end_token_id=7),
        preprocessor=dict(
            image_processor_type="Glm4vImageProcessor",
            patch_size=7,
            size={"shortest_edge": 14 * 14 * 8, "longest_edge": 14 * 14 * 80},
        ),
        tokens=("<|image|>", "<|begin_of_image|>", "<|end_of_image|>"),
    )


ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
FAMILY = Family(
    "glm4v",
    "GLM-4.1V 9B Thinking",
    ("Glm4vForConditionalGeneration",),
    build,
    (tiny(dict(rope_parameters=ROPE)),),
    mmproj("glm4v", replace(glm4.GGUF, read=read_text, write=qwen2_vl.write_text)),
    recipe=recipe,
    video=video,
)
