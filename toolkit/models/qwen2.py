"""Qwen2 and Qwen2.5: biases on q, k and v; upper layers may slide. Source: transformers ``Qwen2ForCausalLM``."""

from __future__ import annotations

from toolkit.models.config_fields import MAX_LAYERS, Fields
from toolkit.models.decoder import (
    Built,
    assemble,
    attention,
    gated_mlp,
    pre_norm_layer,
    read_dims,
    read_window,
    read_windows,
    stored_tensors,
)
from toolkit.models.rope_config import read_rope


def layer_windows(config: Fields, layers: int) -> list[int | None]:
    """Window of each layer: ``layer_types``, else every layer from ``max_window_layers`` on, where sliding is on."""
    window = read_window(config, default=4096) if config.flag("use_sliding_window", False) else None
    first = config.integer("max_window_layers", default=28, low=0, high=MAX_LAYERS)
    return read_windows(config, layers, window, [i >= first for i in range(layers)])


def build(config: Fields) -> Built:
    dims = read_dims(config)
    rope = read_rope(config, head_dim=dims.head_dim, max_position=dims.max_position)
    windows = layer_windows(config, dims.layers)
    act = config.activation("hidden_act")
    layers = [
        pre_norm_layer(
            i,
            dims,
            attention(i, dims, rope, window=windows[i], qkv_bias=True),
            gated_mlp(f"model.layers.{i}.mlp", dims.hidden, dims.intermediate, act),
        )
        for i in range(dims.layers)
    ]
    spec = assemble("qwen2", dims, layers)
    return spec, stored_tensors(spec)
