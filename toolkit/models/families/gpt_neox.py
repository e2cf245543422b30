"""GPT-NeoX and Pythia: layer norms, a plain MLP, side by side or not, q, k and v joined head by head. Source:
transformers ``GPTNeoXForCausalLM``."""

from __future__ import annotations

from functools import partial

from toolkit.models.config.fields import Fields
from toolkit.models.config.rope import read_rope
from toolkit.models.decoder import Built, fused_by_kv_head, layer_norm, llama_like, plain_mlp, read_dims, renamed
from toolkit.models.family import Family, Tiny

NAMES = {
    "model.embed_tokens": "gpt_neox.embed_in",
    "model.norm": "gpt_neox.final_layer_norm",
    "lm_head": "embed_out",
    "self_attn.o_proj": "attention.dense",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}


def build(config: Fields) -> Built:
    dims = read_dims(config, eps=1e-5)
    act = config.activation("hidden_act", default="gelu")
    endings = renamed(NAMES)
    bias = config.flag("attention_bias", True)
    return llama_like(
        config,
        dims,
        rope=read_rope(
            config,
            head_dim=dims.head_dim,
            max_position=dims.max_position,
            default_theta=config.number("rotary_emb_base", default=10_000.0, low=1.0),
            default_partial=config.number("rotary_pct", default=0.25, high=1.0),
        ),
        qkv_bias=bias,
        o_bias=bias,
        activation=act,
        feed_forward=lambda i: plain_mlp(i, dims, act, True),
        norm=partial(layer_norm, eps=dims.eps, bias=True),
        parallel=config.flag("use_parallel_residual", True),
        rename=lambda name: endings(name).replace("model.layers.", "gpt_neox.layers."),
        fused=[fused_by_kv_head(dims, "attention.query_key_value")],
    )


FAMILY = Family(
    "gpt_neox",
    "Pythia, GPT-NeoX 20B, Dolly 2, RedPajama-INCITE",
    ("GPTNeoXForCausalLM",),
    build,
    (
        Tiny(dict(num_key_value_heads=4)),
        Tiny(dict(num_key_value_heads=4, use_parallel_residual=False, hidden_act="gelu_new")),
    ),
    "llama.cpp joins q, k and v of GPT-NeoX in its own way, which this tool does not write yet",
)
