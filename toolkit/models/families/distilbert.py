"""DistilBERT: BERT with half its layers, and one type of tokens. Source: transformers ``DistilBertModel``."""

from __future__ import annotations

from dataclasses import replace

from toolkit.models.classifier import classifier_head
from toolkit.models.config.dims import read_other_dims
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built
from toolkit.models.encoder import EMBED_NORM, NO_GGUF, POSITIONS, encoder, renamed_within
from toolkit.models.family import Family, Tiny
from toolkit.models.spec import EncoderSpec, HeadLayer, TextHead

NAMES = {
    "model.embed_tokens": "embeddings.word_embeddings",
    POSITIONS: "embeddings.position_embeddings.weight",
    EMBED_NORM: "embeddings.LayerNorm",
    "self_attn.q_proj": "attention.q_lin",
    "self_attn.k_proj": "attention.k_lin",
    "self_attn.v_proj": "attention.v_lin",
    "self_attn.o_proj": "attention.out_lin",
    "post_attention_layernorm": "sa_layer_norm",
    "mlp.up_proj": "ffn.lin1",
    "mlp.down_proj": "ffn.lin2",
    "post_mlp_layernorm": "output_layer_norm",
}


def build(config: Fields) -> Built:
    dims = read_other_dims(
        config, hidden=("dim",), layers=("n_layers",), heads=("n_heads",), inner=lambda _: config.integer("hidden_dim")
    )
    return encoder(
        config,
        replace(dims, eps=1e-12),
        activation=config.activation("activation", default="gelu"),
        extras=EncoderSpec(POSITIONS, dims.max_position),
        rename=renamed_within(NAMES, "transformer.layer."),
    )


def _classifier(config: Fields) -> TextHead:
    return classifier_head(config, "cls", HeadLayer("pre_classifier", activation="relu"), HeadLayer("classifier"))


FAMILY = Family(
    "distilbert",
    "DistilBERT; multi-qa, msmarco and distiluse embeddings made of it",
    ("DistilBertModel", "DistilBertForMaskedLM", "DistilBertForSequenceClassification"),
    build,
    (Tiny(dict(dim=64, n_layers=2, n_heads=4, hidden_dim=128)),),
    NO_GGUF,
    spellings=tuple((part, f"distilbert.{part}") for part in ("embeddings.", "transformer.")),
    encodes=True,
    classifier=_classifier,
)
