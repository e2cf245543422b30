"""Qwen3: an RMS norm over each head of q and k, no biases by default. Source: transformers ``Qwen3ForCausalLM``."""

from __future__ import annotations

from toolkit.models.config_fields import Fields
from toolkit.models.decoder import Built, assemble, attention, gated_mlp, pre_norm_layer, read_dims, stored_tensors
from toolkit.models.qwen2 import layer_windows
from toolkit.models.rope_config import read_rope


def build(config: Fields) -> Built:
    dims = read_dims(config, head_dim=128)
    rope = read_rope(config, head_dim=dims.head_dim, max_position=dims.max_position)
    windows = layer_windows(config, dims.layers)
    bias = config.flag("attention_bias", False)
    act = config.activation("hidden_act")
    layers = [
        pre_norm_layer(
            i,
            dims,
            attention(i, dims, rope, window=windows[i], qkv_bias=bias, o_bias=bias, qk_norm=True),
            gated_mlp(f"model.layers.{i}.mlp", dims.hidden, dims.intermediate, act),
        )
        for i in range(dims.layers)
    ]
    spec = assemble("qwen3", dims, layers)
    return spec, stored_tensors(spec)
