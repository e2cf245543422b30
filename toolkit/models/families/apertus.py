"""Apertus: Llama with norms over the heads of q and k, and a plain MLP whose activation, xIELU, has a learned shape in
each layer. Source: transformers ``ApertusForCausalLM``."""

from __future__ import annotations

from dataclasses import replace

from toolkit.models.config.dims import read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built, LayerNorms, llama_like, plain_mlp
from toolkit.models.families import llama
from toolkit.models.family import Family, Tiny
from toolkit.models.spec import MlpSpec

NORMS: LayerNorms = (("attention_layernorm", None), ("feedforward_layernorm", None))


ROPE = {**llama.LLAMA3, "rope_theta": 12e6, "original_max_position_embeddings": 8192}


def build(config: Fields) -> Built:
    if not config.has("rope_parameters") and not config.has("rope_scaling"):
        config = config.changed({"rope_scaling": ROPE})
    dims = read_dims(config, eps=1e-5)
    config.text("hidden_act", default="xielu", choices=("xielu",))
    bias = config.flag("attention_bias", False)

    def mlp(layer: int) -> MlpSpec:
        made = plain_mlp(layer, dims, "xielu", False)
        return replace(made, curve=f"model.layers.{layer}.mlp.act_fn")

    return llama_like(
        config,
        dims,
        theta=12e6,
        attention_bias=bias,
        qk_norm=True,
        activation="xielu",
        feed_forward=mlp,
        norms=NORMS,
    )


FAMILY = Family(
    "apertus",
    "Apertus 8B, 70B",
    ("ApertusForCausalLM",),
    build,
    (
        Tiny(dict(head_dim=32)),
        Tiny(dict(head_dim=24, attention_bias=True, num_key_value_heads=1, tie_word_embeddings=True)),
    ),
    "llama.cpp's files have the shape of its activation in their metadata, which is not read or written",
)
