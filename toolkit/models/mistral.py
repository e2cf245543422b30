"""Mistral: Llama whose every layer may slide over ``sliding_window`` tokens. Source: arXiv 2310.06825."""

from __future__ import annotations

from toolkit.models.config_fields import Fields
from toolkit.models.decoder import (
    Built,
    assemble,
    attention,
    gated_mlp,
    pre_norm_layer,
    read_dims,
    read_window,
    stored_tensors,
)
from toolkit.models.rope_config import read_rope


def build(config: Fields) -> Built:
    dims = read_dims(config)
    rope = read_rope(config, head_dim=dims.head_dim, max_position=dims.max_position)
    window = read_window(config, default=4096)
    act = config.activation("hidden_act")
    layers = [
        pre_norm_layer(
            i,
            dims,
            attention(i, dims, rope, window=window),
            gated_mlp(f"model.layers.{i}.mlp", dims.hidden, dims.intermediate, act),
        )
        for i in range(dims.layers)
    ]
    spec = assemble("mistral", dims, layers)
    return spec, stored_tensors(spec)
