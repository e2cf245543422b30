"""Qwen3.5: Qwen3-VL's tower without rows behind inner layers, before Qwen3.5's text model. Source: transformers
``Qwen3_5ForConditionalGeneration``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from toolkit.models.config.fields import Fields
from toolkit.models.config.rope import read_sections
from toolkit.models.decoder import Built
from toolkit.models.eyes.towers import language_of, seeing
from toolkit.models.families import qwen2_vl, qwen3_5_text, qwen3_vl
from toolkit.models.family import WITHIN, Family, Tiny
from toolkit.models.spec import DecoderSpec, Sublayer

TOKEN = 248056
SPELLINGS = (("model.visual.",), *WITHIN)


def whole(config: Fields, language: Built) -> Built:
    """The text model, whose tokens have three positions here, with its tower."""
    spec, text = _turning(language[0], config.inner("text_config")), language[1]
    made, stored = qwen3_vl.parts(config, spec, token=TOKEN, deep=())
    return seeing((spec, text), made, stored, {})


def _turning(spec: DecoderSpec, text: Fields) -> DecoderSpec:
    name = "rope_scaling" if text.nested("rope_scaling") else "rope_parameters"

    def turned(_: int, sublayer: Sublayer) -> Sublayer:
        mixer = sublayer.mixer
        if mixer.kind != "attention" or mixer.rope is None:
            return sublayer
        thirds = {"mrope_section": qwen3_5_text.thirds(mixer.rope.rotary_dim)}
        sections = read_sections(text.over(name, thirds), mixer.rope.rotary_dim)
        return replace(sublayer, mixer=replace(mixer, rope=replace(mixer.rope, sections=sections, woven=True)))

    return spec.changed(turned)


def build(config: Fields) -> Built:
    return whole(config, language_of(config, default="qwen3_5_text"))


def tiny(text: dict[str, Any]) -> Tiny:
    return Tiny(
        dict(
            text_config=text,
            vision_config={k: v for k, v in qwen3_vl.TINY_TOWER.items() if k != "deepstack_visual_indexes"},
            image_token_id=5,
            vision_start_token_id=6,
            vision_end_token_id=7,
        ),
        preprocessor=qwen2_vl.PREPROCESSOR,
        tokens=("<|image_pad|>", "<|vision_start|>", "<|vision_end|>"),
    )


FAMILY = Family(
    "qwen3_5",
    "Qwen3.5 0.8B to 27B",
    ("Qwen3_5ForConditionalGeneration",),
    build,
    (tiny(dict(qwen3_5_text.FAMILY.tiny[0].fields)),),
    qwen3_vl.mmproj("qwen3_5", qwen3_5_text.GGUF),
    recipe=qwen3_vl.recipe,
    video=qwen3_vl.video,
    spellings=SPELLINGS,
    blind="qwen3_5_text",
)
