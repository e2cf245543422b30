"""BERT: norms behind each sum, learned positions, two types of tokens. Source: transformers ``BertModel``."""

from __future__ import annotations

from toolkit.models.classifier import pooled_classifier
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built
from toolkit.models.encoder import (
    EMBED_NORM,
    GGUF_BLOCK,
    GGUF_TOP,
    POSITIONS,
    TYPES,
    encoder,
    encoder_dims,
    gguf_types,
    renamed_within,
    types_of,
)
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import Gguf, without
from toolkit.models.spec import EncoderSpec

NAMES = {
    "model.embed_tokens": "embeddings.word_embeddings",
    POSITIONS: "embeddings.position_embeddings.weight",
    TYPES: "embeddings.token_type_embeddings.weight",
    EMBED_NORM: "embeddings.LayerNorm",
    "self_attn.q_proj": "attention.self.query",
    "self_attn.k_proj": "attention.self.key",
    "self_attn.v_proj": "attention.self.value",
    "self_attn.o_proj": "attention.output.dense",
    "post_attention_layernorm": "attention.output.LayerNorm",
    "mlp.up_proj": "intermediate.dense",
    "mlp.down_proj": "output.dense",
    "post_mlp_layernorm": "output.LayerNorm",
}


def learned_positions(config: Fields, offset: int) -> Built:
    """BERT whose positions are counted from ``offset``."""
    config.text("position_embedding_type", default="absolute", choices=("absolute",))
    dims = encoder_dims(config, 1e-12)
    if offset >= dims.max_position:
        config.fail("max_position_embeddings", dims.max_position, f"more than {offset}, where positions begin")
    extras = EncoderSpec(POSITIONS, dims.max_position, offset, **types_of(config))
    spec, stored = encoder(
        config,
        dims,
        activation=config.activation("hidden_act", default="gelu"),
        extras=extras,
        rename=renamed_within(NAMES),
        max_length=dims.max_position - offset,
    )
    return spec, stored


def build(config: Fields) -> Built:
    return learned_positions(config, 0)


def spelled(model: str) -> tuple[tuple[str, ...], ...]:
    """``Family.spellings`` of tensors that models with a head have under the name of the model inside."""
    return tuple((part, f"{model}.{part}") for part in ("embeddings.", "encoder."))


FAMILY = Family(
    "bert",
    "BERT; bge, e5, gte and MiniLM embeddings in English, MS MARCO cross-encoders",
    ("BertModel", "BertForMaskedLM", "BertForPreTraining", "BertForSequenceClassification"),
    build,
    (Tiny(dict(type_vocab_size=2)),),
    Gguf(
        "bert",
        "bert",
        without(GGUF_BLOCK, "ffn_gate"),
        eps="layer_norm_eps",
        fields={"hidden_act": "gelu", "position_embedding_type": "absolute"},
        read=gguf_types,
        top=GGUF_TOP,
    ),
    spellings=spelled("bert"),
    encodes=True,
    classifier=lambda config: pooled_classifier(config, "bert."),
)
