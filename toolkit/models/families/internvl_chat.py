"""InternVL 1.1 to 3.5, and ChemVLM, as their authors publish them: InternViT, two linears, any language model.
Source: the models' own ``modeling_internvl_chat.py``, arXiv 2404.16821."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from toolkit.models.config.fields import Fields
from toolkit.models.config.preprocessor import IMAGENET_MEAN, IMAGENET_STD, tiles_recipe
from toolkit.models.decoder import Built
from toolkit.models.eyes.pictures import Recipe
from toolkit.models.eyes.towers import language_of, seeing, stored_vision
from toolkit.models.families import internvl
from toolkit.models.family import Family, Tiny
from toolkit.models.routed import Routed

SPELLING = {
    "patch": "embeddings.patch_embedding",
    "class": "embeddings.class_embedding",
    "position": "embeddings.position_embedding",
    "layers": "encoder.layers.{}",
    "norm1": "norm1",
    "norm2": "norm2",
    **dict.fromkeys("qkv", "attn.qkv"),
    "o": "attn.proj",
    "q_norm": "attn.q_norm",
    "k_norm": "attn.k_norm",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
    "scale1": "ls1",
    "scale2": "ls2",
    "routed": "language_model.",
    **{
        f"routed.mlp.{ours}_proj": f"feed_forward_ve.{theirs}"
        for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    },
    "projector.layer_norm": "0",
    "projector.linear_1": "1",
    "projector.linear_2": "3",
}
TOKEN = "img_context_token_id"
# Ours of a field → how it is called here.
FIELDS = {"vision_feature_layer": "select_layer", "image_token_id": TOKEN}
VISION = {"attention_bias": "qkv_bias", "use_qk_norm": "qk_normalization"}


def _as_internvl(config: Fields) -> Fields:
    """``config`` with the fields that the family ``internvl`` reads."""
    inner = config.inner("vision_config")
    vision = {**inner.values, **{ours: inner.values.get(theirs) for ours, theirs in VISION.items()}}
    image = vision.get("image_size", 448)
    if config.values.get("force_image_size", image) != image:
        config.fail("force_image_size", config.values.get("force_image_size"), f"{image}, the tower's image_size")
    own = {ours: config.values.get(theirs) for ours, theirs in FIELDS.items()}
    return config.changed({**own, "vision_config": vision})


def is_one(config: Fields) -> bool:
    """Whether the language model sees by itself: patches are its tokens, with feed-forward parts of their own."""
    inner = config.inner("llm_config")
    return inner.values.get("architectures") == ["InternLM2VEForCausalLM"]


def build(config: Fields) -> Built:
    changes: dict[str, Any] = {"model_type": "internlm2", "architectures": None} if is_one(config) else {}
    language = language_of(config, "llm_config", default="internlm2", **changes)
    turned = config.text("ps_version", default="v1", choices=("v1", "v2")) == "v1"
    made = internvl.eye(_as_internvl(config), language[0], "merge_turned" if turned else "merge")
    if is_one(config):
        mlps = [x for x in language[0].linears() if ".mlp." in x.name]
        routed = tuple(Routed(x.name, x.in_features, x.out_features) for x in mlps)
        tower = replace(made.tower, layers=0, taken=0, scaled=False, qk_norm=False, post_norm="none")
        made = replace(made, tower=tower, routed=routed)
        language = replace(language[0], float16=False), language[1]  # as the authors tell
    stored = stored_vision(made, "vision_model.", "mlp1", SPELLING, internvl.shapes(made.tower))
    return seeing(language, made, stored, {"": "language_model."})


def recipe(config: Fields, preprocessor: Fields) -> Recipe:
    tiled = config.flag("dynamic_image_size", True)
    if tiled:  # 1.1 and 1.2 cut nothing, and say that they have none
        config.only("", use_thumbnail=True)
    colours = preprocessor.filled({"image_mean": list(IMAGENET_MEAN), "image_std": list(IMAGENET_STD)})
    tiles = {
        "min_patches": config.integer("min_dynamic_patch", default=1, high=256) if tiled else 1,
        "max_patches": config.integer("max_dynamic_patch", default=6, high=256) if tiled else 1,
    }
    factor = round(1 / config.number("downsample_ratio", default=0.5, high=1.0))
    return tiles_recipe(internvl.vision_fields(config), colours.changed(tiles), factor)


TINY = internvl.FAMILY.tiny[0]
TOWER = {k: v for k, v in TINY.fields["vision_config"].items() if k != "layer_scale_init_value"}
PREPROCESSOR = {**TINY.preprocessor, "image_mean": list(IMAGENET_MEAN), "image_std": list(IMAGENET_STD)}
CHAT = dict(
    ps_version="v2",
    select_layer=-1,
    max_dynamic_patch=6,
    img_context_token_id=5,
)
FAMILY = Family(
    "internvl_chat",
    "InternVL 1.5, 2, 2.5, 3 as published, Mono-InternVL, ChemVLM",
    ("InternVLChatModel",),
    build,
    (
        Tiny(
            CHAT | dict(
                llm_config=dict(model_type="qwen2", architectures=["Qwen2ForCausalLM"]),
                vision_config=TOWER | dict(qkv_bias=True),
            ),
            {**TINY.fields, "vision_config": {**TINY.fields["vision_config"], "attention_bias": True}},
            PREPROCESSOR,
            TINY.tokens,
        ),
        Tiny(
            CHAT | dict(
                llm_config=dict(
                    model_type="internlm2", architectures=["InternLM2ForCausalLM"], bias=False, num_key_value_heads=4
                ),
                vision_config=TOWER | dict(qk_normalization=True, norm_type="rms_norm", qkv_bias=False),
            ),
            {
                **TINY.fields,
                "text_config": dict(model_type="llama", num_key_value_heads=4),
                "vision_config": TINY.fields["vision_config"] | dict(use_qk_norm=True, norm_type="rms_norm"),
            },
            PREPROCESSOR,
            TINY.tokens,
        ),
        Tiny(
            CHAT | dict(
                llm_config=dict(model_type="internlm2", architectures=["InternLM2VEForCausalLM"], bias=False),
                vision_config=TOWER,
            ),
            preprocessor=PREPROCESSOR,
            tokens=TINY.tokens,
        ),
    ),
    internvl.MMPROJ,
    twin="internvl",
    recipe=recipe,
    video=internvl.video,
    token_fields={TOKEN: "<IMG_CONTEXT>"},
)  # fmt: skip
