"""FlexOlmo: OLMo 2 with experts in every layer. Source: transformers ``FlexOlmoForCausalLM``."""

from __future__ import annotations

from toolkit.models.config.dims import read_dims, read_experts
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import POST_NORMS, Built, experts, llama_like
from toolkit.models.family import Family, Tiny


def build(config: Fields) -> Built:
    dims = read_dims(config)
    act = config.activation("hidden_act")
    count, top_k = read_experts(config, dims.layers, "num_experts", "num_local_experts")
    norm_topk = config.flag("norm_topk_prob", False)
    return llama_like(
        config,
        dims,
        theta=500_000.0,
        attention_bias=config.flag("attention_bias", False),
        qk_norm="all",
        norms=POST_NORMS,
        feed_forward=lambda i: experts(
            i, dims.hidden, dims.intermediate, act, count=count, top_k=top_k, norm_topk=norm_topk
        ),
    )


SIZES = dict(num_experts=6, num_experts_per_tok=3, intermediate_size=64)
FAMILY = Family(
    "flex_olmo",
    "FlexOlmo 7x7B",
    ("FlexOlmoForCausalLM",),
    build,
    (
        Tiny(dict(SIZES, num_key_value_heads=4)),
        Tiny(dict(SIZES, num_key_value_heads=1, norm_topk_prob=True, attention_bias=True, tie_word_embeddings=True)),
    ),
    "llama.cpp has no such architecture",
)
