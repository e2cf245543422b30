"""InternLM2: Llama under other names, with q, k and v in one matrix. Source: the model's own ``modeling_internlm2.py``.

``wqkv`` holds, for each kv head, the rows of its query heads, then of the key head, then of the value head.
"""

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
    stored_tensors,
)
from toolkit.models.rope_config import read_rope

NAMES = {
    "model.embed_tokens": "model.tok_embeddings",
    "lm_head": "output",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def build(config: Fields) -> Built:
    dims = read_dims(config)
    rope = read_rope(config, head_dim=dims.head_dim, max_position=dims.max_position)
    bias = config.flag("bias", False)
    act = config.activation("hidden_act")
    layers = [
        pre_norm_layer(
            i,
            dims,
            attention(i, dims, rope, qkv_bias=bias, o_bias=bias),
            gated_mlp(f"model.layers.{i}.mlp", dims.hidden, dims.intermediate, act),
        )
        for i in range(dims.layers)
    ]
    spec = assemble("internlm2", dims, layers)
    return spec, stored_tensors(spec, _rename, [_wqkv(dims)])


def _rename(name: str) -> str:
    for ours, theirs in NAMES.items():
        if name.endswith(ours):
            return name.removesuffix(ours) + theirs
    return name


def _wqkv(dims: Dims) -> Fused:
    d, q_per_kv = dims.head_dim, dims.heads // dims.kv_heads
    block = (q_per_kv + 2) * d
    starts = [h * block for h in range(dims.kv_heads)]
    return Fused(
        "attention.wqkv",
        {
            "self_attn.q_proj": tuple((s, s + q_per_kv * d) for s in starts),
            "self_attn.k_proj": tuple((s + q_per_kv * d, s + (q_per_kv + 1) * d) for s in starts),
            "self_attn.v_proj": tuple((s + (q_per_kv + 1) * d, s + block) for s in starts),
        },
    )
