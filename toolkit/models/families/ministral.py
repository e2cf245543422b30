"""Ministral 8B (2024): Mistral whose layers slide one by one. Source: transformers ``MinistralForCausalLM``."""

from __future__ import annotations

from toolkit.models.config.dims import read_dims, read_window, read_windows
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built, llama_like
from toolkit.models.families import llama
from toolkit.models.family import Family, Tiny


def build(config: Fields) -> Built:
    dims = read_dims(config, kv_heads=8)
    window = read_window(config, default=4096)
    return llama_like(config, dims, windows=read_windows(config, dims.layers, window, [True] * dims.layers))


FAMILY = Family(
    "ministral",
    "Ministral 8B (2024)",
    ("MinistralForCausalLM",),
    build,
    (
        Tiny(dict(head_dim=32, sliding_window=20, layer_types=["full_attention", "sliding_attention"])),
        Tiny(dict(head_dim=24, layer_types=["full_attention"] * 2, num_key_value_heads=4)),
    ),
    llama.GGUF,
)
