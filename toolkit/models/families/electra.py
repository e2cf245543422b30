"""ELECTRA: BERT that was trained to find replaced words. Source: transformers ``ElectraModel``."""

from __future__ import annotations

from toolkit.models.classifier import classifier_head
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built
from toolkit.models.encoder import NO_GGUF
from toolkit.models.families.bert import learned_positions, spelled
from toolkit.models.family import Family, Tiny
from toolkit.models.spec import HeadLayer, TextHead


def build(config: Fields) -> Built:
    narrow, hidden = config.integer("embedding_size", default=128), config.integer("hidden_size")
    if narrow != hidden:
        config.fail("embedding_size", narrow, f"{hidden}, the hidden_size: ELECTRA small does not run here")
    return learned_positions(config, 0)


def _classifier(config: Fields) -> TextHead:
    layers = (HeadLayer("classifier.dense", activation="gelu"), HeadLayer("classifier.out_proj"))
    return classifier_head(config, "cls", *layers)


FAMILY = Family(
    "electra",
    "ELECTRA base, large; MS MARCO cross-encoders made of it",
    ("ElectraModel", "ElectraForPreTraining", "ElectraForMaskedLM", "ElectraForSequenceClassification"),
    build,
    (Tiny(dict(embedding_size=64)),),
    NO_GGUF,
    spellings=spelled("electra"),
    encodes=True,
    classifier=_classifier,
)
