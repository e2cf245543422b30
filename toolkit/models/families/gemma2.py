"""Gemma 2: norms around each sublayer with weights stored as w - 1, soft-capped scores and logits, scaled embeddings,
every other layer sliding. Source: arXiv 2408.00118 and transformers ``Gemma2ForCausalLM``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.models.config.dims import read_dims, read_window, read_windows
from toolkit.models.config.fields import Fields
from toolkit.models.config.rope import read_rope
from toolkit.models.decoder import SANDWICH_NORMS, Built, LayerNorms, llama_like
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import BLOCK, Gguf, Metadata
from toolkit.models.gguf import SANDWICH_NORMS as GGUF_NORMS
from toolkit.models.spec import DecoderSpec

FIELDS = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}


def build(config: Fields, norms: LayerNorms = SANDWICH_NORMS) -> Built:
    dims = read_dims(config, tied=True, head_dim=256, kv_heads=4)
    config.only(" (a decoder is causal)", use_bidirectional_attention=False)
    window = read_window(config, default=4096)
    windows = read_windows(config, dims.layers, window, [i % 2 == 0 for i in range(dims.layers)])
    kinds = ["full_attention" if w is None else "sliding_attention" for w in windows]
    sets = {
        kind: read_rope(config, head_dim=dims.head_dim, max_position=dims.max_position, layer_type=kind)
        for kind in dict.fromkeys(kinds)
    }
    return llama_like(
        config,
        dims,
        rope=[sets[kind] for kind in kinds],
        windows=windows,
        attention_bias=config.flag("attention_bias", False),
        scale=config.number("query_pre_attn_scalar", default=256.0) ** -0.5,
        softcap=softcap(config, "attn_logit_softcapping", 50.0),
        activation=config.activation("hidden_activation", default="gelu_pytorch_tanh"),
        norms=norms,
        norm_offset=1.0,
        embed_scale=dims.hidden**0.5,
        logit_softcap=softcap(config, "final_logit_softcapping", 30.0),
    )


def softcap(config: Fields, name: str, default: float | None) -> float | None:
    """An explicit null turns the cap off."""
    if name in config.values and config.values[name] is None:
        return None
    return config.number(name, default=default)


def _read(file: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    # The file does not state the query scale; the 27B model, of 46 layers, is the one that departs from head_dim.
    large = config["num_hidden_layers"] == 46
    return {
        "attn_logit_softcapping": file.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.number("final_logit_softcapping", 30.0),
        "sliding_window": file.whole("attention.sliding_window", 4096),
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]
        if large
        else config["head_dim"],
    }


def _write(spec: DecoderSpec) -> dict[str, Any]:
    layers = spec.attention_layers()
    scores = layers[0][1].softcap
    if scores is None or spec.logit_softcap is None:
        raise ToolkitError("gguf: llama.cpp's gemma2 caps scores and logits, this model does not cap both")
    if any((a.window is None) != (i % 2 == 1) for i, a in layers):
        raise ToolkitError("gguf: llama.cpp's gemma2 slides in every other layer from the first, this model does not")
    return {"attn_logit_softcapping": scores, "final_logit_softcapping": spec.logit_softcap}


def _scale(spec: DecoderSpec) -> float:
    first = spec.attention_layers()[0][1]
    return ((spec.hidden_size // first.heads) if len(spec.layers) == 46 else first.head_dim) ** -0.5


FAMILY = Family(
    "gemma2",
    "Gemma 2",
    ("Gemma2ForCausalLM",),
    build,
    (
        Tiny(dict(head_dim=32, sliding_window=16, query_pre_attn_scalar=24, num_hidden_layers=4)),
        Tiny(dict(head_dim=24, sliding_window=16, query_pre_attn_scalar=24, num_key_value_heads=1)),
    ),
    Gguf(
        "gemma2",
        "gemma2",
        {**BLOCK, **GGUF_NORMS},
        biases=False,
        window=True,
        fields=FIELDS,
        read=_read,
        write=_write,
        scale=_scale,
    ),
)
