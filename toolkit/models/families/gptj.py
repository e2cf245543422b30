"""GPT-J: attention and a plain MLP side by side after one layer norm, the first numbers of each head turn in
neighbouring pairs. Source: transformers ``GPTJForCausalLM``."""

from __future__ import annotations

from functools import partial

from toolkit.models.config.dims import Dims, read_other_dims
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import PARALLEL_NORM, Built, layer_norm, llama_like, plain_mlp
from toolkit.models.family import Family, Tiny
from toolkit.models.spec import RopeSpec
from toolkit.models.stored import Fused, renamed

NAMES = {
    "model.embed_tokens": "transformer.wte",
    "model.norm": "transformer.ln_f",
    "input_layernorm": "ln_1",
    "self_attn.q_proj": "attn.q_proj",
    "self_attn.k_proj": "attn.k_proj",
    "self_attn.v_proj": "attn.v_proj",
    "self_attn.o_proj": "attn.out_proj",
    "mlp.up_proj": "mlp.fc_in",
    "mlp.down_proj": "mlp.fc_out",
}


def build(config: Fields) -> Built:
    return like_gptj(config, read_gpt_dims(config))


def read_gpt_dims(config: Fields, tied: bool = False) -> Dims:
    """The sizes by the names of GPT-2's config. ``tied``: what its absence means."""
    return read_other_dims(
        config,
        hidden=("n_embd", "hidden_size"),
        layers=("n_layer", "num_hidden_layers"),
        heads=("n_head", "num_attention_heads"),
        inner=lambda width: config.integer("n_inner", default=4 * width),
        length=("n_positions", "max_position_embeddings"),
        tied=tied,
    )


def like_gptj(config: Fields, dims: Dims, fused: tuple[Fused, ...] = ()) -> Built:
    """GPT-J, or CodeGen, whose q, k and v stand in one matrix."""
    config.only(", as in all released models: the head has a bias", tie_word_embeddings=False)
    act = config.activation("activation_function", default="gelu_new")
    turned = config.integer("rotary_dim", default=64, high=dims.head_dim)
    return llama_like(
        config,
        dims,
        rope=RopeSpec(turned, 10_000.0, max_position=dims.max_position),
        activation=act,
        feed_forward=lambda i: plain_mlp(i, dims, act, True),
        norm=partial(layer_norm, eps=dims.eps, bias=True),
        norms=PARALLEL_NORM,
        parallel=True,
        rename=renamed(NAMES, {"model.layers.": "transformer.h."}),
        fused=fused,
        pairs=True,
        head_bias=True,
    )


SIZES = dict(n_embd=64, n_layer=2, n_head=4, n_positions=512)
FAMILY = Family(
    "gptj",
    "GPT-J 6B, Dolly 1, GPT4All-J",
    ("GPTJForCausalLM",),
    build,
    (
        Tiny(dict(SIZES, rotary_dim=8)),
        Tiny(dict(SIZES, n_head=2, rotary_dim=16, n_inner=96, activation_function="relu")),
    ),
    "llama.cpp has the name gptj and computes no such model",
)
