"""Gemma 4 that sees: patches with learned places of row and column that also turn by both, pictures of any ratio, means
of 3 × 3 patches as tokens, which in the large models see each other in layers that slide. What it hears with is not
read. Source: transformers ``Gemma4ForConditionalGeneration``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import ToolkitError
from toolkit.models.config.fields import MAX_LAYERS, Fields
from toolkit.models.config.preprocessor import fill_recipe, shown_numbers
from toolkit.models.config.videos import shown_as
from toolkit.models.decoder import Built
from toolkit.models.eyes.mmproj import Clip, Mmproj
from toolkit.models.eyes.pictures import Recipe
from toolkit.models.eyes.towers import activation, language_of, seeing, side, stored_vision
from toolkit.models.eyes.videos import Video
from toolkit.models.eyes.vision import Stage, Tower, VisionSpec
from toolkit.models.families.gemma4_text import FULL, ROPES, SLIDES
from toolkit.models.family import Family, Tiny
from toolkit.models.spec import DecoderSpec, Part, StoredTensor
from toolkit.models.spec.decoder import Mixer

TOKENS, OF_A_FRAME = 280, 70  # of a picture and of a video's frame, where nothing is said
PARTS = {**{x: f"self_attn.{x}_proj" for x in "qkvo"}, **{x: f"mlp.{x}_proj" for x in ("gate", "up", "down")}}
SPELLING = {
    "patch": "patch_embedder.input_proj",
    "position": "patch_embedder.position_embedding_table",
    "layers": "encoder.layers.{}",
    "norm1": "input_layernorm",
    "after1": "post_attention_layernorm",
    "norm2": "pre_feedforward_layernorm",
    "after2": "post_feedforward_layernorm",
    **{f"{x}_norm": f"self_attn.{x}_norm" for x in "qk"},
    **{x: f"{name}.linear" for x, name in PARTS.items()},
    **{f"{x}_clip": name for x, name in PARTS.items()},
    "projector.standard.bias": "vision_tower.std_bias",
    "projector.standard.scale": "vision_tower.std_scale",
    "projector.embedding_projection": "embed_vision.embedding_projection",
}


@dataclass(frozen=True)
class Kind:
    """How a family's pictures differ. ``length``: the field of vision_config that says how many tokens one has at most;
    ``places``, ``learned``: that of how many are learned along a side, and how many where it is absent, ``pooled``:
    they are those of patches; ``signed``: the tower takes numbers to -1 … 1."""

    length: str
    places: str
    learned: int
    pooled: bool
    signed: bool


KIND = Kind("default_output_length", "position_embedding_size", 10_240, pooled=True, signed=True)


def tokens_of(config: Fields, kind: Kind = KIND) -> int:
    """Of a picture at most, as far as config.json tells."""
    return config.inner("vision_config").integer(kind.length, default=TOKENS, high=1 << 14)


def pooled(vision: Fields) -> int:
    """Patches along a side of what becomes one token."""
    found: int = vision.integer("pooling_kernel_size", default=3, low=2, high=16)
    return found


def places(vision: Fields, kind: Kind = KIND) -> int:
    """That are learned along a side."""
    found: int = vision.integer(kind.places, default=kind.learned, high=1 << 20)
    return found


def is_mutual(config: Fields) -> bool:
    """Whether tokens of a picture see each other."""
    return config.inner("text_config").values.get("use_bidirectional_attention") == "vision"


def _tower(vision: Fields) -> Tower:
    heads = vision.integer("num_attention_heads", default=12, high=1024)
    if (keys := vision.integer("num_key_value_heads", default=heads, high=1024)) != heads:
        vision.fail("num_key_value_heads", keys, f"{heads}, as many as num_attention_heads")
    head_dim = vision.integer("head_dim", default=64, high=1024)
    if head_dim % 4:
        vision.fail("head_dim", head_dim, "a multiple of 4")
    layers = vision.integer("num_hidden_layers", default=16, high=MAX_LAYERS)
    rope = vision.nested("rope_parameters") or vision
    return Tower(
        layers,
        layers,
        vision.integer("hidden_size", default=768, high=1 << 16),
        heads,
        head_dim,
        vision.integer("intermediate_size", default=3072, high=1 << 18),
        side(vision, "patch_size", 16),
        activation(vision, "gelu_pytorch_tanh", "hidden_activation"),  # type: ignore[arg-type]
        "rms",
        vision.number("rms_norm_eps", default=1e-6, high=0.5),
        "axial",
        theta=rope.number("rope_theta", default=100.0),
        gated=True,
        patch_bias=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        patch_last=True,
        sides=places(vision),
        by_head=True,
        norm_both=True,
        scale=1.0,
        clipped=vision.flag("use_clipped_linears", False),
    )


def _as_stored(item: StoredTensor, tower: Tower) -> StoredTensor:
    """Rows of q and k in their order on disk: there each half of a head turns by itself, the first by the column."""
    name = item.parts[0].name
    if not any(f".{x}" in name for x in ("q.", "k.", "q_norm.", "k_norm.")):
        return item
    heads, width = (1, 1) if len(item.shape) == 1 else (tower.heads, tower.hidden)
    quarter = tower.head_dim // 4 * width
    starts = [4 * quarter * head + quarter * part for head in range(heads) for part in (2, 0, 3, 1)]
    return replace(item, parts=(Part(name, tuple((start, start + quarter) for start in starts)),))


def _strict(mixer: Mixer) -> Mixer:
    return replace(mixer, strict=True) if mixer.kind == "attention" and mixer.window is None else mixer


def sliding_alone(spec: DecoderSpec) -> DecoderSpec:
    """With layers that see everything looking at nothing behind, whatever stands together."""
    return spec.changed(lambda _, s: replace(s, mixer=_strict(s.mixer)))


def _projector(vision: Fields, tower: Tower, outputs: int) -> tuple[Stage, ...]:
    """Without bias and scale, what the means are multiplied by shows in the epsilon of their norm alone."""
    whole, hidden = vision.flag("standardize", False), tower.hidden
    eps = tower.eps if whole else tower.eps / hidden
    standard = (Stage("standard", "vision.projector.standard", hidden),) if whole else ()
    return (
        Stage("pool", factor=pooled(vision)),
        *standard,
        Stage("rms", inputs=hidden, eps=eps),
        Stage("linear", "vision.projector.embedding_projection", hidden, outputs),
    )


def build(config: Fields) -> Built:
    spec, text = language_of(config, default="gemma4_text")
    vision, mutual = config.inner("vision_config"), is_mutual(config)
    tower, most = _tower(vision), tokens_of(config)
    projector = _projector(vision, tower, spec.hidden_size)
    token = config.integer("image_token_id", default=258_880, high=spec.vocab_size - 1)
    made = VisionSpec(tower, projector, token, mutual=mutual, most=most)
    if mutual:
        spec = sliding_alone(spec)
    shapes: dict[str, tuple[int, ...]] = {
        "vision.patch.weight": (tower.hidden, 3 * tower.patch**2),
        "vision.position": (2, tower.sides, tower.hidden),
    }
    stored = stored_vision(made, "model.vision_tower.", "model", SPELLING, shapes)
    stored = [replace(x, shape=()) if "_clip." in x.parts[0].name else _as_stored(x, tower) for x in stored]
    return seeing((spec, text), made, stored, {"model.": "model.language_model."})


def recipe(config: Fields, preprocessor: Fields, kind: Kind = KIND) -> Recipe:
    vision = config.inner("vision_config")
    found = fill_recipe(vision, preprocessor, pooled(vision), TOKENS, kind.signed)
    _check_tokens(config, preprocessor, found.most // found.unit**2, kind)
    return replace(
        found,
        mark="<|image|>",
        written="<|image|>",
        token="<|image|>",
        before="<|image>",
        after="<image|>",
    )


def _check_tokens(config: Fields, preprocessor: Fields, tokens: int, kind: Kind) -> None:
    vision = config.inner("vision_config")
    if is_mutual(config) and tokens > (most := tokens_of(config, kind)):
        which = f"vision_config.{kind.length} of config.json: the engine has room for so many that see each other"
        preprocessor.fail("max_soft_tokens", tokens, f"at most {most}, {which}")
    learned, each = places(vision, kind), pooled(vision) if kind.pooled else 1
    if tokens * each > learned:
        preprocessor.fail("max_soft_tokens", tokens, f"at most {learned // each}: the tower has {learned} places")


def video(config: Fields, preprocessor: Fields, recipe: Recipe, kind: Kind = KIND) -> Video:
    """Frames by themselves, up to 32 of a video, each behind its minute and second."""
    vision = config.inner("vision_config")
    frames = fill_recipe(vision, preprocessor, pooled(vision), OF_A_FRAME, kind.signed)
    _check_tokens(config, preprocessor, frames.most // frames.unit**2, kind)
    changes = {"most": frames.most}
    preprocessor = preprocessor.filled({"fps": 24.0})  # what frames without times have; 32 are taken of any longer one
    return shown_as(shown_numbers(preprocessor, kind.signed), recipe, changes, said="{clock} {picture}", between=" ")


SCALE = "projector.scale_factor"
NAMES = {
    "standard.bias": "v.std_bias",
    "standard.scale": "v.std_scale",
    "embedding_projection": "mm.input_projection",
}
LAYER = {f"{x}_clip": f"v.blk.{{}}.attn_{x}" for x in "qkv"} | {"o_clip": "v.blk.{}.attn_out"}
LAYER |= {f"{x}_clip": f"v.blk.{{}}.ffn_{x}" for x in ("gate", "up", "down")}
LAYER |= {"after1": "v.blk.{}.attn_post_norm", "after2": "v.blk.{}.ffn_post_norm"}


def as_read(clip: Clip, vision: dict[str, Any], kind: Kind) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of config.json and of the preprocessor's; ``vision``: of vision_config, what the files of this kind alone
    say."""
    patch, pooled = clip.whole("patch_size"), clip.whole(SCALE, 3)
    area = (patch * pooled) ** 2
    tokens = clip.whole("image_max_pixels", TOKENS * area) // area
    shared = {
        "patch_size": patch,
        "pooling_kernel_size": pooled,
        kind.places: clip.rows("v.position_embd.weight"),
        "rms_norm_eps": clip.number("attention.layer_norm_epsilon"),
        kind.length: tokens,
    }
    fields = {"vision_config": vision | shared, "image_token_id": clip.token("<|image|>")}
    return fields, {"max_soft_tokens": tokens, "do_normalize": True}


def as_written(recipe: Recipe, pooled: int, own: dict[str, Any]) -> dict[str, Any]:
    """Metadata of an mmproj file; ``own``: what this kind alone says."""
    found: dict[str, Any] = {"image_size": 224, **own}  # the size tells nothing
    if recipe.most != TOKENS * recipe.unit**2:
        found["image_max_pixels"] = recipe.most
    if pooled != 3:
        found[SCALE] = pooled
    return {f"clip.vision.{key}": value for key, value in found.items()}


def _read(clip: Clip) -> tuple[dict[str, Any], dict[str, Any]]:
    heads = clip.whole("attention.head_count")
    vision = {
        "model_type": "gemma4_vision",
        "hidden_size": clip.whole("embedding_length"),
        "intermediate_size": clip.inner,
        "num_hidden_layers": clip.whole("block_count"),
        "num_attention_heads": heads,
        "head_dim": clip.whole("embedding_length") // heads,
        "use_clipped_linears": clip.has("v.blk.0.attn_q.input_max"),
        "standardize": clip.has("v.std_scale"),
    }
    return as_read(clip, vision, KIND)


def _write(vision: VisionSpec, recipe: Recipe) -> dict[str, Any]:
    if vision.tower.theta != 100.0 or vision.tower.activation != "gelu_tanh":
        raise ToolkitError("gguf: llama.cpp's gemma4v has a rope_theta of 100 and gelu_pytorch_tanh")
    mean, std = np.array(recipe.mean, np.float32), np.array(recipe.std, np.float32)
    # what the tower does to numbers comes there on top
    return as_written(recipe, vision.merge, {"image_mean": mean - std, "image_std": 2 * std})


TEXT = dict(
    model_type="gemma4_text",
    head_dim=16,
    global_head_dim=32,
    num_hidden_layers=4,
    layer_types=[SLIDES, FULL] * 2,
    rope_parameters=ROPES,
)
VISION = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=16,
    patch_size=7,
    position_embedding_size=512,
    rms_norm_eps=0.01,
)
TOKEN_IDS = dict(image_token_id=5, boi_token_id=6, eoi_token_id=7)
SMALL = dict(
    num_kv_shared_layers=2,
    use_double_wide_mlp=True,
    hidden_size_per_layer_input=32,
    vocab_size_per_layer_input=320,
    sliding_window=16,
)
LARGE = dict(
    hidden_size_per_layer_input=0,
    use_bidirectional_attention="vision",
    sliding_window=72,
    attention_k_eq_v=True,
    num_global_key_value_heads=1,
    final_logit_softcapping=10.0,
)
PREPROCESSOR = dict(image_processor_type="Gemma4ImageProcessor", patch_size=7, max_soft_tokens=70)


def tiny(text: dict[str, Any], vision: dict[str, Any], preprocessor: dict[str, Any]) -> Tiny:
    fields = dict(text_config=TEXT | text, vision_config=vision, **TOKEN_IDS)
    return Tiny(fields, preprocessor=preprocessor, tokens=("<|image|>", "<|image>", "<image|>"))


FAMILY = Family(
    "gemma4",
    "Gemma 4 E2B, E4B, 26B-A4B, 31B",
    ("Gemma4ForConditionalGeneration",),
    build,
    (
        tiny(SMALL, VISION | dict(use_clipped_linears=True), PREPROCESSOR),
        tiny(
            LARGE, VISION | dict(hidden_size=24, head_dim=12, standardize=True, default_output_length=70), PREPROCESSOR
        ),
    ),
    Mmproj("gemma4v", NAMES, _read, _write, "gemma4", tower=LAYER, as_stored=True),
    recipe=recipe,
    video=video,
    blind="gemma4_text",
)
