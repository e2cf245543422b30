"""DeepSeek-VL 7B: SigLIP's tower over the picture in a square and SAM's over a larger one, their rows side by side,
Llama. Source: transformers ``DeepseekVLHybridForConditionalGeneration``, arXiv 2403.05525."""

from __future__ import annotations

from dataclasses import replace

from toolkit.models.config.fields import MAX_LAYERS, Fields
from toolkit.models.config.preprocessor import CLIP_MEAN, CLIP_STD, FILTERS, check_size, colours
from toolkit.models.decoder import Built
from toolkit.models.eyes.high import HighTower
from toolkit.models.eyes.pictures import Recipe
from toolkit.models.eyes.towers import CLIP, language_of, seeing, side, siglip_tower, stored_vision
from toolkit.models.eyes.vision import Stage, Tower, VisionSpec
from toolkit.models.families import deepseek_vl
from toolkit.models.family import Family, Tiny

SPELLING = {**CLIP, "high": "model."}
BICUBIC = 3


def high_fields(config: Fields) -> Fields:
    return config.inner("high_res_vision_config")


def high_tower(config: Fields, grid: int) -> HighTower:
    """``grid``: rows that leave it along a side."""
    config.only("", use_abs_pos=True, use_rel_pos=True, qkv_bias=True)
    config.text("hidden_act", default="gelu", choices=("gelu",))
    hidden, heads = (config.integer(name, default=n) for name, n in (("hidden_size", 768), ("num_attention_heads", 12)))
    if hidden % heads:
        config.fail("num_attention_heads", heads, f"a divisor of hidden_size ({hidden})")
    layers = config.integer("num_hidden_layers", default=12, high=MAX_LAYERS)
    full = config.values.get("global_attn_indexes") or [2, 5, 8, 11]
    if not isinstance(full, list) or not all(type(x) is int and 0 <= x < layers for x in full):
        config.fail("global_attn_indexes", full, f"numbers of layers below {layers}")
    patch = side(config, "patch_size", 16)
    return HighTower(
        layers=layers,
        hidden=hidden,
        heads=heads,
        inner=config.integer("mlp_dim", default=int(hidden * config.number("mlp_ratio", default=4.0, high=64.0))),
        patch=patch,
        side=side(config, "image_size", 1024) // patch,
        channels=config.integer("output_channels", default=256),
        window=config.integer("window_size", default=14, high=1024),
        full=tuple(full),
        grid=grid,
        eps=config.number("layer_norm_eps", default=1e-6, high=0.5),
    )


def projector(tower: Tower, high: HighTower, hidden: int) -> tuple[Stage, ...]:
    """Rows of both towers, each to half of ``hidden`` numbers, side by side and on."""
    name, half = "vision.projector", hidden // 2
    return (
        Stage("linear", f"{name}.vision_proj", tower.hidden, half, True),
        Stage("beside", f"{name}.high_res_vision_proj", high.outputs, half, True),
        Stage("gelu"),
        Stage("linear", f"{name}.proj", 2 * half, hidden, True),
    )


def build(config: Fields) -> Built:
    language = language_of(config)
    spec, tower = language[0], siglip_tower(deepseek_vl.vision_fields(config), post_norm="used")
    high = high_tower(high_fields(config), tower.grid[0])
    token = config.integer("image_token_id", default=100015, high=spec.vocab_size - 1)
    made = VisionSpec(tower, projector(tower, high, spec.hidden_size), token, high=high)
    stored = stored_vision(made, "model.vision_model.", "model.aligner", SPELLING)
    return seeing(language, made, stored, {"model.": "model.language_model."})


def recipe(config: Fields, preprocessor: Fields) -> Recipe:
    made = deepseek_vl.recipe(config, preprocessor)
    image = side(high_fields(config), "image_size", 1024)
    check_size(preprocessor, image, "high_res_size", "the image_size of high_res_vision_config")
    names = {f"image_{name}": preprocessor.values.get(f"high_res_image_{name}") for name in ("mean", "std")}
    own = colours(Fields(names, preprocessor.source), CLIP_MEAN, CLIP_STD)
    kept = preprocessor.integer("high_res_resample", default=BICUBIC, low=0, high=FILTERS)
    return replace(made, high=image, high_mean=own["mean"], high_std=own["std"], high_resample=kept)


TINY = deepseek_vl.FAMILY.tiny[0]
FAMILY = Family(
    "deepseek_vl_hybrid",
    "DeepSeek-VL 7B (in the form of transformers)",
    ("DeepseekVLHybridForConditionalGeneration",),
    build,
    (
        Tiny(
            dict(
                TINY.fields,
                high_res_vision_config=dict(
                    model_type="sam_vision_model",
                    hidden_size=32,
                    num_hidden_layers=3,
                    num_attention_heads=2,
                    mlp_dim=48,
                    image_size=70,
                    patch_size=7,
                    output_channels=8,
                    window_size=4,
                    global_attn_indexes=[1, 2],
                    layer_norm_eps=0.1,
                ),
            ),
            preprocessor=dict(
                TINY.preprocessor,
                image_processor_type="DeepseekVLHybridImageProcessor",
                high_res_size={"height": 70, "width": 70},
                high_res_image_mean=[0.4, 0.5, 0.6],
            ),
            tokens=TINY.tokens,
        ),
    ),
    "llama.cpp has no model that sees so",
    recipe=recipe,
)
