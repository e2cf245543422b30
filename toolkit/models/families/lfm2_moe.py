"""LFM2 with experts: of sigmoid scores that are corrected as experts are chosen. Source: transformers
``Lfm2MoeForCausalLM``."""

from __future__ import annotations

from toolkit.models.config.fields import MAX_LAYERS, Fields
from toolkit.models.decoder import Built, experts, read_experts
from toolkit.models.families import lfm2
from toolkit.models.family import Family, Tiny
from toolkit.models.spec import MoeSpec


def build(config: Fields) -> Built:
    dims = lfm2.read_lfm2_dims(config)
    count, top_k = read_experts(config, dims.layers, "num_experts")
    dense = config.integer("num_dense_layers", default=2, low=0, high=MAX_LAYERS)
    inner = config.integer("moe_intermediate_size", default=1792)
    norm_topk, scale = config.flag("norm_topk_prob", True), config.number("routed_scaling_factor", default=1.0)
    corrected = config.flag("use_expert_bias", True)

    def feed_forward(layer: int) -> MoeSpec | None:
        if layer < dense:
            return None
        return experts(
            layer, dims.hidden, inner, "silu", count=count, top_k=top_k, norm_topk=norm_topk, scale=scale,
            scoring="sigmoid", correction=corrected,
        )  # fmt: skip

    return lfm2.lfm2(config, dims, feed_forward=feed_forward)


SIZES = dict(
    num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"], num_dense_layers=1, num_experts=4,
    num_experts_per_tok=2, moe_intermediate_size=64,
)  # fmt: skip
FAMILY = Family(
    "lfm2_moe",
    "LFM2 8B-A1B, 24B-A2B",
    ("Lfm2MoeForCausalLM",),
    build,
    (Tiny(SIZES), Tiny(dict(SIZES, use_expert_bias=False, norm_topk_prob=False, routed_scaling_factor=1.5))),
    "llama.cpp's lfm2moe has short convolutions, which this tool does not write yet",
)
