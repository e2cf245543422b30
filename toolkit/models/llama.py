"""Llama 1 to 3.2 and what is built like it (SmolLM2, Yi, Vicuna …). Source: transformers ``LlamaForCausalLM``."""

from __future__ import annotations

from toolkit.models.config_fields import Fields
from toolkit.models.decoder import Built, assemble, attention, gated_mlp, pre_norm_layer, read_dims, stored_tensors
from toolkit.models.rope_config import read_rope


def build(config: Fields) -> Built:
    dims = read_dims(config)
    rope = read_rope(config, head_dim=dims.head_dim, max_position=dims.max_position)
    bias = config.flag("attention_bias", False)
    mlp_bias = config.flag("mlp_bias", False)
    act = config.activation("hidden_act")
    layers = [
        pre_norm_layer(
            i,
            dims,
            attention(i, dims, rope, qkv_bias=bias, o_bias=bias),
            gated_mlp(f"model.layers.{i}.mlp", dims.hidden, dims.intermediate, act, mlp_bias),
        )
        for i in range(dims.layers)
    ]
    spec = assemble("llama", dims, layers)
    return spec, stored_tensors(spec)
