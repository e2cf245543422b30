"""PaddleOCR-VL: SigLIP's tower over pictures of any size, whose patches turn by row and column besides their learned
places, before ERNIE 4.5 with three positions a token. Source: transformers ``PaddleOCRVLForConditionalGeneration``,
arXiv 2510.14528."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from toolkit.models.config.fields import Fields
from toolkit.models.config.preprocessor import area_recipe
from toolkit.models.decoder import Built
from toolkit.models.eyes.mmproj import Clip, Mmproj, tower_fields
from toolkit.models.eyes.pictures import Recipe
from toolkit.models.eyes.towers import CLIP, language_of, seeing, siglip_tower, stored_vision
from toolkit.models.eyes.vision import Stage, VisionSpec
from toolkit.models.families import llama, qwen2_vl
from toolkit.models.family import Family, Tiny

TOKEN = "<|IMAGE_PLACEHOLDER|>"
TEXT = {"rms_norm_eps": 1e-5, "head_dim": 128, "num_key_value_heads": 2}  # where a config says nothing of them
VISION = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
    "spatial_merge_size": 2,
}
SPELLINGS = (
    ("model.visual.", "visual."),
    ("model.projector.", "mlp_AR."),
    *((f"model.language_model.{part}", f"model.{part}") for part in ("layers.", "embed_tokens", "norm")),
)


def build(config: Fields) -> Built:
    config = config.filled({"tie_word_embeddings": True})
    part = "text_config" if config.has("text_config") else None
    text = config if part is None else config.inner(part)
    changes: dict[str, Any] = {name: value for name, value in TEXT.items() if not text.has(name)}
    if not any(text.has(name) for name in ("rope_theta", "rope_parameters")):
        changes["rope_theta"] = 500_000.0
    changes |= dict.fromkeys(("attention_bias", "mlp_bias"), text.flag("use_bias", False))
    language = language_of(config, part, model_type="llama", architectures=["LlamaForCausalLM"], **changes)
    spec, vision = language[0], config.over("vision_config", VISION)
    tower = siglip_tower(vision, positions="axial", stretched=True, overlaid=True, post_norm="used")
    factor = vision.integer("spatial_merge_size", high=16)
    wide = tower.hidden * factor**2
    projector = (
        Stage("layer", "vision.projector.pre_norm", tower.hidden, eps=1e-5),
        Stage("merge", factor=factor),
        Stage("linear", "vision.projector.linear_1", wide, wide, True),
        Stage("gelu"),
        Stage("linear", "vision.projector.linear_2", wide, spec.hidden_size, True),
    )
    token = config.integer("image_token_id", default=100295, high=spec.vocab_size - 1)
    made = VisionSpec(tower, projector, token, axes=True)
    stored = stored_vision(made, "model.visual.vision_model.", "model.projector", CLIP)
    return seeing(language, made, stored, {"model.": "model.language_model."})


def recipe(config: Fields, preprocessor: Fields) -> Recipe:
    size = {"shortest_edge": 384 * 384, "longest_edge": 1536 * 1536}
    made = area_recipe(config.over("vision_config", VISION), preprocessor.filled({"size": size}))
    return replace(made, short=made.unit, mark=TOKEN, written=f"<|IMAGE_START|>{TOKEN}<|IMAGE_END|>", token=TOKEN)


NAMES = {"pre_norm": "mm.input_norm", "linear_1": "mm.1", "linear_2": "mm.2"}


def _read(clip: Clip) -> tuple[dict[str, Any], dict[str, Any]]:
    fields = {"vision_config": tower_fields(clip, "gelu_pytorch_tanh"), "image_token_id": clip.token(TOKEN)}
    return fields, qwen2_vl.read_pixels(clip)


def _write(vision: VisionSpec, recipe: Recipe) -> dict[str, Any]:
    sizes = {"image_size": vision.tower.grid[0] * vision.tower.patch, "spatial_merge_size": vision.merge}
    sizes |= {"image_min_pixels": recipe.least, "image_max_pixels": recipe.most}
    return {f"clip.vision.{key}": value for key, value in sizes.items()}


GGUF = replace(
    llama.GGUF,
    arch="paddleocr",
    interleaved_qk=False,
    sections=True,
    biases=False,
    read=qwen2_vl.read_text,
    write=qwen2_vl.write_text,
)
FAMILY = Family(
    "paddleocr_vl",
    "PaddleOCR-VL 0.9B, 1.5, 1.6",
    ("PaddleOCRVLForConditionalGeneration",),
    build,
    (
        Tiny(
            dict(
                text_config=dict(
                    head_dim=24,
                    use_bias=False,
                    rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 5, 5]},
                ),
                vision_config=dict(
                    hidden_size=32,
                    intermediate_size=48,
                    num_hidden_layers=3,
                    num_attention_heads=2,
                    image_size=28,
                    patch_size=7,
                    spatial_merge_size=2,
                ),
                image_token_id=5,
                vision_start_token_id=6,
                vision_end_token_id=7,
                tie_word_embeddings=False,
            ),
            preprocessor=dict(
                image_processor_type="PaddleOCRVLImageProcessor",
                patch_size=7,
                size={"shortest_edge": 14 * 14 * 4, "longest_edge": 14 * 14 * 40},
            ),
            tokens=(TOKEN, "<|IMAGE_START|>", "<|IMAGE_END|>"),
        ),
    ),
    Mmproj("paddleocr", NAMES, _read, _write, "paddleocr_vl", GGUF),
    recipe=recipe,
    spellings=SPELLINGS,
)
