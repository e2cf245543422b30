"""Mini-Gemini: CLIP's tower, whose tokens look for more in their own place of a larger picture, as ConvNeXt sees that;
Llama, Mistral, Mixtral or Gemma behind. Source: the MGM repository's ``mgm_arch.py``, arXiv 2403.18814."""

from __future__ import annotations

from dataclasses import replace

from toolkit.models.config.fields import MAX_LAYERS, Fields
from toolkit.models.config.preprocessor import clip_recipe
from toolkit.models.decoder import Built
from toolkit.models.eyes.fine import STEM, FineTower
from toolkit.models.eyes.pictures import Recipe
from toolkit.models.eyes.towers import CLIP, clip_tower, language_of, mlp, seeing, stored_vision, taken_layers
from toolkit.models.eyes.vision import Stage, VisionSpec
from toolkit.models.families import llava
from toolkit.models.families.llava_llama import TOKEN
from toolkit.models.family import Family, Tiny

LANGUAGES = {
    f"{name}{kind}ForCausalLM": kind.lower()
    for name in ("MGM", "MiniGemini")
    for kind in ("Llama", "Mixtral", "Gemma", "Mistral")
}
SIZES = {  # sum of widths → ConvNeXt's widths and depths
    1920: ([128, 256, 512, 1024], [3, 3, 27, 3]),
    2880: ([192, 384, 768, 1536], [3, 3, 27, 3]),
    5760: ([384, 768, 1536, 3072], [3, 4, 30, 3]),
}
PROJECTOR, SELECT = "mlp2x_gelu", "mm_vision_select_layer"
NORM_EPS = 1e-5
SPELLING = {
    **CLIP,
    "high": "model.vision_tower_aux.",
    "projector.linear_1": "mm_projector.0",
    "projector.linear_2": "mm_projector.2",
    **{f"projector.{part}_norm": f"vlm_uni_{part}_projector.0" for part in ("query", "aux", "val")},
    **{f"projector.{part}": f"vlm_uni_{part}_projector.1" for part in ("query", "aux", "val")},
}


def fine_tower(config: Fields, across: int) -> FineTower:
    """``across``: tokens along a side of the whole picture."""
    wide = config.integer("mm_hidden_size_aux", default=2880)
    widths, depths = SIZES.get(wide, SIZES[2880])
    own = config.over("vision_config_aux", {"hidden_sizes": widths, "depths": depths})
    found = {name: own.values[name] for name in ("hidden_sizes", "depths")}
    for name, values in found.items():
        if not isinstance(values, list) or len(values) != 4 or not all(type(x) is int and x > 0 for x in values):
            own.fail(name, values, "four whole numbers")
    if max(found["depths"]) > MAX_LAYERS or sum(found["hidden_sizes"]) != wide:
        config.fail("mm_hidden_size_aux", wide, f"one of {', '.join(map(str, SIZES))}: the widths of ConvNeXt's stages")
    side = config.integer("image_size_aux", default=768, high=1 << 14)
    if side % (STEM * across):
        config.fail("image_size_aux", side, f"a multiple of {STEM * across}: {STEM} pixels a cell, {across} tokens")
    return FineTower(tuple(found["hidden_sizes"]), tuple(found["depths"]), side)


def tiles(config: Fields) -> tuple[int, bool]:
    """Along a side, and whether the whole stands before them."""
    return config.integer("image_grid", default=1, high=16), config.flag("image_global", False)


def build(config: Fields) -> Built:
    if config.values.get("mm_projector_type") != PROJECTOR:
        config.fail("mm_projector_type", config.values.get("mm_projector_type"), PROJECTOR)
    names = config.values.get("architectures") or [""]
    language = language_of(config, None, model_type=LANGUAGES.get(names[0], "llama"), architectures=None)
    spec, tower = language[0], clip_tower(config.inner("vision_config"))
    layer = config.filled({SELECT: -2}).values[SELECT]
    taken = taken_layers(config.changed({"vision_feature_layer": layer}), tower.layers, -2)
    tower = replace(tower, taken=taken)
    fine = fine_tower(config, tiles(config)[0] * tower.grid[0])
    mine = Stage("mine", "vision.projector", tower.hidden, tower.hidden, rows=fine.outputs, eps=NORM_EPS)
    token = config.integer(TOKEN, default=0, low=0, high=spec.vocab_size - 1)
    stages = (mine, *mlp(tower.hidden, spec.hidden_size, "gelu"))
    made = VisionSpec(tower, stages, token, fine=fine, scale=spec.embed_scale)
    stored = stored_vision(made, "model.vision_tower.vision_tower.vision_model.", "model", SPELLING)
    return seeing(language, made, stored, {})


def recipe(config: Fields, preprocessor: Fields) -> Recipe:
    grid, whole = tiles(config)
    own = preprocessor.changed({"size": None, "crop_size": None})
    pads = config.text("image_aspect_ratio", default="square", choices=("square", "pad")) == "pad"
    made = clip_recipe(config.inner("vision_config"), own, kind="mined", pad=pads)
    high = config.integer("image_size_aux", default=768, high=1 << 14)
    made = replace(made, high=high, high_mean=made.mean, high_std=made.std)
    return replace(made, most=grid, whole=whole, token="<unk>")


OWN = dict(
    mm_projector_type=PROJECTOR,
    mm_vision_select_layer=-2,
    image_aspect_ratio="pad",
    vision_config=llava.TINY_TOWER,
    vision_config_aux=dict(hidden_sizes=[4, 6, 8, 10], depths=[1, 2, 1, 1]),
    mm_hidden_size_aux=28,
    image_size_aux=64,
    image_token_index=5,
)
SEEN = dict(image_processor_type="CLIPImageProcessor")
FAMILY = Family(
    "mgm",
    "Mini-Gemini (MGM)",
    tuple(LANGUAGES),
    build,
    (
        Tiny(OWN, preprocessor=SEEN, tokens=("<unk>",)),
        Tiny(
            OWN | dict(image_grid=2, image_global=True, image_size_aux=128, image_aspect_ratio="square"),
            preprocessor=SEEN,
            tokens=("<unk>",),
        ),
    ),
    "llama.cpp has no model that sees so",
    recipe=recipe,
    token_fields={TOKEN: "<unk>"},
)
