"""Mistral: Llama whose every layer may slide over ``sliding_window`` tokens. Source: arXiv 2310.06825."""

from __future__ import annotations

from toolkit.models.config.dims import read_dims, read_window
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built, llama_like
from toolkit.models.families import llama
from toolkit.models.family import Family, Tiny


def build(config: Fields) -> Built:
    return llama_like(config, read_dims(config, kv_heads=8), windows=read_window(config, default=4096))


FAMILY = Family(
    "mistral",
    "Mistral 7B, Nemo, Small; Codestral, Mathstral, Devstral",
    ("MistralForCausalLM",),
    build,
    (Tiny(dict(sliding_window=24, head_dim=32)), Tiny(dict(sliding_window=None, head_dim=24))),
    llama.GGUF,
)
