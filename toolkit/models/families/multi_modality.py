"""DeepSeek-VL 1.3B as its authors publish it: what ``deepseek_vl`` is, in their spelling.
Source: the authors' package ``deepseek_vl`` (``siglip_vit.py``, ``projector.py``), arXiv 2403.05525."""

from __future__ import annotations

from typing import Any

from toolkit.models.config.fields import MAX_LAYERS, Fields
from toolkit.models.decoder import Built
from toolkit.models.families import deepseek_vl
from toolkit.models.families.deepseek_vl_v2 import NAMES
from toolkit.models.families.deepseek_vl_v2 import SPELLING as TIMM
from toolkit.models.family import Family, Tiny
from toolkit.models.pictures import Recipe
from toolkit.models.towers import language_of, mlp, seeing, siglip_tower, stored_vision
from toolkit.models.vision import VisionSpec

TOKEN = "image_token_id"
LARGE = {"image_size": 384, "patch_size": 16, "width": 1024, "layers": 24, "heads": 16, "mlp_ratio": 4.0}
HYBRID = "HybridVisionTower"  # of 7B


def vision_fields(config: Fields) -> Fields:
    """The tower's as ``deepseek_vl`` reads them. Raises ToolkitError for the tower of 7B, or another than SigLIP-L."""
    outer = config.inner("vision_config")
    if outer.values.get("cls") == HYBRID:
        outer.fail("cls", HYBRID, "CLIPVisionTower; of 7B load the form of transformers, deepseek-vl-7b-chat")
    params = outer.over("params", LARGE)
    params.text("model_name", default="siglip_large_patch16_384", choices=("siglip_large_patch16_384",))
    params.integer("layers", high=MAX_LAYERS)
    values: dict[str, Any] = {ours: params.values.get(theirs) for ours, theirs in NAMES.items()}
    width = params.integer("width", high=1 << 16)
    values["intermediate_size"] = int(width * params.number("mlp_ratio", high=64.0))
    given = {**params.values, **values, "hidden_act": "gelu", "model_type": "siglip_vision_model"}
    return Fields(given, params.source, params.prefix)


def build(config: Fields) -> Built:
    language = language_of(config, "language_config")
    spec, tower = language[0], siglip_tower(vision_fields(config), post_norm="used")
    aligner = config.inner("aligner_config").inner("params")
    aligner.text("projector_type", default="mlp_gelu", choices=("mlp_gelu",))
    if (depth := aligner.integer("depth", default=2, high=16)) != 2:
        aligner.fail("depth", depth, "2")
    token = config.integer(TOKEN, default=100015, high=spec.vocab_size - 1)
    made = VisionSpec(tower, mlp(tower.hidden, spec.hidden_size, "gelu"), token)
    shapes = {"vision.position": (1, tower.grid[0] * tower.grid[1], tower.hidden)}
    stored = stored_vision(made, "vision_model.vision_tower.", "aligner.layers", TIMM, shapes)
    return seeing(language, made, stored, {"": "language_model."})


def recipe(config: Fields, preprocessor: Fields) -> Recipe:
    fields = Fields({"vision_config": dict(vision_fields(config).values)}, config.source)
    return deepseek_vl.recipe(fields, preprocessor)


TINY = deepseek_vl.FAMILY.tiny[0]
OWN = TINY.fields["vision_config"]
FAMILY = Family(
    "multi_modality",
    "DeepSeek-VL 1.3B as published",
    ("MultiModalityCausalLM",),
    build,
    (
        Tiny(
            dict(
                language_config=TINY.fields["text_config"],
                vision_config=dict(
                    cls="CLIPVisionTower",
                    params=dict(
                        {name: OWN[name] for name in ("image_size", "patch_size")},
                        width=OWN["hidden_size"],
                        layers=OWN["num_hidden_layers"],
                        heads=OWN["num_attention_heads"],
                        mlp_ratio=OWN["intermediate_size"] / OWN["hidden_size"],
                    ),
                ),
                aligner_config=dict(cls="MlpProjector", params=dict(depth=2, projector_type="mlp_gelu")),
                image_token_id=5,
                tie_word_embeddings=False,
            ),
            {**TINY.fields, "vision_config": {**OWN, "hidden_act": "gelu"}},
            TINY.preprocessor,
            TINY.tokens,
        ),
    ),
    "llama.cpp has no model that sees so",
    twin="deepseek_vl",
    recipe=recipe,
    token_fields={TOKEN: "<image_placeholder>"},
)
