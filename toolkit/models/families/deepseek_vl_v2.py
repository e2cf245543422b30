"""DeepSeek-VL2: SigLIP's tower over the tiles of a canvas and over the whole, lines of both ended by a learned row,
DeepSeek-V2 or its like behind. Source: the authors' ``modeling_deepseek_vl_v2.py``, arXiv 2412.10302."""

from __future__ import annotations

from typing import Any

from toolkit.models.config.fields import MAX_LAYERS, Fields
from toolkit.models.config.preprocessor import HALF, canvases, colours
from toolkit.models.decoder import Built
from toolkit.models.eyes.pictures import Recipe
from toolkit.models.eyes.towers import clip_tower, language_of, mlp, seeing, side, stored_vision
from toolkit.models.eyes.vision import Stage, Tower, VisionSpec
from toolkit.models.families import deepseek_v2
from toolkit.models.family import Family, Tiny

TOKEN = "image_token_id"
SPELLING = {
    "patch": "patch_embed.proj",
    "position": "pos_embed",
    "layers": "blocks.{}",
    "norm1": "norm1",
    "norm2": "norm2",
    **dict.fromkeys("qkv", "attn.qkv"),
    "o": "attn.proj",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
    "post_norm": "norm",
    "newline": "image_newline",
    "separator": "view_seperator",  # so it is spelled
    "projector.linear_1": "0",
    "projector.linear_2": "2",
}
SO400M = {"width": 1152, "layers": 27, "heads": 16, "patch_size": 14, "mlp_ratio": 3.7362}
NAMES = {"hidden_size": "width", "num_hidden_layers": "layers", "num_attention_heads": "heads"}


def tower_of(config: Fields) -> Tower:
    inner = vision_fields(config)
    values = {ours: inner.values.get(theirs) for ours, theirs in NAMES.items()}
    width = inner.integer("width", high=1 << 16)
    values["intermediate_size"] = int(width * inner.number("mlp_ratio", high=64.0))
    inner.integer("layers", high=MAX_LAYERS)
    made = inner.changed({**values, "hidden_act": "gelu_pytorch_tanh"})
    return clip_tower(made, eps=1e-6, patch_bias=True, class_token=False, pre_norm=False, post_norm="used")


def vision_fields(config: Fields) -> Fields:
    return config.over("vision_config", SO400M | {"image_size": 384})


def projector_fields(config: Fields) -> Fields:
    found = config.inner("projector_config")
    found.text("projector_type", default="downsample_mlp_gelu", choices=("downsample_mlp_gelu",))
    if found.integer("depth", default=2) != 2:
        found.fail("depth", found.values["depth"], "2")
    return found


def language(config: Fields) -> Built:
    """Files of small models have it without latent attention, those of the largest with V3's routing."""
    inner = config.inner("language_config")
    changes: dict[str, Any] = {"model_type": "deepseek_v2", "architectures": None}
    if not inner.flag("use_mla", True):
        changes["model_type"] = "deepseek"
    elif inner.values.get("topk_method") == "noaux_tc":
        changes["model_type"] = "deepseek_v3"
    return language_of(config, "language_config", **changes)


def build(config: Fields) -> Built:
    built, tower = language(config), tower_of(config)
    spec, projector = built[0], projector_fields(config)
    config.text("tile_tag", default="2D", choices=("2D",))
    first = config.text("global_view_pos", default="head", choices=("head", "tail")) == "head"
    factor = projector.integer("downsample_ratio", default=2, high=16)
    wide = spec.hidden_size * projector.integer("mlp_ratio", default=1, high=64)
    one, act, two = mlp(tower.hidden * factor**2, wide, "gelu")
    two = Stage("linear", two.name, wide, spec.hidden_size, True)
    made = VisionSpec(
        tower,
        (Stage("merge_channels", factor=factor), one, act, two),
        config.integer(TOKEN, default=0, low=0, high=spec.vocab_size - 1),
        join="lined",
        whole_first=first,
    )
    places = tower.grid[0] * tower.grid[1]
    shapes = {"vision.position": (1, places, tower.hidden)}
    return seeing(built, made, stored_vision(made, "vision.", "projector.layers", SPELLING, shapes), {"": "language."})


def recipe(config: Fields, preprocessor: Fields) -> Recipe:
    tower = vision_fields(config)
    image, patch = side(tower, "image_size"), side(tower, "patch_size")
    factor = projector_fields(config).integer("downsample_ratio", default=2, high=16)
    named = preprocessor if preprocessor.has("candidate_resolutions") else config
    sizes = canvases(named, ((image, image),), tower, "candidate_resolutions")
    return Recipe(
        kind="framed",
        size=(image, image),
        unit=patch * factor,
        canvases=tuple((height, width) for width, height in sizes),
        per_tile=(-(-(image // patch) // factor)) ** 2,
        few=2,
        **colours(preprocessor, HALF, HALF),
    )


LATENT = {k: v for k, v in deepseek_v2.FAMILY.tiny[0].fields.items() if k != "rope_parameters"}
EYES = dict(
    vision_config=dict(image_size=37, patch_size=7, width=32, layers=2, heads=2, mlp_ratio=1.5),
    projector_config=dict(downsample_ratio=2, mlp_ratio=1, depth=2),
    candidate_resolutions=[[37, 37], [74, 37], [37, 74], [74, 74], [37, 111]],
    image_token_id=5,
)
FAMILY = Family(
    "deepseek_vl_v2",
    "DeepSeek-VL2 (tiny, small, base)",
    ("DeepseekVLV2ForCausalLM",),
    build,
    (
        Tiny(
            dict(EYES, language_config=dict(LATENT, use_mla=True)),
            preprocessor=dict(image_processor_type="DeepseekVLV2Processor"),
            tokens=("<image>",),
        ),
    ),
    "llama.cpp has no model that sees so",
    recipe=recipe,
    token_fields={TOKEN: "<image>"},
)
