"""Arcee's AFM: Llama with a plain MLP whose numbers are squared. Source: transformers ``ArceeForCausalLM``."""

from __future__ import annotations

from dataclasses import replace

from toolkit.models.config.dims import read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built, llama_like, plain_mlp
from toolkit.models.families import llama
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import PLAIN_BLOCK, read_biases


def build(config: Fields) -> Built:
    dims = read_dims(config, eps=1e-5)
    mlp_bias = config.flag("mlp_bias", False)
    act = config.activation("hidden_act", default="relu2")
    return llama_like(
        config,
        dims,
        attention_bias=config.flag("attention_bias", False),
        activation=act,
        feed_forward=lambda i: plain_mlp(i, dims, act, mlp_bias),
    )


FAMILY = Family(
    "arcee",
    "AFM 4.5B",
    ("ArceeForCausalLM",),
    build,
    (
        Tiny(dict(head_dim=32)),
        Tiny(dict(head_dim=24, attention_bias=True, mlp_bias=True, num_key_value_heads=1, tie_word_embeddings=True)),
    ),
    replace(
        llama.GGUF,
        arch="arcee",
        family="arcee",
        names=PLAIN_BLOCK,
        fields={"hidden_act": "relu2"},
        read=read_biases,
    ),
)
