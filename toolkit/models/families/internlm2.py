"""InternLM2: Llama under other names, with q, k and v joined kv head by kv head. Source: the model's own
``modeling_internlm2.py``."""

from __future__ import annotations

from toolkit.models.config.dims import read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built, llama_like
from toolkit.models.families import llama
from toolkit.models.family import Family, Tiny
from toolkit.models.spec import HeadLayer
from toolkit.models.stored import fused_by_kv_head, renamed

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
    return llama_like(
        config,
        dims,
        attention_bias=config.flag("bias", True),
        rename=renamed(NAMES),
        fused=[fused_by_kv_head(dims, "attention.wqkv")],
    )


DYNAMIC = dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0)
FAMILY = Family(
    "internlm2",
    "InternLM 2, 2.5; InternLM2 Reward",
    ("InternLM2ForCausalLM",),
    build,
    (
        Tiny(
            dict(bias=False, rope_theta=10000.0, rope_scaling=dict(type="dynamic", factor=2.0)),
            dict(rope_parameters=DYNAMIC),
        ),
        Tiny(dict(bias=True, num_key_value_heads=1), dict(attention_bias=True, num_key_value_heads=1)),
    ),
    llama.GGUF,
    twin="llama",
    reward=(HeadLayer("v_head"),),
)
