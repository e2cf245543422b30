"""InternLM2: Llama under other names, with q, k and v in one matrix. Source: the model's own ``modeling_internlm2.py``.

``wqkv`` holds, for each kv head, the rows of its query heads, then of the key head, then of the value head.
"""

from __future__ import annotations

from toolkit.models.config_fields import Fields
from toolkit.models.decoder import Built, Dims, Fused, llama_like, read_dims, renamed
from toolkit.models.families import llama
from toolkit.models.family import Family, Tiny

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
    bias = config.flag("bias", False)
    return llama_like(config, dims, qkv_bias=bias, o_bias=bias, rename=renamed(NAMES), fused=[_wqkv(dims)])


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


DYNAMIC = dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0)
FAMILY = Family(
    "internlm2",
    "InternLM 2, 2.5",
    ("InternLM2ForCausalLM",),
    build,
    (
        Tiny(dict(rope_theta=10000.0, rope_scaling=dict(type="dynamic", factor=2.0)), dict(rope_parameters=DYNAMIC)),
        Tiny(dict(bias=True, num_key_value_heads=1), dict(attention_bias=True, num_key_value_heads=1)),
    ),
    llama.GGUF,
    twin="llama",
)
