"""Hy3: experts that are corrected as they are chosen, beside one that every token goes through, in all layers but the
first. Source: transformers ``HYV3ForCausalLM``."""

from __future__ import annotations

from typing import Any

from toolkit.models.config.fields import MAX_EXPERTS, Fields
from toolkit.models.config.rope import read_rope
from toolkit.models.decoder import Built, experts, gated_mlp, llama_like, read_dims, read_experts, renamed
from toolkit.models.family import Family, Tiny
from toolkit.models.spec import MlpSpec, MoeSpec

NAMES = {"mlp.gate": "mlp.router.gate", "mlp.gate.e_score_correction_bias": "mlp.expert_bias"}


def build(config: Fields) -> Built:
    dims = read_dims(config, eps=1e-5, head_dim=128, kv_heads=8)
    act = config.activation("hidden_act")
    count, top_k = read_experts(config, dims.layers, "num_experts", "num_local_experts")
    inner = config.integer("moe_intermediate_size", default=1536)
    shared = inner * config.integer("num_shared_experts", default=1, high=MAX_EXPERTS)
    scale = config.number("router_scaling_factor", default=2.826)
    if config.flag("mlp_bias", False):
        config.fail("mlp_bias", True, "false, as in all released models")
    bias = config.flag("attention_bias", False)
    types = config.choices("mlp_layer_types", dims.layers, ("dense", "sparse"))
    types = types or ["dense"] + ["sparse"] * (dims.layers - 1)

    def feed_forward(i: int) -> MlpSpec | MoeSpec:
        if types[i] == "dense":
            return gated_mlp(f"model.layers.{i}.mlp", dims.hidden, dims.intermediate, act)
        sizes: dict[str, Any] = dict(count=count, top_k=top_k, norm_topk=True, scale=scale, shared=shared)
        return experts(i, dims.hidden, inner, act, correction=True, scoring="sigmoid", **sizes)

    endings = renamed(NAMES)
    return llama_like(
        config,
        dims,
        rope=read_rope(config, head_dim=dims.head_dim, max_position=dims.max_position, default_theta=11_158_840.0),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        feed_forward=feed_forward,
        rename=lambda name: endings(name).replace(".shared_expert.", ".shared_mlp."),
    )


SIZES = dict(moe_intermediate_size=32, num_experts=6, num_experts_per_tok=3)
FAMILY = Family(
    "hy_v3",
    "Hy3",
    ("HYV3ForCausalLM",),
    build,
    (
        Tiny(dict(SIZES, head_dim=32)),
        Tiny(dict(SIZES, head_dim=24, num_key_value_heads=1, mlp_layer_types=["sparse", "dense"], attention_bias=True)),
    ),
    "GGUF files of Hy3 are neither read nor written",
)
