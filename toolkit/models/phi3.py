"""Phi-3 and Phi-3.5 mini and medium: q, k, v in one matrix, gate and up in another, LongRoPE.
Source: transformers ``Phi3ForCausalLM``."""

from __future__ import annotations

from toolkit.models.config_fields import Fields
from toolkit.models.decoder import (
    Built,
    Dims,
    Fused,
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
    dims = read_dims(config, eps=1e-5)
    rope = read_rope(
        config,
        head_dim=dims.head_dim,
        max_position=dims.max_position,
        aliases={"su": "longrope", "yarn": "longrope"},  # names of earlier releases
    )
    window = read_window(config)
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
    spec = assemble("phi3", dims, layers)
    return spec, stored_tensors(spec, fused=[_qkv(dims), _gate_up(dims)])


def _qkv(dims: Dims) -> Fused:
    q, kv = dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim
    return Fused(
        "self_attn.qkv_proj",
        {
            "self_attn.q_proj": ((0, q),),
            "self_attn.k_proj": ((q, q + kv),),
            "self_attn.v_proj": ((q + kv, q + 2 * kv),),
        },
    )


def _gate_up(dims: Dims) -> Fused:
    n = dims.intermediate
    return Fused("mlp.gate_up_proj", {"mlp.gate_proj": ((0, n),), "mlp.up_proj": ((n, 2 * n),)})
