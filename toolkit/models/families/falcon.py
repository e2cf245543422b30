"""Falcon 7B, 11B, 40B, 180B: layer norms, a plain MLP beside attention, q, k and v joined kv head by kv head. Falcon-RW
has ALiBi. Source: transformers ``FalconForCausalLM``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.models.config.dims import Dims, read_dims
from toolkit.models.config.fields import MAX_LAYERS, Fields
from toolkit.models.decoder import PARALLEL_NORM, PRE_NORMS, Built, LayerNorms, layer_norm, llama_like, plain_mlp
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import PLAIN_BLOCK, QKV, Gguf, Metadata, as_wide_as_the_model
from toolkit.models.positions import alibi_slopes, to_bfloat16
from toolkit.models.spec import AlibiSpec, DecoderSpec
from toolkit.models.stored import fused_by_kv_head, renamed

NAMES = {
    "model.embed_tokens": "transformer.word_embeddings",
    "model.norm": "transformer.ln_f",
    "self_attn.o_proj": "self_attention.dense",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}
TWO_NORMS: LayerNorms = (("ln_attn", None), ("input_layernorm", None))


def build(config: Fields) -> Built:
    dims = _dims(config)
    alibi = None
    if config.flag("alibi", False):  # added before scores are scaled
        slopes = tuple(to_bfloat16(x) for x in alibi_slopes(dims.heads))
        alibi = AlibiSpec(slopes, dims.head_dim**-0.5, rounded=True)
    bias = config.flag("bias", False)
    act = config.activation("activation", default="gelu")
    norms, parallel = _arrangement(config)
    names = {**NAMES, "input_layernorm": "ln_mlp"} if norms == TWO_NORMS else NAMES
    return llama_like(
        config,
        dims,
        rope=None if alibi is None else [None] * dims.layers,
        attention_bias=bias,
        activation=act,
        change=lambda i, a: replace(a, alibi=alibi),
        feed_forward=lambda i: plain_mlp(i, dims, act, bias),
        norm=partial(layer_norm, eps=dims.eps, bias=True),
        norms=norms,
        parallel=parallel,
        rename=renamed(names, {"model.layers.": "transformer.h."}),
        fused=[fused_by_kv_head(dims, "self_attention.query_key_value")],
    )


def _dims(config: Fields) -> Dims:
    """The sizes, of which some have names of their own; the oldest files have ``n_layer`` and ``n_head``."""
    heads = config.integer("num_attention_heads", "n_head", high=100_000)
    kv_heads = config.integer("num_kv_heads", "n_head_kv", default=heads, high=100_000)
    if config.flag("multi_query", True) and not _is_new(config):
        kv_heads = 1
    usual = {
        "num_hidden_layers": config.integer("num_hidden_layers", "n_layer", high=MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": config.integer("ffn_hidden_size", default=4 * config.integer("hidden_size")),
        "max_position_embeddings": config.integer("max_position_embeddings", default=2048, high=1 << 30),
    }
    return read_dims(config.changed(usual), eps=1e-5, tied=True)


def _is_new(config: Fields) -> bool:
    """Whether the layers are those of 40B; its oldest files say so by their ``model_type`` alone."""
    return config.flag("new_decoder_architecture", config.values.get("model_type") == "RefinedWeb")


def _arrangement(config: Fields) -> tuple[LayerNorms, bool]:
    """The norms of a layer, and whether its sublayers stand side by side."""
    new = _is_new(config)
    if not config.flag("parallel_attn", True):
        return PRE_NORMS, False
    two = config.integer("num_ln_in_parallel_attn", default=2 if new else 1, high=2) == 2
    return (TWO_NORMS if new and two else PARALLEL_NORM), True


def _read(file: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    kv_heads = config["num_key_value_heads"]
    two = "blk.0.attn_norm_2.weight" in file.tensors
    return {
        "ffn_hidden_size": config["intermediate_size"],
        "num_kv_heads": kv_heads,
        "new_decoder_architecture": two or kv_heads > 1,
        "num_ln_in_parallel_attn": 2 if two else 1,
        "multi_query": kv_heads == 1,
    }


def _write(spec: DecoderSpec) -> dict[str, Any]:
    as_wide_as_the_model(spec, "falcon")
    if not spec.layers[0].beside(1):
        raise ToolkitError("gguf: llama.cpp's falcon has attention and MLP side by side, this model has not")
    return {}


FAMILY = Family(
    "falcon",
    "Falcon 7B, 40B, 180B; Falcon RW 1B, 7B; Falcon 2 11B",
    ("FalconForCausalLM", "RWForCausalLM"),
    build,
    (
        Tiny(dict(multi_query=True, num_attention_heads=2)),
        Tiny(dict(new_decoder_architecture=True, num_kv_heads=2)),
        Tiny(dict(new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1, bias=True)),
        Tiny(dict(multi_query=False, parallel_attn=False, bias=True, tie_word_embeddings=False)),
        Tiny(
            dict(alibi=True, multi_query=False, num_attention_heads=6, hidden_size=96, parallel_attn=False, bias=True)
        ),
    ),
    Gguf(
        "falcon",
        "falcon",
        {**PLAIN_BLOCK, "attn_norm_2": "ln_attn"},
        biases=False,
        joined=QKV,
        eps="layer_norm_epsilon",
        fields={"activation": "gelu", "bias": False, "parallel_attn": True},
        read=_read,
        write=_write,
    ),
)
