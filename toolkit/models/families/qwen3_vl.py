"""Qwen3-VL: patches that turn by row and column and have learned places besides; rows of inner layers of the tower are
added behind the language model's first layers. Source: transformers ``Qwen3VLForConditionalGeneration``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from toolkit.models.config.fields import Fields
from toolkit.models.config.preprocessor import area_recipe
from toolkit.models.config.videos import area_video
from toolkit.models.decoder import Built
from toolkit.models.eyes.mmproj import Clip, Mmproj
from toolkit.models.eyes.pictures import Recipe
from toolkit.models.eyes.towers import activation, language_of, seeing, stored_vision
from toolkit.models.eyes.videos import Video
from toolkit.models.eyes.vision import Branch, Stage, VisionSpec
from toolkit.models.families import qwen2_vl, qwen3
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import Gguf, Metadata
from toolkit.models.spec import DecoderSpec, StoredTensor

SPELLING = qwen2_vl.BLOCKS | {
    "position": "pos_embed.weight",
    "up": "mlp.linear_fc1",
    "down": "mlp.linear_fc2",
    "deep": "model.visual.deepstack_merger_list.{}",
}


def vision_fields(config: Fields) -> Fields:
    return config.over("vision_config", {"depth": 27, "patch_size": 16})


def merger(name: str, hidden: int, outputs: int, factor: int, late: bool) -> tuple[Stage, ...]:
    """Four patches a row. ``late``: the norm comes behind the merge."""
    wide = hidden * factor**2
    merge, norm = Stage("merge", factor=factor), Stage("layer", f"{name}.norm", wide if late else hidden, eps=1e-6)
    linears = (
        Stage("linear", f"{name}.linear_fc1", wide, wide, True),
        Stage("gelu"),
        Stage("linear", f"{name}.linear_fc2", wide, outputs, True),
    )
    return (merge, norm, *linears) if late else (norm, merge, *linears)


def parts(
    config: Fields, spec: DecoderSpec, token: int, deep: tuple[int, ...]
) -> tuple[VisionSpec, list[StoredTensor]]:
    """What it sees with, and its tensors. ``token``, ``deep``: where the config does not tell the image's token and the
    layers behind which rows leave."""
    vision = vision_fields(config)
    count = vision.integer("num_position_embeddings", default=2304, high=1 << 20)
    if (side := math.isqrt(count)) ** 2 != count:
        vision.fail("num_position_embeddings", count, "a square")
    tower = qwen2_vl.tower(
        vision,
        vision.integer("hidden_size", default=1152, high=1 << 16),
        inner=vision.integer("intermediate_size", default=4304, high=1 << 18),
        activation=activation(vision, "gelu_pytorch_tanh"),
        norm="layer",
        patch_bias=True,
        grid=(side, side),
        stretched=True,
    )
    factor = vision.integer("spatial_merge_size", default=2, high=16)
    layers = vision.values.get("deepstack_visual_indexes", list(deep))
    if not isinstance(layers, list) or not all(type(x) is int and 0 <= x < tower.layers for x in layers):
        vision.fail("deepstack_visual_indexes", layers, f"numbers of layers below {tower.layers}")
    branches = tuple(
        Branch(layer, merger(f"vision.deep.{i}", tower.hidden, spec.hidden_size, factor, late=True))
        for i, layer in enumerate(layers)
    )
    projector = merger("vision.projector", tower.hidden, spec.hidden_size, factor, late=False)
    image = config.integer("image_token_id", default=token, high=spec.vocab_size - 1)
    made = VisionSpec(tower, projector, image, axes=True, deep=branches)
    return made, stored_vision(made, "model.visual.", "model.visual.merger", SPELLING)


def build(config: Fields) -> Built:
    language = language_of(config, model_type="qwen3", architectures=["Qwen3ForCausalLM"])
    made, stored = parts(config, language[0], token=151655, deep=(8, 16, 24))
    return seeing(language, made, stored, {"model.": "model.language_model."})


def recipe(config: Fields, preprocessor: Fields) -> Recipe:
    return area_recipe(vision_fields(config), preprocessor)


PIXELS = (128 * 32 * 32, 768 * 32 * 32)  # of a video
SAID = "<{seconds:.1f} seconds><|vision_start|>{tokens}<|vision_end|>"


def video(config: Fields, preprocessor: Fields, recipe: Recipe) -> Video:
    return area_video(config.inner("vision_config"), preprocessor, recipe, *PIXELS, whole=True, said=SAID)


POSITIONS = "v.position_embd.weight"


def read_eyes(clip: Clip) -> tuple[dict[str, Any], dict[str, Any]]:
    layers = clip.whole("block_count")
    vision = qwen2_vl.read_vision(clip) | {
        "hidden_size": clip.whole("embedding_length"),
        "intermediate_size": clip.inner,
        "hidden_act": "gelu_pytorch_tanh",
        "num_position_embeddings": clip.rows(POSITIONS),
        "deepstack_visual_indexes": [i for i in range(layers) if clip.has(f"v.deepstack.{i}.fc1.weight")],
    }
    return {"vision_config": vision, "image_token_id": clip.token("<|image_pad|>")}, qwen2_vl.read_pixels(clip)


def _write(vision: VisionSpec, recipe: Recipe) -> dict[str, Any]:
    deep = {branch.layer for branch in vision.deep}
    return qwen2_vl.write_pixels(vision, recipe) | {
        "clip.vision.image_size": vision.tower.grid[0] * vision.tower.patch,
        "clip.vision.is_deepstack_layers": np.array([i in deep for i in range(vision.tower.layers)]),
    }


def mmproj(family: str, text: Gguf) -> Mmproj:
    names = {"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}
    return Mmproj("qwen3vl_merger", names, read_eyes, _write, family, text, joined=True)


def _read_text(file: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    read = qwen2_vl.read_text(file, config)
    return {"rope_parameters": read["rope_parameters"] | {"mrope_interleaved": True}}


def _write_text(spec: DecoderSpec) -> dict[str, Any]:
    assert spec.vision is not None
    return qwen2_vl.write_text(spec) | {"n_deepstack_layers": len(spec.vision.deep)}


TEXT_GGUF = replace(qwen3.GGUF, arch="qwen3vl", read=_read_text, write=_write_text)
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
TINY_TOWER = dict(
    depth=3,
    hidden_size=32,
    out_hidden_size=64,
    num_heads=2,
    intermediate_size=48,
    patch_size=7,
    num_position_embeddings=9,
    deepstack_visual_indexes=[0, 2],
)


def tiny(text: dict[str, Any]) -> Tiny:
    return Tiny(
        dict(
            text_config=text,
            vision_config=TINY_TOWER,
            image_token_id=5,
            vision_start_token_id=6,
            vision_end_token_id=7,
        ),
        preprocessor=qwen2_vl.PREPROCESSOR,
        tokens=("<|image_pad|>", "<|vision_start|>", "<|vision_end|>"),
    )


FAMILY = Family(
    "qwen3_vl",
    "Qwen3-VL",
    ("Qwen3VLForConditionalGeneration",),
    build,
    (tiny(dict(head_dim=16, rope_parameters=ROPE)),),
    mmproj("qwen3_vl", TEXT_GGUF),
    recipe=recipe,
    video=video,
)
