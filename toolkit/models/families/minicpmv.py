"""MiniCPM-V 2.5 and 2.6: SigLIP's tower over slices in their own ratio, of each a few learned queries, Llama 3 or Qwen2
behind. Source: the models' own ``modeling_minicpmv.py``, arXiv 2408.01800."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from toolkit.errors import ToolkitError
from toolkit.models.config.fields import Fields
from toolkit.models.config.preprocessor import slices_recipe
from toolkit.models.config.videos import shown_as
from toolkit.models.decoder import Built
from toolkit.models.eyes.mmproj import Clip, Mmproj, tower_fields
from toolkit.models.eyes.patches import sines
from toolkit.models.eyes.pictures import Recipe
from toolkit.models.eyes.towers import CLIP, language_of, seeing, siglip_tower, stored_vision
from toolkit.models.eyes.videos import Video
from toolkit.models.eyes.vision import Stage, VisionSpec
from toolkit.models.families.llava import TINY_TOWER
from toolkit.models.family import Family, Tiny

TOKEN = "image_token_id"
HEAD_DIM = 128  # of the attention that the queries have
ABSENT = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "image_size": 980,
}
SPELLING = {
    **CLIP,
    **{f"projector.{part}.{kind}": f"attn.in_proj_{kind}" for part in "qkv" for kind in ("weight", "bias")},
    "projector.o": "attn.out_proj",
}


def vision_fields(config: Fields) -> Fields:
    return config.over("vision_config", ABSENT)


def is_later(config: Fields) -> bool:
    """Whether it is version 2.6, else 2.5."""
    version = str(config.values.get("version") or (2.6 if config.has("use_image_id") else 2.5))
    if version not in ("2.5", "2.6"):
        config.fail("version", version, "2.5 or 2.6")
    return version == "2.6"


def build(config: Fields) -> Built:
    kind, kind_class = ("qwen2", "Qwen2ForCausalLM") if is_later(config) else ("llama", "LlamaForCausalLM")
    part = "text_config" if config.has("text_config") else None  # GGUF files have it apart
    language = language_of(config, part, model_type=kind, architectures=[kind_class])
    tower = siglip_tower(vision_fields(config), post_norm="used", nearest=True)
    if config.flag("drop_vision_last_layer", False):
        tower = replace(tower, layers=tower.layers - 1, taken=tower.taken - 1)
    hidden = language[0].hidden_size
    projector = Stage(
        "resample",
        "vision.projector",
        tower.hidden,
        hidden,
        eps=1e-6,
        rows=config.integer("query_num", default=64, high=1 << 12),
        heads=max(hidden // HEAD_DIM, 1),
    )
    made = VisionSpec(tower, (projector,), config.integer(TOKEN, default=0, low=0, high=language[0].vocab_size - 1))
    return seeing(language, made, stored_vision(made, "vpm.", "resampler", SPELLING), {"": "llm."})


def recipe(config: Fields, preprocessor: Fields) -> Recipe:
    made = slices_recipe(vision_fields(config), preprocessor, config.integer("query_num", default=64, high=1 << 12))
    return replace(made, around=not is_later(config), numbered=is_later(config) and made.numbered)


POSITIONS, VERSIONS = "v.position_embd.weight", {2: "2.5", 3: "2.6"}
SIDE = 70  # places along a side, as llama.cpp has them; it needs a table of them that it does not read
NAMES = {name: f"resampler.{name}" for name in ("query", "ln_q", "ln_kv", "ln_post")} | {
    **{part: f"resampler.attn.{part}" for part in "qkv"},
    "o": "resampler.attn.out",
    "kv_proj": "resampler.kv",
    "proj": "resampler.proj.weight",
}


def _read(clip: Clip) -> tuple[dict[str, Any], dict[str, Any]]:
    found = clip.top("minicpmv_version")
    if found not in VERSIONS:
        raise ToolkitError(f"clip.minicpmv_version: expected 2 (MiniCPM-V 2.5) or 3 (2.6), found {found}")
    size, patch = clip.whole("image_size"), clip.whole("patch_size")
    vision = tower_fields(clip, "gelu_pytorch_tanh") | {"image_size": math.isqrt(clip.rows(POSITIONS)) * patch}
    fields = {
        "version": VERSIONS[found],
        "vision_config": vision,
        "query_num": clip.rows("resampler.query"),
        TOKEN: clip.token("<unk>"),
    }
    most = clip.whole("preproc_max_tiles", 9)
    sizes = {"scale_resolution": size, "patch_size": patch, "max_slice_nums": most}
    return fields, sizes | {"use_image_id": found == 3}


def _write(vision: VisionSpec, recipe: Recipe) -> dict[str, Any]:
    stage = vision.projector[0]
    if vision.tower.grid != (SIDE, SIDE) or stage.outputs % HEAD_DIM:
        raise ToolkitError(f"gguf: llama.cpp's resampler has {SIDE} x {SIDE} places and heads of {HEAD_DIM} numbers")
    return {
        "clip.has_minicpmv_projector": True,
        "clip.minicpmv_version": np.int32(2 if recipe.around else 3),
        "clip.minicpmv_query_num": stage.rows,
        "clip.vision.image_size": recipe.size[0],
        "clip.vision.preproc_max_tiles": recipe.most,
    }


MMPROJ = Mmproj(
    "resampler",
    NAMES,
    _read,
    _write,
    "minicpmv",
    turned=frozenset({"vision.projector.proj"}),
    vectors=frozenset({"vision.projector.query"}),
    more=lambda vision: {"resampler.pos_embed_k": sines(SIDE, SIDE, vision.projector[0].outputs)},
)
SIZES = dict(
    vision_config={k: v for k, v in TINY_TOWER.items() if k != "model_type"} | {"image_size": 7 * SIDE},
    hidden_size=2 * HEAD_DIM,
    query_num=4,
    image_token_id=5,
)
SLICES = dict(image_processor_type="MiniCPMVImageProcessor", patch_size=7, scale_resolution=35, max_slice_nums=6)
TOKENS = ("<unk>", "<image>", "</image>", "<slice>", "</slice>")


def video(config: Fields, preprocessor: Fields, recipe: Recipe) -> Video:
    changes = {"most": min(2, recipe.most), "numbered": False}
    return shown_as(preprocessor, recipe, changes, between="\n", around=("", "\n"))


FAMILY = Family(
    "minicpmv",
    "MiniCPM-Llama3-V 2.5, MiniCPM-V 2.6",
    ("MiniCPMV",),
    build,
    (
        Tiny(
            SIZES | dict(version=2.6, drop_vision_last_layer=True, use_image_id=True, num_attention_heads=2),
            preprocessor=SLICES | {"use_image_id": True, "image_feature_size": 4},
            tokens=(*TOKENS, "<image_id>", "</image_id>"),
        ),
        Tiny(SIZES | dict(version="2.5"), preprocessor=SLICES | {"image_feature_size": 4}, tokens=TOKENS),
    ),
    MMPROJ,
    recipe=recipe,
    video=video,
    token_fields={TOKEN: "<unk>"},
)
