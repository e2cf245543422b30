"""Helium: Llama whose heads turn in neighbouring pairs. Source: transformers ``HeliumForCausalLM``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.models.config.dims import read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built, llama_like
from toolkit.models.families import llama
from toolkit.models.family import Family, Tiny
from toolkit.models.spec import DecoderSpec


def build(config: Fields) -> Built:
    dims = read_dims(config, eps=1e-8, head_dim=128, kv_heads=20)
    return llama_like(
        config,
        dims,
        theta=100_000.0,
        qkv_bias=config.flag("attention_bias", False),
        mlp_bias=config.flag("mlp_bias", False),
        pairs=True,
    )


def _write(spec: DecoderSpec) -> dict[str, Any]:
    if spec.attention_layers()[0][1].q.bias:
        raise ToolkitError("gguf: llama.cpp's llama has biases of q, k and v with one of o, this model without")
    return {}


FAMILY = Family(
    "helium",
    "Helium 1 2B",
    ("HeliumForCausalLM",),
    build,
    (
        Tiny(dict(head_dim=16)),
        Tiny(
            dict(
                num_attention_heads=2, head_dim=32, num_key_value_heads=1, attention_bias=True, mlp_bias=True,
                tie_word_embeddings=True,
            )
        ),
    ),
    replace(llama.GGUF, write=_write),
)  # fmt: skip
