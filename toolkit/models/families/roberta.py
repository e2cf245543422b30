"""RoBERTa: BERT whose positions begin behind the id of the padding token. Source: transformers ``RobertaModel``,
``XLMRobertaModel``, which is the same."""

from __future__ import annotations

from toolkit.models.classifier import classifier_head
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built
from toolkit.models.encoder import NO_GGUF
from toolkit.models.families.bert import learned_positions, spelled
from toolkit.models.family import Family, Tiny
from toolkit.models.spec import HeadLayer, TextHead


def build(config: Fields) -> Built:
    return learned_positions(config, 1 + config.integer("pad_token_id", default=1, low=-1, high=1000))


def classifier(config: Fields) -> TextHead:
    layers = (HeadLayer("classifier.dense", activation="tanh"), HeadLayer("classifier.out_proj"))
    return classifier_head(config, "cls", *layers)


_HEADS = ("Model", "ForMaskedLM", "ForSequenceClassification")
FAMILY = Family(
    "roberta",
    "RoBERTa, XLM-RoBERTa, CamemBERT; bge-m3, multilingual e5, bge rerankers",
    tuple(name + head for name in ("Roberta", "XLMRoberta", "Camembert") for head in _HEADS),
    build,
    (Tiny(dict(type_vocab_size=1, pad_token_id=1)),),
    NO_GGUF,
    spellings=spelled("roberta"),
    encodes=True,
    classifier=classifier,
)
