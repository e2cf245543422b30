"""Granite Swash: Granite whose layers slide in part, with sinks and a base of the rope each. Source: transformers
``GraniteSWAForCausalLM``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from toolkit.models.config.dims import Dims, read_dims, read_window, read_windows
from toolkit.models.config.fields import Fields
from toolkit.models.config.rope import read_rope
from toolkit.models.decoder import Built, llama_like
from toolkit.models.families import granite
from toolkit.models.family import Family, Tiny
from toolkit.models.spec import RopeSpec


def build(config: Fields) -> Built:
    dims = read_dims(config, eps=1e-5, tied=True, kv_heads=4)
    return llama_like(
        config,
        dims,
        attention_bias=config.flag("attention_bias", False),
        mlp_bias=config.flag("mlp_bias", False),
        **layers(config, dims),
        **granite.multipliers(config),
    )


def layers(config: Fields, dims: Dims) -> dict[str, Any]:
    """What the layers have of their own, as ``llama_like`` takes it; a base of 0 is no rope."""
    window = read_window(config, default=128)
    windows = read_windows(config, dims.layers, window, [i % 4 != 0 for i in range(dims.layers)])
    rope = read_rope(config, head_dim=dims.head_dim, max_position=dims.max_position)
    bases = config.values.get("layer_rope_theta")
    ropes: list[RopeSpec | None] = [rope] * dims.layers
    if bases is not None:
        good = isinstance(bases, list) and len(bases) == dims.layers
        if not good or not all(type(x) in (int, float) and (x == 0 or 1 <= x <= 1e12) for x in bases):
            config.fail("layer_rope_theta", bases, f"a list of {dims.layers} numbers, each 0 or from 1 up")
        ropes = [replace(rope, theta=float(base)) if base else None for base in bases]
    return {"rope": ropes, "windows": windows, "sinks": True}


SIZES = dict(sliding_window=16, num_hidden_layers=3)
FAMILY = Family(
    "granite_swa",
    "Granite Swash 2B",
    ("GraniteSWAForCausalLM",),
    build,
    (
        Tiny(dict(SIZES, **granite.MULTIPLIERS, layer_rope_theta=[0, 1000.0, 50000.0])),
        Tiny(dict(SIZES, **granite.MULTIPLIERS, num_key_value_heads=1, attention_bias=True, tie_word_embeddings=False)),
    ),
    "llama.cpp's granite has neither sinks nor layers that slide",
)
