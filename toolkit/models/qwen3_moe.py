"""Qwen3 MoE: Qwen3 with experts in all layers but ``mlp_only_layers``. Source: transformers ``Qwen3MoeForCausalLM``."""

from __future__ import annotations

from toolkit.models.config_fields import MAX_LAYERS, Fields
from toolkit.models.decoder import (
    Built,
    assemble,
    attention,
    experts,
    gated_mlp,
    pre_norm_layer,
    read_dims,
    read_experts,
    read_window,
    stored_tensors,
)
from toolkit.models.rope_config import read_rope
from toolkit.models.spec import MlpSpec, MoeSpec


def build(config: Fields) -> Built:
    dims = read_dims(config)
    rope = read_rope(config, head_dim=dims.head_dim, max_position=dims.max_position)
    window = read_window(config, default=4096) if config.flag("use_sliding_window", False) else None
    bias = config.flag("attention_bias", False)
    act = config.activation("hidden_act")
    count, top_k = read_experts(config, dims.layers, "num_experts", "num_local_experts")
    inner = config.integer("moe_intermediate_size", default=768)
    norm_topk = config.flag("norm_topk_prob", False)
    dense = config.indices("mlp_only_layers", dims.layers)
    step = config.integer("decoder_sparse_step", default=1, high=MAX_LAYERS)

    def feed_forward(i: int) -> MlpSpec | MoeSpec:
        if i in dense or (i + 1) % step:
            return gated_mlp(f"model.layers.{i}.mlp", dims.hidden, dims.intermediate, act)
        return experts(i, dims.hidden, inner, act, count=count, top_k=top_k, norm_topk=norm_topk)

    layers = [
        pre_norm_layer(
            i,
            dims,
            attention(i, dims, rope, window=window, qkv_bias=bias, o_bias=bias, qk_norm=True),
            feed_forward(i),
        )
        for i in range(dims.layers)
    ]
    spec = assemble("qwen3_moe", dims, layers)
    return spec, stored_tensors(spec)
