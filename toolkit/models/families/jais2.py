"""Jais 2: Llama with layer norms, biases throughout and a plain MLP whose numbers are squared. Source: transformers
``Jais2ForCausalLM``."""

from __future__ import annotations

from functools import partial

from toolkit.models.config.dims import read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built, layer_norm, llama_like, plain_mlp
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import PLAIN_BLOCK, Gguf, read_biases


def build(config: Fields) -> Built:
    dims = read_dims(config, eps=1e-5)
    mlp_bias = config.flag("mlp_bias", True)
    act = config.activation("hidden_act", default="relu2")
    return llama_like(
        config,
        dims,
        attention_bias=config.flag("attention_bias", True),
        activation=act,
        feed_forward=lambda i: plain_mlp(i, dims, act, mlp_bias),
        norm=partial(layer_norm, eps=dims.eps, bias=True),
    )


FAMILY = Family(
    "jais2",
    "Jais 2 8B, 70B",
    ("Jais2ForCausalLM",),
    build,
    (
        Tiny(dict(head_dim=32)),
        Tiny(dict(head_dim=24, attention_bias=False, mlp_bias=False, num_key_value_heads=1, tie_word_embeddings=True)),
    ),
    Gguf(
        "jais2",
        "jais2",
        PLAIN_BLOCK,
        eps="layer_norm_eps",
        fields={"hidden_act": "relu2"},
        read=read_biases,
    ),
)
