"""DeepSeek-V2: latent attention, and experts of which only the best groups are asked. Source: arXiv 2405.04434 and
transformers ``DeepseekV2ForCausalLM``; where that leaves ``norm_topk_prob`` out, the model's own
``modeling_deepseek.py``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from toolkit.models.config.fields import Fields
from toolkit.models.config.latent_attention import read_latent, read_latent_dims
from toolkit.models.config.routing import on_disk, read_groups, read_routed, sparse_layers
from toolkit.models.decoder import Built, llama_like
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import (
    BLOCK,
    CORRECTION,
    EXPERT_NUMBERS,
    SHARED_EXPERT,
    WHOLE,
    Gguf,
    Metadata,
    read_betas,
    read_routing,
    routing,
    with_experts,
    without,
)
from toolkit.models.spec import MoeSpec


def build(config: Fields) -> Built:
    dims = read_latent_dims(config)
    sparse = sparse_layers(config, dims.layers, first=0, stepped=True)
    method = config.text("topk_method", default="greedy", choices=("greedy", "group_limited_greedy"))
    config.text("scoring_func", default="softmax", choices=("softmax",))
    groups: dict[str, Any] = {} if method == "greedy" else read_groups(config)
    make = read_routed(config, dims, inner=1407, shared=2, norm_topk=False, sparse=sparse, **groups)

    def feed_forward(layer: int) -> MoeSpec | None:
        if (found := make(layer)) is None:
            return None
        normed = found.norm_topk and found.top_k > 1
        return replace(found, norm_topk=normed, scale=1.0 if normed else found.scale)

    return llama_like(
        config,
        dims,
        rope=[None] * dims.layers,
        change=read_latent(config, dims, q_rank=1536),
        feed_forward=feed_forward,
        rename=on_disk,
        pairs=True,
    )


def read_latent_gguf(file: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of config.json that files of llama.cpp's deepseek2 state."""
    split = "_mla" if file.has("attention.key_length_mla") else ""  # such files have the latent as one key
    turned, theta = file.whole("rope.dimension_count"), config["rope_theta"]
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if file.has("rope.scaling.factor"):
        scale = 10 * file.number("rope.scaling.yarn_log_multiplier", 0.0)
        rope = {
            "rope_type": "yarn",
            "rope_theta": theta,
            "factor": file.number("rope.scaling.factor"),
            "original_max_position_embeddings": file.whole("rope.scaling.original_context_length"),
            "mscale": scale,
            "mscale_all_dim": scale,
            **read_betas(file),
        }
    return {
        **read_routing(file, config),
        "head_dim": turned,
        "partial_rotary_factor": 1.0,
        "kv_lora_rank": file.whole("attention.kv_lora_rank"),
        "q_lora_rank": file.stated("attention.q_lora_rank", None),
        "qk_rope_head_dim": turned,
        "num_key_value_heads": config["num_attention_heads"],
        "qk_nope_head_dim": file.whole(f"attention.key_length{split}") - turned,
        "v_head_dim": file.whole(f"attention.value_length{split}"),
        "rope_parameters": rope,
    }


NAMES = without(BLOCK, "attn_q", "attn_k", "attn_v")
GGUF = Gguf(
    "deepseek2",
    "deepseek_v2",
    {
        **NAMES,
        **with_experts({}, SHARED_EXPERT),
        "attn_q": "self_attn.q_proj",
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        WHOLE: "self_attn.kv_b_proj",  # written as llama.cpp had it first and still reads it: in every type
        f"{CORRECTION}.bias": "mlp.gate.e_score_correction_bias",
    },
    interleaved_qk=True,
    biases=False,
    norm_topk=None,
    scoring=1,
    fields={"hidden_act": "silu", "rope_interleave": True},
    numbers={"n_routed_experts": "expert_count", **EXPERT_NUMBERS},
    read=read_latent_gguf,
    write=lambda spec: routing(spec, "deepseek2"),
)
SIZES = dict(
    num_hidden_layers=3, num_key_value_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=32,
    v_head_dim=16, n_routed_experts=8, n_shared_experts=2, num_experts_per_tok=3, moe_intermediate_size=32,
    first_k_dense_replace=1,
)  # fmt: skip
YARN = dict(
    rope_type="yarn", rope_theta=1e4, factor=8.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=0.7
)
FAMILY = Family(
    "deepseek_v2",
    "DeepSeek-V2, V2-Lite, V2.5, Coder-V2",
    ("DeepseekV2ForCausalLM",),
    build,
    (
        Tiny(dict(SIZES, q_lora_rank=None, rope_parameters=YARN, topk_method="greedy", routed_scaling_factor=1.0)),
        Tiny(
            dict(
                SIZES, q_lora_rank=32, v_head_dim=24, attention_bias=True, routed_scaling_factor=2.0,
                topk_method="group_limited_greedy", n_group=4, topk_group=2,
                rope_parameters=dict(YARN, mscale_all_dim=0.9),
            ),
        ),
    ),
    GGUF,
)  # fmt: skip
