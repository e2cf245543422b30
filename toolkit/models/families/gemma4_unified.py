"""Gemma 4 12B that sees without a tower: the numbers of 48 × 48 pixels are normed and multiplied, learned places of row
and column added, and that is a token. Prompts, pictures and the language model are as Gemma 4's. What it hears with is
not read. Source: transformers ``Gemma4UnifiedForConditionalGeneration``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built
from toolkit.models.eyes.mmproj import Clip, Mmproj
from toolkit.models.eyes.pictures import Recipe
from toolkit.models.eyes.towers import language_of, seeing, side, stored_vision
from toolkit.models.eyes.videos import Video
from toolkit.models.eyes.vision import Stage, Tower, VisionSpec
from toolkit.models.families import gemma4
from toolkit.models.family import Family, Tiny
from toolkit.models.spec import Part, StoredTensor

SPELLING = {
    "patch_norm": "patch_ln1",
    "patch": "patch_dense",
    "pre_norm": "patch_ln2",
    "position": "pos_embedding",
    "post_norm": "pos_norm",
    "projector.embedding_projection": "embed_vision.embedding_projection",
}
KIND = gemma4.Kind("num_soft_tokens", "mm_posemb_size", 1120, pooled=False, signed=False)


def _whole(config: Fields) -> Fields:
    """With what an absent field means here, and not in ``gemma4``: tokens of a picture see each other."""
    text = {"use_bidirectional_attention": "vision", **config.inner("text_config").values}
    return config.changed({"text_config": text})


def _tower(vision: Fields) -> Tower:
    """Of no layers: what stands before and behind them is all there is."""
    return Tower(
        layers=0,
        taken=0,
        hidden=vision.integer("mm_embed_dim", default=3840, high=1 << 16),
        heads=0,
        head_dim=0,
        inner=0,
        patch=side(vision, "patch_size", 16) * gemma4.pooled(vision),
        activation="gelu_tanh",
        norm="layer",
        eps=1e-5,
        positions="learned",
        patch_last=True,
        patch_norm=True,
        pre_norm=True,
        norm_first=True,
        post_norm="used",
        sides=gemma4.places(vision, KIND),
    )


def _as_stored(item: StoredTensor, tower: Tower) -> StoredTensor:
    """Places of columns and of rows in turn on disk: a column's, then the row's of that number."""
    if item.parts[0].name != "vision.position":
        return item
    starts = [tower.hidden * i for axis in (0, 1) for i in range(axis, 2 * tower.sides, 2)]
    rows = tuple((start, start + tower.hidden) for start in starts)
    return replace(item, shape=(tower.sides, 2, tower.hidden), parts=(Part("vision.position", rows),))


def build(config: Fields) -> Built:
    config = _whole(config)
    (spec, text), vision = language_of(config, default="gemma4_unified_text"), config.inner("vision_config")
    tower, eps = _tower(vision), vision.number("rms_norm_eps", default=1e-6, high=0.5)
    if (width := vision.integer("output_proj_dims", default=3840, high=1 << 16)) != tower.hidden:
        vision.fail("output_proj_dims", width, f"{tower.hidden}, as mm_embed_dim")
    projector = (
        Stage("rms", inputs=tower.hidden, eps=eps),
        Stage("linear", "vision.projector.embedding_projection", tower.hidden, spec.hidden_size),
    )
    token = config.integer("image_token_id", default=258_880, high=spec.vocab_size - 1)
    mutual = gemma4.is_mutual(config)
    made = VisionSpec(tower, projector, token, mutual=mutual, most=gemma4.tokens_of(config, KIND))
    shapes: dict[str, tuple[int, ...]] = {"vision.patch.weight": (tower.hidden, 3 * tower.patch**2)}
    stored = stored_vision(made, "model.vision_embedder.", "model", SPELLING, shapes)
    stored = [_as_stored(item, tower) for item in stored]
    spec = gemma4.sliding_alone(spec) if mutual else spec
    return seeing((spec, text), made, stored, {"model.": "model.language_model."})


def recipe(config: Fields, preprocessor: Fields) -> Recipe:
    return gemma4.recipe(_whole(config), preprocessor, KIND)


def video(config: Fields, preprocessor: Fields, recipe: Recipe) -> Video:
    return gemma4.video(_whole(config), preprocessor, recipe, KIND)


NAMES = {"embedding_projection": "mm.input_projection"}
NORMS = {"patch_norm": "v.patch_norm.1", "pre_norm": "v.patch_norm.2", "post_norm": "v.patch_norm.3"}


def _read(clip: Clip) -> tuple[dict[str, Any], dict[str, Any]]:
    hidden = clip.whole("embedding_length")
    vision = {"model_type": "gemma4_unified_vision", "mm_embed_dim": hidden, "output_proj_dims": hidden}
    return gemma4.as_read(clip, vision, KIND)


def _write(vision: VisionSpec, recipe: Recipe) -> dict[str, Any]:
    pooled = next(factor for factor in (3, 2, *range(4, 17)) if vision.tower.patch % factor == 0)
    eps = vision.projector[0].eps  # that of the other norms is known there
    own = {"patch_size": vision.tower.patch // pooled, "attention.layer_norm_epsilon": eps}
    return gemma4.as_written(recipe, pooled, own)


VISION: dict[str, Any] = dict(
    patch_size=7,
    pooling_kernel_size=3,
    mm_embed_dim=32,
    output_proj_dims=32,
    mm_posemb_size=70,
    num_soft_tokens=70,
    rms_norm_eps=0.01,
)


def _tiny(text: dict[str, Any], vision: dict[str, Any]) -> Tiny:
    vision = VISION | vision
    given = dict(image_processor_type="Gemma4UnifiedImageProcessor", max_soft_tokens=70)
    given |= {name: vision[name] for name in ("patch_size", "pooling_kernel_size")}
    return gemma4.tiny({"model_type": "gemma4_unified_text", **text}, vision, given)


FAMILY = Family(
    "gemma4_unified",
    "Gemma 4 12B",
    ("Gemma4UnifiedForConditionalGeneration",),
    build,
    (
        _tiny(
            dict(sliding_window=72, attention_k_eq_v=True, num_global_key_value_heads=1),
            {},
        ),
        _tiny(
            dict(sliding_window=80, final_logit_softcapping=10.0, num_key_value_heads=1),
            dict(mm_embed_dim=24, output_proj_dims=24, patch_size=4, pooling_kernel_size=2, mm_posemb_size=140),
        ),
    ),
    Mmproj("gemma4uv", NAMES, _read, _write, "gemma4_unified", tower=NORMS),
    recipe=recipe,
    video=video,
    blind="gemma4_unified_text",
)
