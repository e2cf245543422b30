"""Qwen3-VL with experts: Qwen3-VL's tower before Qwen3 MoE, whose experts stand in two stacks a layer, [experts, in,
out]; files that others quantized have them one by one. Source: transformers ``Qwen3VLMoeForConditionalGeneration``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built
from toolkit.models.eyes.towers import language_of, seeing
from toolkit.models.families import qwen3_moe, qwen3_vl
from toolkit.models.family import Family
from toolkit.models.stored import fused_experts, stored_tensors


def build(config: Fields) -> Built:
    text = config.inner("text_config")
    # Whether embedding and head are one is said by the whole: transformers 5 writes its class's default into the part.
    plain = {name: value for name, value in text.values.items() if name != "tie_word_embeddings"}
    changes: dict[str, Any] = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    spec, _ = language_of(config.changed({"text_config": plain}), **changes, norm_topk_prob=True)
    count, inner = text.integer("num_experts", "num_local_experts"), text.integer("moe_intermediate_size", default=1408)
    stacks = fused_experts(count, spec.hidden_size, inner, transposed=True)
    made, stored = qwen3_vl.parts(config, spec, token=151655, deep=(8, 16, 24))
    return seeing((spec, stored_tensors(spec, fused=stacks)), made, stored, {"model.": "model.language_model."})


TEXT_GGUF = replace(
    qwen3_moe.GGUF,
    arch="qwen3vlmoe",
    read=qwen3_vl.TEXT_GGUF.read,
    write=qwen3_vl.TEXT_GGUF.write,
)
SIZES = dict(qwen3_moe.SIZES, head_dim=16, num_hidden_layers=3, rope_parameters=qwen3_vl.ROPE)
FAMILY = Family(
    "qwen3_vl_moe",
    "Qwen3-VL 30B-A3B, 235B-A22B",
    ("Qwen3VLMoeForConditionalGeneration",),
    build,
    (qwen3_vl.tiny(SIZES),),
    qwen3_vl.mmproj("qwen3_vl_moe", TEXT_GGUF),
    recipe=qwen3_vl.recipe,
    video=qwen3_vl.video,
)
