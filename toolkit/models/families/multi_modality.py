"""DeepSeek-VL as its authors publish it: 1.3B is what ``deepseek_vl`` is in their spelling, 7B, with SAM's tower beside
SigLIP's, what ``deepseek_vl_hybrid`` is.
Source: the authors' package ``deepseek_vl`` (``siglip_vit.py``, ``sam.py``, ``projector.py``), arXiv 2403.05525."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from toolkit.models.config.fields import MAX_LAYERS, Fields
from toolkit.models.config.preprocessor import BILINEAR, CLIP_MEAN, CLIP_STD, HALF
from toolkit.models.decoder import Built
from toolkit.models.eyes.pictures import Recipe
from toolkit.models.eyes.towers import language_of, mlp, seeing, siglip_tower, stored_vision
from toolkit.models.eyes.vision import VisionSpec
from toolkit.models.families import deepseek_vl, deepseek_vl_hybrid
from toolkit.models.families.deepseek_vl_v2 import NAMES
from toolkit.models.families.deepseek_vl_v2 import SPELLING as TIMM
from toolkit.models.family import Family, Tiny
from toolkit.models.spec import StoredTensor

TOKEN = "image_token_id"
LARGE = {"image_size": 384, "patch_size": 16, "width": 1024, "layers": 24, "heads": 16, "mlp_ratio": 4.0}
SAM = {"image_size": 1024, "patch_size": 16, "width": 768, "layers": 12, "heads": 12, "mlp_ratio": 4.0}
HYBRID = "HybridVisionTower"  # of 7B
HALVES, CLIPS = (HALF, HALF), (CLIP_MEAN, CLIP_STD)  # mean and deviation of colours
ALIGNERS = {HYBRID: "low_high_hybrid_split_mlp_gelu", None: "mlp_gelu"}
SPLIT = {**TIMM, "projector.vision_proj": "low_up_proj", "projector.high_res_vision_proj": "high_up_proj"}
SPLIT |= {"projector.proj": "layers.1", "high": ""}
# What the file of transformers' form calls the tensors of the tower of large pictures -> what the authors' does.
HIGH = (
    (r"high_res_vision_model\.vision_encoder\.", ""),
    (r"patch_embed\.projection", "patch_embed.proj"),
    (r"layers\.", "blocks."),
    (r"high_res_vision_neck\.", "neck_hd."),
    (r"high_res_vision_proj\.conv1", "downsamples.0"),
    (r"high_res_vision_proj\.conv2", "downsamples.1"),
    (r"high_res_vision_alpha", "hd_alpha_downsamples"),
    (r"neck(\w*)\.conv1", r"neck\1.0"),
    (r"neck(\w*)\.layer_norm1", r"neck\1.1"),
    (r"neck(\w*)\.conv2", r"neck\1.2"),
    (r"neck(\w*)\.layer_norm2", r"neck\1.3"),
    (r"layer_norm([12])", r"norm\1"),
)


def hybrid(config: Fields) -> bool:
    """Whether it sees by both towers. Raises ToolkitError for another class of towers than the two released."""
    outer = config.inner("vision_config")
    return outer.text("cls", default="CLIPVisionTower", choices=("CLIPVisionTower", HYBRID)) == HYBRID


def vision_fields(config: Fields) -> Fields:
    """SigLIP's tower as ``deepseek_vl`` reads it. Raises ToolkitError for another than SigLIP-L."""
    outer = config.inner("vision_config")
    params = outer.inner("params").over("low_res_cfg", LARGE) if hybrid(config) else outer.over("params", LARGE)
    params.text("model_name", default="siglip_large_patch16_384", choices=("siglip_large_patch16_384",))
    return _tower_fields(params, hidden_act="gelu", model_type="siglip_vision_model")


def high_fields(config: Fields) -> Fields:
    """SAM's as ``deepseek_vl_hybrid`` reads it. Raises ToolkitError for another than SAM-B."""
    params = config.inner("vision_config").inner("params").over("high_res_cfg", SAM)
    params.text("model_name", default="sam_b_downsample", choices=("sam_b_downsample",))
    return _tower_fields(params)


def _tower_fields(params: Fields, **more: Any) -> Fields:
    """A tower's sizes by transformers' names."""
    params.integer("layers", high=MAX_LAYERS)
    values: dict[str, Any] = {ours: params.values.get(theirs) for ours, theirs in NAMES.items()}
    width = params.integer("width", high=1 << 16)
    values["intermediate_size"] = values["mlp_dim"] = int(width * params.number("mlp_ratio", high=64.0))
    return params.changed({**values, **more})


def build(config: Fields) -> Built:
    language = language_of(config, "language_config")
    spec, tower = language[0], siglip_tower(vision_fields(config), post_norm="used")
    aligner, both = config.inner("aligner_config").inner("params"), hybrid(config)
    only = ALIGNERS[HYBRID if both else None]
    aligner.text("projector_type", default=only, choices=(only,))
    if (depth := aligner.integer("depth", default=2, high=16)) != 2:
        aligner.fail("depth", depth, "2")
    token = config.integer(TOKEN, default=100015, high=spec.vocab_size - 1)
    shapes = {"vision.position": (1, tower.grid[0] * tower.grid[1], tower.hidden)}
    if both:
        high = deepseek_vl_hybrid.high_tower(high_fields(config), tower.grid[0])
        projector = deepseek_vl_hybrid.projector(tower, high, spec.hidden_size)
        made = VisionSpec(tower, projector, token, high=high)
        low = "vision_model.vision_tower_low.vision_tower."
        stored = [_spelled(x) for x in stored_vision(made, low, "aligner", SPLIT, shapes)]
    else:
        made = VisionSpec(tower, mlp(tower.hidden, spec.hidden_size, "gelu"), token)
        stored = stored_vision(made, "vision_model.vision_tower.", "aligner.layers", TIMM, shapes)
    return seeing(language, made, stored, {"": "language_model."})


def _spelled(stored: StoredTensor) -> StoredTensor:
    if not stored.parts[0].name.startswith("vision.high."):
        return stored
    name = stored.name
    for theirs, published in HIGH:
        name = re.sub(theirs, published, name)
    return replace(stored, name=f"vision_model.vision_tower_high.vision_tower.{name}")


def recipe(config: Fields, preprocessor: Fields) -> Recipe:
    fields: dict[str, Any] = {"vision_config": dict(vision_fields(config).values)}
    if not hybrid(config):
        return deepseek_vl.recipe(Fields(fields, config.source), preprocessor)
    # The file of the preprocessor holds the large size alone; colours stand with the towers, which apply them.
    low, high = vision_fields(config).values, high_fields(config).values
    sizes = {name: tower["image_size"] for name, tower in (("size", low), ("high_res_size", high))}
    given: dict[str, Any] = {name: {"height": size, "width": size} for name, size in sizes.items()}
    for begin, tower, usual in (("image", low, HALVES), ("high_res_image", high, CLIPS)):
        means = zip(("mean", "std"), usual, strict=True)
        given |= {f"{begin}_{kind}": tower.get(f"pixel_{kind}") or list(default) for kind, default in means}
    given["resample"] = BILINEAR  # as torchvision makes the small one of the large
    given["min_size"] = preprocessor.integer("min_size", default=14, high=1 << 12)
    fields["high_res_vision_config"] = dict(high)
    return deepseek_vl_hybrid.recipe(Fields(fields, config.source), Fields(given, config.source))


TINY = deepseek_vl.FAMILY.tiny[0]
OWN = TINY.fields["vision_config"]
BOTH = deepseek_vl_hybrid.FAMILY.tiny[0]
LARGER = BOTH.fields["high_res_vision_config"]


def _published(sizes: Any, inner: str) -> dict[str, Any]:
    """A tower's sizes by the authors' names. ``inner``: what transformers calls that of its MLP."""
    made = {theirs: sizes[ours] for ours, theirs in NAMES.items()}
    made |= {name: sizes[name] for name in ("image_size", "patch_size")}
    return made | {"mlp_ratio": sizes[inner] / sizes["hidden_size"]}


FAMILY = Family(
    "multi_modality",
    "DeepSeek-VL as published",
    ("MultiModalityCausalLM",),
    build,
    (
        Tiny(
            dict(
                language_config=TINY.fields["text_config"],
                vision_config=dict(
                    cls="CLIPVisionTower",
                    params=_published(OWN, "intermediate_size"),
                ),
                aligner_config=dict(cls="MlpProjector", params=dict(depth=2, projector_type="mlp_gelu")),
                image_token_id=5,
                tie_word_embeddings=False,
            ),
            {**TINY.fields, "vision_config": {**OWN, "hidden_act": "gelu"}},
            TINY.preprocessor,
            TINY.tokens,
        ),
        Tiny(
            dict(
                language_config=BOTH.fields["text_config"],
                vision_config=dict(
                    cls=HYBRID,
                    params=dict(
                        low_res_cfg=_published(OWN, "intermediate_size") | dict(pixel_mean=list(HALVES[0])),
                        high_res_cfg=_published(LARGER, "mlp_dim")
                        | {name: LARGER[name] for name in ("output_channels", "window_size", "global_attn_indexes")}
                        | dict(pixel_mean=[0.4, 0.5, 0.6]),
                    ),
                ),
                aligner_config=dict(cls="MlpProjector", params=dict(depth=2, projector_type=ALIGNERS[HYBRID])),
                image_token_id=5,
                tie_word_embeddings=False,
            ),
            {
                **BOTH.fields,
                "vision_config": {**OWN, "hidden_act": "gelu"},
                "high_res_vision_config": {**LARGER, "layer_norm_eps": 1e-6},
                "model_type": "deepseek_vl_hybrid",
            },
            dict(
                BOTH.preprocessor,
                image_processor_type="VLMImageProcessor",
                do_normalize=False,
                image_size=LARGER["image_size"],
                image_mean=[0.48145466, 0.4578275, 0.40821073],
            ),
            BOTH.tokens,
        ),
    ),
    "llama.cpp has no model that sees so",
    twin="deepseek_vl",
    recipe=recipe,
    token_fields={TOKEN: "<image_placeholder>"},
)
