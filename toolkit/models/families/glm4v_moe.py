"""GLM-4.5V and 4.6V: GLM-4.1V's tower before GLM-4.5's experts. Source: transformers
``Glm4vMoeForConditionalGeneration``, arXiv 2507.01006."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built
from toolkit.models.eyes.towers import language_of
from toolkit.models.families import glm4_moe, glm4v, qwen2_vl
from toolkit.models.family import Family
from toolkit.models.gguf import Metadata
from toolkit.models.spec import DecoderSpec


def build(config: Fields) -> Built:
    text = config.inner("text_config")
    changes: dict[str, Any] = {"model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"]}
    bias = text.flag("attention_bias", True)
    return glm4v.whole(config, language_of(config, **changes, attention_bias=bias, use_qk_norm=False))


def _read_text(file: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return glm4_moe.read_gguf(file, config) | qwen2_vl.read_text(file, config)


def _write_text(spec: DecoderSpec) -> dict[str, Any]:
    return glm4_moe.write_gguf(spec) | qwen2_vl.write_text(spec)


SIZES = dict(glm4_moe.SIZES, num_hidden_layers=3, rope_parameters=glm4v.ROPE)
FAMILY = Family(
    "glm4v_moe",
    "GLM-4.5V 106B-A12B, GLM-4.6V",
    ("Glm4vMoeForConditionalGeneration",),
    build,
    (glm4v.tiny(SIZES),),
    glm4v.mmproj("glm4v_moe", replace(glm4_moe.GGUF, read=_read_text, write=_write_text)),
    recipe=glm4v.recipe,
    video=glm4v.video,
)
