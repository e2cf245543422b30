"""ModernBERT: norms before each part, GeGLU, no biases; two layers of three see a window on both sides, by a rope of
their own. Source: transformers ``ModernBertModel`` (Warner et al. 2024)."""

from __future__ import annotations

from functools import partial
from typing import cast

from toolkit.models.classifier import classifier_head
from toolkit.models.config.dims import layer_ropes, read_windows
from toolkit.models.config.fields import MAX_POSITION, Fields
from toolkit.models.decoder import Built, layer_norm
from toolkit.models.encoder import EMBED_NORM, NO_GGUF, encoder, encoder_dims, renamed_within
from toolkit.models.family import Family, Tiny
from toolkit.models.spec import EncoderSpec, HeadActivation, HeadLayer, Pooling, TextHead
from toolkit.models.stored import fused_gate_up, fused_qkv

NAMES = {
    "model.embed_tokens": "embeddings.tok_embeddings",
    EMBED_NORM: "embeddings.norm",
    "model.norm": "final_norm",
    "self_attn.o_proj": "attn.Wo",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "mlp_norm",
    "mlp.down_proj": "mlp.Wo",
}


def build(config: Fields) -> Built:
    dims = encoder_dims(config, 1e-5)
    every = config.integer("global_attn_every_n_layers", default=3)
    half = config.integer("local_attention", default=128, low=2, high=MAX_POSITION) // 2
    windows = read_windows(config, dims.layers, half + 1, [bool(i % every) for i in range(dims.layers)])
    theta = config.number("global_rope_theta", default=160_000.0, low=1.0)
    local = config.number("local_rope_theta", default=10_000.0, low=1.0)
    attention_bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    return encoder(
        config,
        dims,
        activation=config.activation("hidden_activation", default="gelu"),
        extras=EncoderSpec(),
        rope=layer_ropes(config, dims, windows, theta=theta, local_theta=local),
        windows=windows,
        gated=True,
        attention_bias=attention_bias,
        up_bias=mlp_bias,
        down_bias=mlp_bias,
        norm=partial(layer_norm, eps=dims.eps, bias=config.flag("norm_bias", False)),
        norms_first=True,
        rename=renamed_within(NAMES, "layers."),
        fused=[fused_qkv(dims, "attn.Wqkv"), fused_gate_up(dims, "mlp.Wi")],
    )


def _classifier(config: Fields) -> TextHead:
    act = config.text("classifier_activation", default="gelu", choices=("gelu", "relu", "silu", "tanh"))
    pooling = "mean" if config.text("classifier_pooling", default="cls", choices=("cls", "mean")) == "mean" else "cls"
    hidden = HeadLayer("head.dense", activation=cast(HeadActivation, act))
    norm = HeadLayer("head.norm", "norm", eps=config.number("norm_eps", default=1e-5, high=0.5))
    layers = (hidden, norm, HeadLayer("classifier"))
    return classifier_head(config, cast(Pooling, pooling), *layers)


FAMILY = Family(
    "modernbert",
    "ModernBERT; gte-modernbert, Granite and nomic embeddings made of it",
    ("ModernBertModel", "ModernBertForMaskedLM", "ModernBertForSequenceClassification"),
    build,
    (
        Tiny(dict(local_attention=12, num_hidden_layers=4)),
        Tiny(dict(local_attention=6, norm_bias=True, mlp_bias=True, attention_bias=True, num_hidden_layers=3)),
    ),
    NO_GGUF,
    spellings=tuple((part, f"model.{part}") for part in ("embeddings.", "layers.", "final_norm")),
    encodes=True,
    classifier=_classifier,
)
