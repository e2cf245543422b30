"""GLM-OCR: GLM-4.1V with a smaller tower that has no learned places and norms q and k, before a GLM-4 whose heads are
as wide as it likes. Source: transformers ``GlmOcrForConditionalGeneration``, arXiv 2603.10910."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built
from toolkit.models.eyes.towers import language_of
from toolkit.models.families import glm4, glm4v, qwen2_vl
from toolkit.models.family import Family

ABSENT = {"depth": 24, "hidden_size": 1024, "num_heads": 16, "out_hidden_size": 1536, "intermediate_size": 4096}


def build(config: Fields) -> Built:
    text = config.inner("text_config")
    rope = {"partial_rotary_factor": 1.0, **text.inner("rope_parameters").values}
    changes: dict[str, Any] = {"model_type": "glm4", "architectures": ["Glm4ForCausalLM"], "rope_parameters": rope}
    width = text.integer("hidden_size", default=1024, high=1 << 16)
    heads = text.integer("num_attention_heads", default=16, high=1024)
    head_dim = text.integer("head_dim", default=width // heads, high=1024)
    language = language_of(config, **changes, attention_bias=False, head_dim=head_dim)
    vision = config.over("vision_config", ABSENT)
    bias = vision.flag("attention_bias", True)
    inner, wide = (vision.integer(name, high=1 << 18) for name in ("intermediate_size", "out_hidden_size"))
    tower = qwen2_vl.tower(
        vision,
        vision.integer("hidden_size", high=1 << 16),
        inner=inner,
        **glm4v.like(vision),
        **dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), bias),
        by_head=True,
        norm_values=False,
    )
    return glm4v.joined(config.changed({"vision_config": vision.values}), language, tower, 3 * wide, 59280)


ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 5, 5], "partial_rotary_factor": 1.0}
FAMILY = Family(
    "glm_ocr",
    "GLM-OCR 0.9B",
    ("GlmOcrForConditionalGeneration",),
    build,
    (glm4v.tiny(dict(rope_parameters=ROPE, head_dim=24)),),
    glm4v.mmproj("glm_ocr", replace(glm4.GGUF, read=glm4v.read_text, write=qwen2_vl.write_text)),
    recipe=glm4v.recipe,
)
