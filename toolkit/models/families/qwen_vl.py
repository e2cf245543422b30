"""Qwen-VL, Qwen-VL-Chat: a tower like OpenCLIP's bigG, of which learned queries ask, Qwen 1 behind.
Source: the model's own ``visual.py``, arXiv 2308.12966."""

from __future__ import annotations

import math
from dataclasses import replace

from toolkit.models.config.fields import MAX_LAYERS, Fields
from toolkit.models.config.preprocessor import CLIP_MEAN, CLIP_STD
from toolkit.models.decoder import Built
from toolkit.models.eyes.pictures import Recipe
from toolkit.models.eyes.towers import clip_tower, seeing, side, stored_vision
from toolkit.models.eyes.vision import Stage, Tower, VisionSpec
from toolkit.models.families import qwen
from toolkit.models.family import Family, Tiny
from toolkit.models.spec import Part, StoredTensor

HEAD_DIM = 128  # of the attention that the queries have
BEGIN = "transformer.visual."
SPELLING = {
    "patch": "conv1",
    "position": "positional_embedding",
    "pre_norm": "ln_pre",
    "layers": "transformer.resblocks.{}",
    "norm1": "ln_1",
    "norm2": "ln_2",
    **dict.fromkeys("qkv", "attn.in_proj"),
    "o": "attn.out_proj",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
    **{f"projector.{part}.{kind}": f"attn_pool.attn.in_proj_{kind}" for part in "qkv" for kind in ("weight", "bias")},
    **{f"projector.{part}": f"attn_pool.{part}" for part in ("query", "pos_embed", "kv_proj", "ln_q", "ln_kv")},
    "projector.o": "attn_pool.attn.out_proj",
}


def vision_fields(config: Fields) -> Fields:
    absent = {"width": 1664, "layers": 48, "heads": 16, "mlp_ratio": 4.9231, "image_size": 448, "n_queries": 256}
    return config.over("visual", absent)


def tower_of(inner: Fields) -> Tower:
    width = inner.integer("width", high=1 << 16)
    named = {
        "hidden_size": width,
        "num_hidden_layers": inner.integer("layers", high=MAX_LAYERS),
        "num_attention_heads": inner.integer("heads", high=1024),
        "intermediate_size": int(width * inner.number("mlp_ratio", high=64.0)),
        "hidden_act": "gelu",
    }
    made = clip_tower(inner.changed(named), eps=1e-6)
    places = inner.integer("num_positions", default=256, high=1 << 16)
    if (learned := math.isqrt(places)) ** 2 != places:
        inner.fail("num_positions", places, "a square")
    return replace(made, class_token=False, post_norm="none", stretched=True, smooth=True, grid=(learned, learned))


def by_head(item: StoredTensor, tower: Tower) -> StoredTensor:
    """q, k and v of one head stand together, those of the next behind."""
    if len(item.parts) != 3 or not item.parts[0].name.startswith("vision.layers."):
        return item
    numbers = tower.head_dim * (item.shape[1] if len(item.shape) > 1 else 1)
    places = [tuple(((3 * h + k) * numbers, (3 * h + k + 1) * numbers) for h in range(tower.heads)) for k in range(3)]
    return replace(item, parts=tuple(Part(p.name, rows) for p, rows in zip(item.parts, places, strict=True)))


def build(config: Fields) -> Built:
    spec, stored = qwen.build(config)
    inner = vision_fields(config)
    tower, hidden = tower_of(inner), spec.hidden_size
    if inner.integer("output_dim", default=hidden) != hidden:
        inner.fail("output_dim", inner.values["output_dim"], f"{hidden}, the hidden_size")
    queries, heads = inner.integer("n_queries", high=1 << 16), max(hidden // HEAD_DIM, 1)
    stage = Stage(
        "resample", "vision.projector", tower.hidden, hidden, eps=1e-6, rows=queries, heads=heads, placed=True
    )
    token = inner.integer("image_start_id", default=151857, high=spec.vocab_size - 3) + 2
    made = VisionSpec(tower, (stage,), token)
    own = [by_head(item, tower) for item in stored_vision(made, BEGIN, BEGIN.removesuffix("."), SPELLING)]
    return seeing((replace(spec, family="qwen"), stored), made, own, {})


def recipe(config: Fields, preprocessor: Fields) -> Recipe:
    inner = vision_fields(config)
    image = side(inner, "image_size")
    return Recipe(
        kind="square",
        size=(image, image),
        unit=side(inner, "patch_size", 14),
        mean=CLIP_MEAN,
        std=CLIP_STD,
        per_tile=inner.integer("n_queries", high=1 << 16),
        most=1,
        mark="<imgpad>",
        written="<imgpad>",
        token="<imgpad>",
        before="Picture {}: <img>",
        after="</img>\n",
    )


FAMILY = Family(
    "qwen_vl",
    "Qwen-VL, Qwen-VL-Chat",
    ("QWenLMHeadModel",),
    build,
    (
        Tiny(
            dict(
                hidden_size=256,
                intermediate_size=256,
                kv_channels=64,
                seq_length=512,
                layer_norm_epsilon=1e-6,
                visual=dict(
                    width=32,
                    layers=2,
                    heads=2,
                    mlp_ratio=1.5,
                    image_size=35,
                    patch_size=7,
                    n_queries=9,
                    num_positions=16,
                    output_dim=256,
                    image_start_id=5,
                ),
            ),
            preprocessor=dict(image_processor_type="QwenVLImageProcessor"),
            tokens=("<img>", "</img>", "<imgpad>"),
        ),
    ),
    "llama.cpp has no model that sees so",
    recipe=recipe,
)
