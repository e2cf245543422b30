"""Nemotron-4 and Minitron: layer norms whose weights are stored less 1, half of each head turns, and a plain MLP whose
numbers are squared. Source: transformers ``NemotronForCausalLM``."""

from __future__ import annotations

from functools import partial

from toolkit.models.config.dims import read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built, layer_norm, llama_like, plain_mlp
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import PLAIN_BLOCK, Gguf, read_biases


def build(config: Fields) -> Built:
    dims = read_dims(config, eps=1e-5)
    turned = config.number("rope_percent", "partial_rotary_factor", default=0.5, high=1.0)
    mlp_bias = config.flag("mlp_bias", False)
    act = config.activation("hidden_act", default="relu2")
    return llama_like(
        config,
        dims,
        partial_rotary=turned,
        attention_bias=config.flag("attention_bias", False),
        activation=act,
        feed_forward=lambda i: plain_mlp(i, dims, act, mlp_bias),
        norm=partial(layer_norm, eps=dims.eps, bias=True, offset=1.0),
    )


FAMILY = Family(
    "nemotron",
    "Nemotron-4 15B, 340B; Minitron 4B, 8B; Nemotron-Mini 4B",
    ("NemotronForCausalLM",),
    build,
    (
        Tiny(dict(head_dim=32)),
        Tiny(dict(head_dim=24, attention_bias=True, mlp_bias=True, num_key_value_heads=1, tie_word_embeddings=True)),
    ),
    Gguf(
        "nemotron",
        "nemotron",
        PLAIN_BLOCK,
        eps="norm_eps",
        fields={"hidden_act": "relu2"},
        read=read_biases,
    ),
)
