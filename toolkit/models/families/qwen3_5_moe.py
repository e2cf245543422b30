"""Qwen3.5 with experts: Qwen3.5's tower before that text model. Source: transformers
``Qwen3_5MoeForConditionalGeneration``."""

from __future__ import annotations

from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built
from toolkit.models.eyes.towers import language_of
from toolkit.models.families import qwen3_5, qwen3_5_moe_text, qwen3_vl
from toolkit.models.family import Family


def build(config: Fields) -> Built:
    return qwen3_5.whole(config, language_of(config, default="qwen3_5_moe_text"))


FAMILY = Family(
    "qwen3_5_moe",
    "Qwen3.5 35B-A3B to 397B-A17B",
    ("Qwen3_5MoeForConditionalGeneration",),
    build,
    (qwen3_5.tiny(dict(qwen3_5_moe_text.FAMILY.tiny[0].fields)),),
    qwen3_vl.mmproj("qwen3_5_moe", qwen3_5_moe_text.GGUF),
    recipe=qwen3_vl.recipe,
    video=qwen3_vl.video,
    spellings=qwen3_5.SPELLINGS,
    blind="qwen3_5_moe_text",
)
