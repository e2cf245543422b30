"""FlexOlmo: OLMo 2 with experts in every layer. Source: transformers ``FlexOlmoForCausalLM``."""

from __future__ import annotations

from toolkit.models.config.dims import read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.config.routing import read_mixture
from toolkit.models.decoder import POST_NORMS, Built, llama_like
from toolkit.models.family import Family, Tiny


def build(config: Fields) -> Built:
    dims = read_dims(config)
    return llama_like(
        config,
        dims,
        theta=500_000.0,
        attention_bias=config.flag("attention_bias", False),
        qk_norm="all",
        norms=POST_NORMS,
        feed_forward=read_mixture(config, dims, norm_topk=config.flag("norm_topk_prob", False)),
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
