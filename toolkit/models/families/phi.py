"""Phi-1, 1.5 and 2: attention and a plain MLP side by side after one layer norm, biases throughout. Source:
transformers ``PhiForCausalLM``."""

from __future__ import annotations

from functools import partial

from toolkit.models.config.dims import read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import PARALLEL_NORM, Built, layer_norm, llama_like, plain_mlp
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import PLAIN_BLOCK, Gguf, without
from toolkit.models.stored import renamed

NAMES = {
    "self_attn.o_proj": "self_attn.dense",
    "mlp.up_proj": "mlp.fc1",
    "mlp.down_proj": "mlp.fc2",
    "model.norm": "model.final_layernorm",
}


def build(config: Fields) -> Built:
    dims = read_dims(config, eps=1e-5)
    config.only(qk_layernorm=False)
    if dims.tied:
        config.fail("tie_word_embeddings", True, "false, as in all released models: the head has a bias")
    act = config.activation("hidden_act", default="gelu_new")
    return llama_like(
        config,
        dims,
        partial_rotary=0.5,
        attention_bias=True,
        activation=act,
        feed_forward=lambda i: plain_mlp(i, dims, act, True),
        norm=partial(layer_norm, eps=dims.eps, bias=True),
        norms=PARALLEL_NORM,
        parallel=True,
        rename=renamed(NAMES),
        head_bias=True,
    )


FAMILY = Family(
    "phi",
    "Phi 1, 1.5, 2",
    ("PhiForCausalLM",),
    build,
    (
        Tiny(dict(num_key_value_heads=4)),
        Tiny(
            dict(
                num_attention_heads=2,
                num_key_value_heads=1,
                rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25),
            )
        ),
    ),
    Gguf(
        "phi2",
        "phi",
        without(PLAIN_BLOCK, "ffn_norm"),
        eps="layer_norm_eps",
        fields={"hidden_act": "gelu_new"},
    ),
)
