"""Granite 3 and 4 (dense): Llama with four multipliers. Source: transformers ``GraniteForCausalLM``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built, llama_like
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import BLOCK, Gguf, Metadata, read_biases
from toolkit.models.spec import DecoderSpec


def build(config: Fields) -> Built:
    return llama_like(
        config,
        attention_bias=config.flag("attention_bias", False),
        mlp_bias=config.flag("mlp_bias", False),
        **multipliers(config),
    )


def multipliers(config: Fields) -> dict[str, Any]:
    """The four of ``llama_like`` that Granite states."""
    return {
        "scale": config.number("attention_multiplier", default=1.0),
        "residual_scale": config.number("residual_multiplier", default=1.0),
        "embed_scale": config.number("embedding_multiplier", default=1.0),
        "head_scale": 1 / config.number("logits_scaling", default=1.0),
    }


def scales(spec: DecoderSpec) -> dict[str, Any]:
    """The multipliers as GGUF has them; logits are divided by theirs."""
    return {
        "embedding_scale": spec.embed_scale,
        "residual_scale": spec.layers[0].sublayers[0].residual_scale,
        "logit_scale": 1 / spec.head_scale,
    }


MULTIPLIERS = dict(embedding_multiplier=12.0, logits_scaling=2.0, residual_multiplier=0.4, attention_multiplier=0.1)


def read_gguf(file: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attention_multiplier": file.number("attention.scale"),
        "embedding_multiplier": file.number("embedding_scale", 1.0),
        "residual_multiplier": file.number("residual_scale", 1.0),
        "logits_scaling": file.number("logit_scale", 1.0),
        **read_biases(file, config),
    }


def write_gguf(spec: DecoderSpec) -> dict[str, Any]:
    return {**scales(spec), "attention.scale": spec.attention_layers()[0][1].scale}


GGUF = Gguf(
    "granite",
    "granite",
    BLOCK,
    interleaved_qk=True,
    fields={"hidden_act": "silu"},
    read=read_gguf,
    write=write_gguf,
    scale=None,
)
FAMILY = Family(
    "granite",
    "Granite 3.0 to 3.3, 4 (dense)",
    ("GraniteForCausalLM",),
    build,
    (
        Tiny(dict(MULTIPLIERS, tie_word_embeddings=True)),
        Tiny(dict(MULTIPLIERS, num_key_value_heads=1, head_dim=24, attention_bias=True)),
    ),
    GGUF,
)
