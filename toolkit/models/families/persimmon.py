"""Persimmon: layer norms before the sublayers and on q and k, half of each head turns, and a plain MLP whose numbers
are squared. Source: transformers ``PersimmonForCausalLM``."""

from __future__ import annotations

from functools import partial

from toolkit.models.config.dims import read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built, layer_norm, llama_like, plain_mlp
from toolkit.models.family import Family, Tiny
from toolkit.models.stored import Fused, renamed

NAMES = {
    "model.norm": "model.final_layernorm",
    "self_attn.o_proj": "self_attn.dense",
    "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}


def build(config: Fields) -> Built:
    dims = read_dims(config.changed({"head_dim": None, "num_key_value_heads": None}), eps=1e-5)
    act = config.activation("hidden_act", default="relu2")
    block = 3 * dims.head_dim
    rows = {
        part: tuple((h * block + at * dims.head_dim, h * block + (at + 1) * dims.head_dim) for h in range(dims.heads))
        for at, part in enumerate("qkv")
    }
    joined = Fused("self_attn.query_key_value", {f"self_attn.{part}_proj": spans for part, spans in rows.items()})
    return llama_like(
        config,
        dims,
        partial_rotary=0.5,
        attention_bias=True,
        qk_norm=config.flag("qk_layernorm", True),
        activation=act,
        feed_forward=lambda i: plain_mlp(i, dims, act, True),
        norm=partial(layer_norm, eps=dims.eps, bias=True),
        rename=renamed(NAMES),
        fused=[joined],
    )


FAMILY = Family(
    "persimmon",
    "Persimmon 8B",
    ("PersimmonForCausalLM",),
    build,
    (Tiny({}), Tiny(dict(num_attention_heads=2, qk_layernorm=False, tie_word_embeddings=True))),
    "llama.cpp has no such architecture any more",
)
