"""HyperCLOVA X SEED Think: Granite with a second norm after each sublayer, and logits multiplied, not divided.
Source: transformers ``HyperCLOVAXForCausalLM``."""

from __future__ import annotations

from toolkit.models.config.dims import read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import PRE_NORMS, Built, LayerNorms, llama_like
from toolkit.models.families.granite import MULTIPLIERS
from toolkit.models.family import Family, Tiny

NORMS: LayerNorms = (("input_layernorm", "post_norm1"), ("post_attention_layernorm", "post_norm2"))


def build(config: Fields) -> Built:
    dims = read_dims(config)
    return llama_like(
        config,
        dims,
        attention_bias=config.flag("attention_bias", False),
        mlp_bias=config.flag("mlp_bias", False),
        scale=config.number("attention_multiplier", default=dims.head_dim**-0.5),
        norms=NORMS if config.flag("use_post_norm", True) else PRE_NORMS,
        residual_scale=config.number("residual_multiplier", default=1.0),
        embed_scale=config.number("embedding_multiplier", default=1.0),
        head_scale=config.number("logits_scaling", default=1.0),
    )


FAMILY = Family(
    "hyperclovax",
    "HyperCLOVA X SEED Think",
    ("HyperCLOVAXForCausalLM",),
    build,
    (Tiny(dict(MULTIPLIERS, logits_scaling=0.5)), Tiny(dict(use_post_norm=False, head_dim=24, num_key_value_heads=1))),
    "llama.cpp has no architecture for HyperCLOVA X",
)
