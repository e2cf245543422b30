"""Qwen2.5-VL: Qwen2-VL with a gated tower of RMS norms, whose layers but a few attend within windows.
Source: transformers ``Qwen2_5_VLForConditionalGeneration``, arXiv 2502.13923."""

from __future__ import annotations

from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built
from toolkit.models.families.qwen2_vl import PREPROCESSOR, SPELLINGS, TEXT, recipe, tower, whole
from toolkit.models.family import Family, Tiny
from toolkit.models.towers import activation


def build(config: Fields) -> Built:
    vision = config.nested("vision_config") or Fields({}, config.source)
    plain = tower(
        vision,
        vision.integer("hidden_size", default=1280, high=1 << 16),
        inner=vision.integer("intermediate_size", default=3420, high=1 << 18),
        activation=activation(vision, "silu"),
        norm="rms",
        gated=True,
    )
    merge = vision.integer("spatial_merge_size", default=2, high=16)
    window = vision.integer("window_size", default=112, high=1 << 16) // (plain.patch * merge) * merge
    full = tuple(sorted(vision.indices("fullatt_block_indexes", plain.layers)))
    made = type(plain)(**{**vars(plain), "window": window, "full": full})
    return whole(config, made, {name: f"mlp.{name}_proj" for name in ("gate", "up", "down")})


FAMILY = Family(
    "qwen2_5_vl",
    "Qwen2.5-VL",
    ("Qwen2_5_VLForConditionalGeneration",),
    build,
    (
        Tiny(
            dict(
                text_config=TEXT,
                vision_config=dict(
                    depth=3,
                    hidden_size=32,
                    out_hidden_size=64,
                    num_heads=2,
                    intermediate_size=48,
                    patch_size=7,
                    window_size=28,
                    fullatt_block_indexes=[1],
                ),
                image_token_id=5,
                vision_start_token_id=6,
                vision_end_token_id=7,
            ),
            preprocessor=PREPROCESSOR,
            tokens=("<|image_pad|>", "<|vision_start|>", "<|vision_end|>"),
        ),
    ),
    "llama.cpp keeps the tower in a file of its own, which is not written here",
    recipe=recipe,
    spellings=SPELLINGS,
)
