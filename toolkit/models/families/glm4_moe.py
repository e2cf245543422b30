"""GLM-4.5 to 4.7: experts that are corrected as they are chosen, and one that every token goes through; half of each
head turns. Source: transformers ``Glm4MoeForCausalLM``."""

from __future__ import annotations

from typing import Any

from toolkit.models.config_fields import MAX_EXPERTS, MAX_LAYERS, Fields
from toolkit.models.decoder import Built, experts, llama_like, read_dims, read_experts
from toolkit.models.family import Family, Tiny
from toolkit.models.rope_config import read_rope
from toolkit.models.spec import MoeSpec


def build(config: Fields) -> Built:
    dims = read_dims(config, eps=1e-5, kv_heads=8)
    act = config.activation("hidden_act")
    count, top_k = read_experts(config, dims.layers, "n_routed_experts", "num_local_experts")
    inner = config.integer("moe_intermediate_size", default=1408)
    shared = inner * config.integer("n_shared_experts", default=1, low=0, high=MAX_EXPERTS)
    first = config.integer("first_k_dense_replace", default=1, low=0, high=MAX_LAYERS)
    routing: dict[str, Any] = dict(
        norm_topk=config.flag("norm_topk_prob", True),
        scale=config.number("routed_scaling_factor", default=1.0),
        groups=config.integer("n_group", default=1, high=count),
        top_groups=config.integer("topk_group", default=1, high=count),
        scoring="sigmoid",
        group_score="two",
    )
    if routing["groups"] == 1:
        routing |= dict(top_groups=1, group_score="best")
    elif count % routing["groups"]:
        config.fail("n_group", routing["groups"], f"a divisor of the {count} experts")

    def feed_forward(i: int) -> MoeSpec | None:
        if i < first:
            return None
        return experts(i, dims.hidden, inner, act, count=count, top_k=top_k, shared=shared, correction=True, **routing)

    return llama_like(
        config,
        dims,
        rope=read_rope(config, head_dim=dims.head_dim, max_position=dims.max_position, default_partial=0.5),
        qkv_bias=config.flag("attention_bias", False),
        qk_norm=config.flag("use_qk_norm", False),
        feed_forward=feed_forward,
        rename=lambda name: name.replace(".shared_expert.", ".shared_experts."),
    )


SIZES = dict(moe_intermediate_size=32, n_routed_experts=8, num_experts_per_tok=3, routed_scaling_factor=1.5)
FAMILY = Family(
    "glm4_moe",
    "GLM-4.5, 4.5 Air, 4.6, 4.7",
    ("Glm4MoeForCausalLM",),
    build,
    (
        Tiny(dict(SIZES, head_dim=32, attention_bias=True, num_hidden_layers=3)),
        Tiny(dict(SIZES, head_dim=24, use_qk_norm=True, n_group=4, topk_group=2, first_k_dense_replace=0)),
    ),
    "GGUF files of GLM-4.5 are neither read nor written",
)
