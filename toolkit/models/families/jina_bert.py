"""Jina Embeddings 2: BERT with ALiBi on both sides and GeGLU. Source: the models' own code (Günther et al. 2023)."""

from __future__ import annotations

from dataclasses import replace

from toolkit.models.classifier import pooled_classifier
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built
from toolkit.models.encoder import NO_GGUF, encoder, encoder_dims, renamed_within, types_of
from toolkit.models.families.bert import NAMES as BERT
from toolkit.models.families.bert import spelled
from toolkit.models.family import Family, Tiny
from toolkit.models.positions import alibi_slopes
from toolkit.models.spec import AlibiSpec, EncoderSpec
from toolkit.models.stored import fused_gate_up

NAMES = {**BERT, "mlp.down_proj": "mlp.wo", "post_mlp_layernorm": "mlp.layernorm"}


def build(config: Fields) -> Built:
    config.text("position_embedding_type", default="absolute", choices=("alibi",))
    kind = config.text("feed_forward_type", default="original", choices=("geglu", "reglu"))
    dims = encoder_dims(config, 1e-12)
    alibi = AlibiSpec(alibi_slopes(dims.heads))
    return encoder(
        config,
        dims,
        activation="gelu" if kind == "geglu" else "relu",
        extras=EncoderSpec(**types_of(config)),
        gated=True,
        up_bias=False,
        change=lambda i, own: replace(own, alibi=alibi),
        rename=renamed_within(NAMES),
        fused=[fused_gate_up(dims, "mlp.gated_layers")],
    )


FAMILY = Family(
    "jina_bert",
    "Jina Embeddings 2 (base and small, English and bilingual), Jina Reranker 1",
    ("JinaBertModel", "JinaBertForMaskedLM", "JinaBertForSequenceClassification"),
    build,
    (Tiny(dict(position_embedding_type="alibi", feed_forward_type="geglu", type_vocab_size=2, num_attention_heads=4)),),
    NO_GGUF,
    spellings=spelled("bert"),
    encodes=True,
    classifier=lambda config: pooled_classifier(config, "bert."),
)
