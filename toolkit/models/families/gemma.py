"""Gemma 1: Llama with norm weights stored as w - 1, scaled embeddings and a tanh-GELU gate.
Source: arXiv 2403.08295."""

from __future__ import annotations

from toolkit.models.config.dims import read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built, llama_like
from toolkit.models.families.gemma2 import FIELDS
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import BLOCK, Gguf


def build(config: Fields) -> Built:
    dims = read_dims(config, tied=True, head_dim=256, kv_heads=16)
    config.only(" (a decoder is causal)", use_bidirectional_attention=False)
    act = config.activation("hidden_activation", "hidden_act", default="gelu_pytorch_tanh")
    return llama_like(
        config,
        dims,
        attention_bias=config.flag("attention_bias", False),
        activation="gelu_tanh" if act == "gelu" else act,  # the released files say gelu and mean its tanh form
        norm_offset=1.0,
        embed_scale=dims.hidden**0.5,
    )


FAMILY = Family(
    "gemma",
    "Gemma 1, 1.1; CodeGemma",
    ("GemmaForCausalLM",),
    build,
    (Tiny(dict(head_dim=32, num_key_value_heads=1, hidden_act="gelu")), Tiny(dict(head_dim=24, num_key_value_heads=4))),
    Gguf("gemma", "gemma", BLOCK, biases=False, fields=FIELDS),
)
