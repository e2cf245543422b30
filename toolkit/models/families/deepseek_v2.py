"""DeepSeek-V2: latent attention, and experts of which only the best groups are asked. Source: arXiv 2405.04434 and
transformers ``DeepseekV2ForCausalLM``; where that leaves ``norm_topk_prob`` out, the model's own
``modeling_deepseek.py``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from toolkit.models.config.fields import MAX_LAYERS, Fields
from toolkit.models.config.latent_attention import read_latent, read_latent_dims
from toolkit.models.config.routing import on_disk, read_groups, read_routed
from toolkit.models.decoder import Built, llama_like
from toolkit.models.family import Family, Tiny
from toolkit.models.spec import MoeSpec


def build(config: Fields) -> Built:
    dims = read_latent_dims(config)
    first = config.integer("first_k_dense_replace", default=0, low=0, high=MAX_LAYERS)
    every = config.integer("moe_layer_freq", default=1, high=MAX_LAYERS)
    method = config.text("topk_method", default="greedy", choices=("greedy", "group_limited_greedy"))
    config.text("scoring_func", default="softmax", choices=("softmax",))
    groups: dict[str, Any] = {} if method == "greedy" else read_groups(config)
    make = read_routed(config, dims, inner=1407, shared=2, norm_topk=False, **groups)

    def feed_forward(layer: int) -> MoeSpec | None:
        if layer < first or layer % every:
            return None
        found = make(layer)
        return replace(found, scale=1.0) if found.norm_topk else found

    return llama_like(
        config,
        dims,
        rope=[None] * dims.layers,
        change=read_latent(config, dims, q_rank=1536),
        feed_forward=feed_forward,
        rename=on_disk,
        pairs=True,
    )


GGUF = "llama.cpp's deepseek2 has each head's part of kv_b_proj by itself, which is neither read nor written"
SIZES = dict(
    num_hidden_layers=3, num_key_value_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=32,
    v_head_dim=16, n_routed_experts=8, n_shared_experts=2, num_experts_per_tok=3, moe_intermediate_size=32,
    first_k_dense_replace=1,
)  # fmt: skip
YARN = dict(
    rope_type="yarn", rope_theta=1e4, factor=8.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=0.9
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
            ),
        ),
    ),
    GGUF,
)  # fmt: skip
