"""MPT: ALiBi, layer norms without biases, a plain MLP. Source: transformers ``MptForCausalLM``, which has no
``expansion_ratio`` but 4 and no ``alibi_bias_max`` but 8, and the models' own code, which has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.models.config.dims import Dims, read_other_dims
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built, layer_norm, llama_like, plain_mlp
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import PLAIN_BLOCK, QKV, Gguf, Metadata, as_wide_as_the_model
from toolkit.models.positions import alibi_slopes
from toolkit.models.spec import AlibiSpec, DecoderSpec
from toolkit.models.stored import fused_qkv, renamed

NAMES = {
    "model.embed_tokens": "transformer.wte",
    "model.norm": "transformer.norm_f",
    "input_layernorm": "norm_1",
    "post_attention_layernorm": "norm_2",
    "self_attn.o_proj": "attn.out_proj",
    "mlp.up_proj": "ffn.up_proj",
    "mlp.down_proj": "ffn.down_proj",
}


def build(config: Fields) -> Built:
    inner = config.inner("attn_config")
    dims = _dims(config)
    inner.only(": positions that are learned are not read", alibi=True)
    inner.text("attn_type", default="multihead_attention", choices=("multihead_attention",))
    inner.only(qk_ln=False, prefix_lm=False)
    config.only(no_bias=True)
    alibi = AlibiSpec(_slopes(dims.heads, float(inner.integer("alibi_bias_max", default=8))))
    clip = inner.number("clip_qkv", default=None)
    return llama_like(
        config,
        dims,
        rope=[None] * dims.layers,
        scale=inner.number("softmax_scale", default=None),
        activation="gelu",
        change=lambda i, a: replace(a, alibi=alibi, clip=clip),
        feed_forward=lambda i: plain_mlp(i, dims, "gelu", False),
        norm=partial(layer_norm, eps=dims.eps),
        rename=renamed(NAMES, {"model.layers.": "transformer.blocks."}),
        fused=[fused_qkv(dims, "attn.Wqkv")],
    )


def _dims(config: Fields) -> Dims:
    return read_other_dims(
        config,
        hidden=("d_model", "hidden_size"),
        layers=("n_layers", "num_hidden_layers"),
        heads=("n_heads", "num_attention_heads"),
        inner=lambda width: config.integer("expansion_ratio", default=4, high=64) * width,
        length=("max_seq_len",),
        tied=True,
    )


def _slopes(heads: int, most: float) -> tuple[float, ...]:
    """Of a number of heads that is no power of two, every second one of those of the power above first."""
    power = 1 << (heads - 1).bit_length()
    every = alibi_slopes(power, most)
    return every if power == heads else (*every[1::2], *every[::2])[:heads]


def _read(file: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    inner: dict[str, Any] = {"alibi": True, "alibi_bias_max": int(file.number("attention.max_alibi_bias", 8.0))}
    if file.has("attention.clamp_kqv"):
        inner["clip_qkv"] = file.number("attention.clamp_kqv")
    return {
        "d_model": config["hidden_size"],
        "n_heads": config["num_attention_heads"],
        "n_layers": config["num_hidden_layers"],
        "max_seq_len": config["max_position_embeddings"],
        "expansion_ratio": config["intermediate_size"] // config["hidden_size"],
        "attn_config": inner,
    }


def _write(spec: DecoderSpec) -> dict[str, Any]:
    as_wide_as_the_model(spec, "mpt")
    first = spec.attention_layers()[0][1]
    if first.heads & (first.heads - 1):
        raise ToolkitError(f"gguf: llama.cpp's mpt has other slopes than this model with {first.heads} heads")
    assert first.alibi is not None
    most = -math.log2(first.alibi.slopes[-1])
    return {"attention.max_alibi_bias": most, **({} if first.clip is None else {"attention.clamp_kqv": first.clip})}


SIZES = dict(d_model=64, n_heads=4, n_layers=2, max_seq_len=512)
FAMILY = Family(
    "mpt",
    "MPT 7B, 30B; Replit Code 3B",
    ("MptForCausalLM", "MPTForCausalLM"),
    build,
    (
        Tiny(dict(SIZES, attn_config=dict(clip_qkv=0.7))),
        Tiny(dict(SIZES, d_model=96, n_heads=6)),
    ),
    Gguf(
        "mpt",
        "mpt",
        PLAIN_BLOCK,
        biases=False,
        alibi=True,
        joined=QKV,
        eps="layer_norm_epsilon",
        read=_read,
        write=_write,
    ),
)
