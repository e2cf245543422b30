"""OLMo 1: Llama with layer norms that have no parameters, projections clipped. Source: transformers
``OlmoForCausalLM``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from toolkit.models.config.dims import read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built, layer_norm, llama_like
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import BLOCK, TOP, Gguf, Metadata, without
from toolkit.models.spec import DecoderSpec

EPS = 1e-5  # whatever the config says


def build(config: Fields) -> Built:
    dims = replace(read_dims(config), eps=EPS)
    clip = config.number("clip_qkv", default=None)
    return llama_like(
        config,
        dims,
        attention_bias=config.flag("attention_bias", False),
        change=lambda i, a: replace(a, clip=clip),
        norm=partial(layer_norm, eps=EPS, weight=False),
    )


def _read(file: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"clip_qkv": file.number("attention.clamp_kqv")} if file.has("attention.clamp_kqv") else {}


def _write(spec: DecoderSpec) -> dict[str, Any]:
    clip = spec.attention_layers()[0][1].clip
    return {} if clip is None else {"attention.clamp_kqv": clip}


FAMILY = Family(
    "olmo",
    "OLMo 1 1B, 7B; OLMo 0424, 0724 (in the form of transformers)",
    ("OlmoForCausalLM",),
    build,
    (
        Tiny(dict(clip_qkv=0.7)),
        Tiny(dict(attention_bias=True, num_key_value_heads=1, tie_word_embeddings=True)),
    ),
    Gguf(
        "olmo",
        "olmo",
        without(BLOCK, "attn_norm", "ffn_norm"),
        interleaved_qk=True,
        biases=False,
        top=without(TOP, "output_norm"),
        eps="layer_norm_eps",
        fields={"hidden_act": "silu", "attention_bias": False},
        read=_read,
        write=_write,
    ),
)
