"""GLM-4.5 to 4.7: experts that are corrected as they are chosen, and one that every token goes through; half of each
head turns. Source: transformers ``Glm4MoeForCausalLM``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.models.config.dims import read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.config.routing import on_disk, read_corrected, read_routed, sparse_layers
from toolkit.models.decoder import Built, llama_like
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import (
    BLOCK,
    CORRECTION,
    EXPERT_NUMBERS,
    QK_NORMS,
    SHARED_EXPERT,
    Gguf,
    Metadata,
    has_qkv_bias,
    read_routing,
    routing,
    with_experts,
    without,
)
from toolkit.models.spec import DecoderSpec


def build(config: Fields) -> Built:
    dims = read_dims(config, eps=1e-5, kv_heads=8)
    sparse, routing = sparse_layers(config, dims.layers, first=1), read_corrected(config)
    return llama_like(
        config,
        dims,
        partial_rotary=0.5,
        qkv_bias=config.flag("attention_bias", False),
        qk_norm=config.flag("use_qk_norm", False),
        feed_forward=read_routed(config, dims, inner=1408, shared=1, norm_topk=True, sparse=sparse, **routing),
        rename=on_disk,
    )


def read_gguf(file: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return read_routing(file, config) | {
        "attention_bias": has_qkv_bias(file),
        "partial_rotary_factor": file.whole("rope.dimension_count", config["head_dim"]) / config["head_dim"],
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
    }


def write_gguf(spec: DecoderSpec) -> dict[str, Any]:
    return routing(spec, "glm4moe")


SIZES = dict(moe_intermediate_size=32, n_routed_experts=8, num_experts_per_tok=3, routed_scaling_factor=1.5)
GGUF = Gguf(
    "glm4moe",
    "glm4_moe",
    {
        **without(BLOCK, "ffn_norm"),
        **with_experts({}, SHARED_EXPERT),
        **QK_NORMS,
        "post_attention_norm": "post_attention_layernorm",
        f"{CORRECTION}.bias": "mlp.gate.e_score_correction_bias",
    },
    norm_topk=None,
    fields={"hidden_act": "silu"},
    numbers={"n_routed_experts": "expert_count", **EXPERT_NUMBERS},
    read=read_gguf,
    write=write_gguf,
)
FAMILY = Family(
    "glm4_moe",
    "GLM-4.5, 4.5 Air, 4.6, 4.7",
    ("Glm4MoeForCausalLM",),
    build,
    (
        Tiny(dict(SIZES, head_dim=32, attention_bias=True, num_hidden_layers=3)),
        Tiny(dict(SIZES, head_dim=24, use_qk_norm=True, n_group=4, topk_group=2, first_k_dense_replace=0)),
    ),
    GGUF,
)
