"""Apertus: Llama with norms over the heads of q and k, and a plain MLP whose activation, xIELU, has a learned shape in
each layer. Source: transformers ``ApertusForCausalLM``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from toolkit.models.config.dims import read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built, LayerNorms, llama_like, plain_mlp
from toolkit.models.families import llama
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import PLAIN_BLOCK, QK_NORMS, Gguf, Metadata, read_biases
from toolkit.models.spec import MlpSpec
from toolkit.models.spec.mlp import XIELU

NORMS: LayerNorms = (("attention_layernorm", None), ("feedforward_layernorm", None))
NAMES = {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"}
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


def _read(file: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """A file that scales nothing says so by having no factors; a config that says nothing means Llama 3's."""
    scaled = len(file.factors) > 0 or file.has("rope.scaling.factor")
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": config["rope_theta"]}}
    return read_biases(file, config) | ({} if scaled else plain)


FAMILY = Family(
    "apertus",
    "Apertus 8B, 70B",
    ("ApertusForCausalLM",),
    build,
    (
        Tiny(dict(head_dim=32)),
        Tiny(
            dict(
                head_dim=24, attention_bias=True, num_key_value_heads=1, tie_word_embeddings=True,
                rope_parameters=dict(rope_type="default", rope_theta=1e5),
            )
        ),
    ),
    Gguf(
        "apertus",
        "apertus",
        {**PLAIN_BLOCK, **QK_NORMS, **NAMES},
        listed={f"mlp.act_fn.{name}": f"xielu.{name}" for name in XIELU},
        read=_read,
    ),
)  # fmt: skip
